"""The draft's own embedding, replaced by the target's."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual, ruled_out
from eagle_trace_analysis.checkpoint.weights import same_rows
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def own_embedding(context: Context) -> tuple[bool | None, str]:
    """Whether the draft trained an embedding other than its target's, and the figures; None if not to be known."""
    if not context.has_training:
        return False, "a server shares its target's embedding with the draft"
    draft = context.train_draft
    own = draft.tensors.get("embed_tokens.weight") if draft else None
    theirs = context.train_target.embedding if context.train_target else None
    if own is None:
        return (False, "the draft ships no embedding") if draft else (None, "there is no trained checkpoint")
    if theirs is None or not (own.is_float and theirs.is_float) or own.shape != theirs.shape:
        trains = context.trained.get("embed_requires_grad")
        return (
            None if trains is None else bool(trains)
        ), f"embed_requires_grad {str(bool(trains)).lower()} in training"
    equal, of, error = same_rows(own, theirs, lambda rows: rows)
    return equal < of, f"{equal:,} of {of:,} rows of the draft's embedding equal its target's (relative L2 {error:.1e})"


def check(context: Context) -> Outcome:
    """The embedding the server uses, against the trained one and the target's."""
    own, figures = own_embedding(context)
    if own is False and not context.agrees("embed"):
        return ruled_out(f"{figures}: replacing it changes nothing")

    def target_rows(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        theirs = context.target.embedding if context.target else None
        if theirs is not None:
            weights = replay.weights.borrowing("embed_tokens.weight", theirs)
            yield Hypothesis(f"the target's embedding ({figures})", replay.varied(weights=weights))

    return counterfactual(
        context,
        ["embed"],
        target_rows,
        lambda _: context.fix(
            "embedding",
            "train without embed_requires_grad, or serve with an engine that keeps the draft's own embedding",
        ),
    )


CAUSE = Cause(
    "embedding-replaced",
    "Lower accept length; tokens are equal, their embeddings are not.",
    "Embedded rows recomputed from the trained embedding and from the target's; and both embeddings row by row.",
    "Train with a frozen embedding, or serve with an engine that keeps the draft's own.",
    ("embed",),
    check,
    of_training=True,
)
