"""Checks on positions: how many there are, how many a training used, and how far a query looks back."""

from __future__ import annotations

from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.subject import Subject


def check_max_position(subject: Subject) -> Finding:
    """`max_position_embeddings` against the training's and the target's."""
    name, cause, served = "max-position", "max-position", subject.engine.positions(subject.full) or 0
    if subject.trained_layer is not None and served < int(subject.trained_layer["max_position_embeddings"]):
        trained = subject.trained_layer["max_position_embeddings"]
        return failed(
            name,
            cause,
            f"max_position_embeddings is {served}, trained {trained}",
            f"set max_position_embeddings to {trained}",
        )
    theirs = subject.engine.positions(subject.target.config) if subject.target else None
    if theirs is not None and served < theirs:
        return warned(
            name,
            cause,
            f"the draft has positions up to {served}, the target up to {theirs}: {subject.engine.ENGINE} does not "
            f"start with the target's own length, and drafts collapse past {served}",
            f"serve with --context-length {served}; or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 and keep "
            f"requests shorter; or raise max_position_embeddings to {theirs} if it was trained so",
        )
    against = "the target's" if theirs is not None else "the training's" if subject.trained_layer else ""
    if not against:
        return skipped(
            name,
            cause,
            f"served with max_position_embeddings {served}: give --target or --reference to compare",
        )
    return passed(name, cause, f"max_position_embeddings {served}, no less than {against}")


def check_rope_tables(subject: Subject) -> Finding:
    """Whether a training's sequences outgrow the rotary tables that its trainer builds once, and then builds wrongly.

    The tables are built in float32; the model, and the frequencies with it, then becomes what it is trained in. A
    sequence with more positions than they have rows has them built anew, from rounded frequencies, for good.
    """
    name, recipe = "rope-tables", subject.recipe
    spare = subject.origin.trainer.SPARE_ROWS if subject.origin is not None else None
    title = subject.origin.trainer.TITLE if subject.origin is not None else "the trainer"
    if recipe is None or recipe.max_length is None:
        given = "the recipe does not say max_length" if recipe is not None else "give --recipe"
        return skipped(name, name, f"{given}: {title} computes wrong positions after a sequence longer than its tables")
    if spare is None:
        return skipped(name, name, f"not known of {title}: whether it keeps rotary tables")
    trained = subject.trained_layer or subject.full
    positions = int(trained["max_position_embeddings"])
    rows, longest = positions + spare, recipe.max_length + recipe.ttt_length - 1
    lengths = (
        f"sequences of up to {recipe.max_length:,} tokens and {recipe.ttt_length} steps reach {longest:,} positions"
    )
    if longest <= rows:
        return passed(name, name, f"{lengths}; the trainer's rotary tables have {rows:,}")
    if recipe.torch_dtype == "float32":
        return passed(name, name, f"{lengths}, the tables have {rows:,}; in float32 they are built anew alike")
    return warned(
        name,
        name,
        f"{lengths}, and {title}'s rotary tables have {rows:,} (max_position_embeddings {positions:,}): from the first "
        f"longer sequence on they are built anew from frequencies rounded to {recipe.torch_dtype}, for every later one",
        f"train with max_position_embeddings of {longest - spare:,} or more in the draft's config, or with a shorter "
        "max_length; a training that is recorded live says whether it happened",
    )


def check_window(subject: Subject) -> Finding:
    """Sliding-window attention, which the engine takes from a server argument and not from the config."""
    source = subject.trained_layer or subject.full
    kinds = source.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        window = source.get("sliding_window")
        return warned(
            "sliding-window",
            "sliding-window",
            f"trained with a sliding window of {window}, which the engine does not read from the config",
            f"serve with --speculative-draft-window-size {window}",
        )
    return passed("sliding-window", "sliding-window", "full attention")
