"""The head: tied to the embedding, or the target's."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Measured, measure
from eagle_trace_analysis.replay.weights import Weights, sampled

Real = NDArray[Any]


def _with_head(context: Context, head: StoredTensor) -> tuple[Measured, int] | None:
    """How well the server's logits are norm x `head`, and how many rows of it were compared."""
    replay = context.replay
    if replay is None:
        return None
    logits, norm = replay.recorded.values("logits"), replay.recorded.values("norm")
    if logits is None or norm is None or len(head.shape) != 2 or head.shape[1] != norm.values.shape[1]:
        return None
    channels = sampled(min(logits.values.shape[1], head.shape[0]))
    rows = (logits.present & norm.present).nonzero()[0]
    if not rows.size:
        return None
    held = Weights({"head": head}, replay.recorded.trace.manifest.dtype).rows("head", channels)
    dtype = replay.recorded.dtype
    x_TW: Real = norm.values[rows].astype(dtype)
    w_CW: Real = held.astype(dtype)
    expected: Real = x_TW @ w_CW.T
    control = context.control.measure("logits", 0) if context.control else None
    allowed = replay.allowed("logits", control if isinstance(control, Measured) else None)
    return measure(logits.values[rows][:, channels], expected, allowed), len(channels)


def _as_trained(context: Context) -> str | None:
    """The head recomputed as trained, in words, if that explains the server's logits."""
    nodes = [one for one in context.nodes(["logits"]) if one.serve is not None]
    if not nodes or any(one.verdict == "faulty" for one in nodes):
        return None
    worst = max(nodes, key=lambda one: one.serve.ratio if one.serve else 0)
    return worst.serve.against() if worst.serve else None


def _has_none(context: Context) -> bool:
    """Whether the trained draft is known to store no head."""
    draft = context.train_draft
    if draft is None:
        return False
    return "lm_head.weight" not in {context.engine.canonical_name(one.name) for one in draft.tensors.values()}


def check_tied(context: Context) -> Outcome:
    """tie_word_embeddings: the head is the target's embedding."""
    tied = bool(context.served.get("tie_word_embeddings"))
    if (good := _as_trained(context)) is not None:
        return ruled_out(f"tie_word_embeddings {str(tied).lower()}; logits as the trained head makes them: {good}")
    return _check(context, tied=True, flagged=tied)


def check_from_target(context: Context) -> Outcome:
    """draft_vocab_size absent or null: the head is the target's."""
    absent = context.served.get("draft_vocab_size") is None
    if (good := _as_trained(context)) is not None:
        size = context.served.get("draft_vocab_size")
        return ruled_out(f"draft_vocab_size {size}; logits as the trained head makes them: {good}")
    return _check(context, tied=False, flagged=absent)


def _check(context: Context, *, tied: bool, flagged: bool) -> Outcome:
    if (other := context.other_algorithm) is not None:
        return ruled_out(f"the server ran {other}, which always takes the target's head: see single-layer-features")
    if context.replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    target = context.target
    head = (target.embedding if tied else target.head) if target is not None else None
    what = "the target's embedding" if tied else "the target's head"
    setting = "tie_word_embeddings is on" if tied else "draft_vocab_size is not set"
    if head is None:
        if not flagged:
            return ruled_out(
                f"{setting.replace(' is on', ' is off').replace('is not set', 'is set')} in the deployed config"
            )
        return not_tested(f"{setting}, and the target's weights are not there", "give --target with weights")
    found = _with_head(context, head)
    if found is None:
        return not_tested("logits and norm were not recorded together", RECORD_VALUES)
    figures, rows = found
    if figures.reproduced and flagged and _has_none(context):
        return ruled_out(f"the draft was trained without a head of its own, and has {what}: {figures.against()}")
    if figures.reproduced and flagged:
        evidence = f"{setting}; the server's logits are norm x {what} ({rows} rows of it): {figures.against()}"
        fix = (
            context.fix("tied-head", "set tie_word_embeddings to false")
            if tied
            else context.fix("vocabulary", "set draft_vocab_size as trained")
        )
        return confirmed(evidence, fix, "logits")
    if not figures.reproduced:
        return ruled_out(f"logits are not norm x {what}: {figures.words()}")
    # a target whose own head is its embedding makes the two alike: the settings tell them apart
    return ruled_out(f"logits are norm x {what}, but that is not what the deployed config asks for here")


CAUSES = (
    Cause(
        "lm-head-tied",
        "Lower accept length; everything up to the final norm is equal.",
        "The server's logits recomputed from its own final norm with the target's embedding.",
        "Set tie_word_embeddings to false in the deployed config.",
        ("logits",),
        check_tied,
    ),
    Cause(
        "lm-head-from-target",
        "Low accept length; the server has logits over the target's vocabulary.",
        "The server's logits recomputed from its own final norm with the target's head.",
        "Set draft_vocab_size in the deployed config.",
        ("logits",),
        check_from_target,
    ),
)
