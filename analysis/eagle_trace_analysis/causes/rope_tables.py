"""Rotary tables of rounded frequencies or angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Replay, Replayed


def check(context: Context) -> Outcome:
    """Tables whose frequencies, or angles, were rounded to bfloat16 before cosines were taken."""

    def others(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        mine = replay.form.rope
        served = context.served_form.rope.rounded if context.served_form else ""
        for rounded in ("", "frequencies", "angles"):
            if rounded != mine.rounded:
                words = f"{rounded} of the rotary tables rounded to bfloat16" if rounded else "exact rotary tables"
                yield Hypothesis(words, replay.varied(rope=replace(mine, rounded=rounded)), rounded == served)

    def fix(_: str) -> str:
        if context.form is not None and context.form.rope.rounded:
            return (
                "the training computes with rotary tables that were built anew in bfloat16, after a sequence longer "
                "than max_position_embeddings + 20 (SpecForge): raise max_position_embeddings in the draft's config "
                "above the longest sequence, and train again"
            )
        return "keep the server's rotary frequencies in float32"

    return counterfactual(
        context, context.layer_sites("attn.q_rope", "attn.k_rope"), others, fix, own=("rope frequencies",)
    )


CAUSE = Cause(
    "rope-tables",
    "Lower accept length the longer the text; queries are equal before the rotation.",
    "The rotation recomputed with tables of frequencies, or angles, that were rounded to bfloat16, and without.",
    "Keep rotary frequencies in float32; train no sequence beyond the tables that the trainer built at the start.",
    ("layer.0.attn.q_rope", "layer.0.attn.k_rope"),
    check,
)
