"""What else the deployed folder says otherwise than the training, for a fault that shares its step with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle_trace_analysis.replay.form import Form
from eagle_trace_analysis.replay.replay import Replay
from eagle_trace_analysis.tensors.loaded import Apart

#: fields of the form that a deployed config says, beside its rotation
FIELDS = ("eps", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "head_norm", "window", "scale")


@dataclass(frozen=True)
class Company:
    """What the deployed folder says, but for one cause's own: in words, and as a replay that has it all."""

    words: str
    replay: Replay


def company_of(trained: Replay, served: Form | None, apart: Sequence[Apart], own: Sequence[str]) -> Company | None:
    """All that is deployed otherwise than trained, but for `own`; None if nothing is.

    Args:
        trained: the replay as trained.
        served: the form as the deployed config has it.
        apart: parameters that were loaded with other numbers.
        own: what to leave as trained: names of `FIELDS`, ``rope frequencies``, ``rope layout``, ``weights``.
    """
    changed: dict[str, Any] = {}
    words = []
    if served is not None:
        for name in FIELDS:
            value = getattr(served, name)
            if name not in own and value != getattr(trained.form, name):
                changed[name] = value
                words.append(f"{name} {value}".lower())
        mine = trained.form.rope
        theirs = served.rope
        if "rope frequencies" in own:
            theirs = replace(mine, partial=theirs.partial, interleaved=theirs.interleaved)
        if "rope layout" in own:
            theirs = replace(theirs, partial=mine.partial, interleaved=mine.interleaved)
        if theirs != mine:
            changed["rope"] = theirs
            if (bare := replace(theirs, partial=mine.partial, interleaved=mine.interleaved)) != mine:
                words.append(bare.words())
            if theirs.partial != mine.partial:
                words.append(f"{theirs.partial:g} of each head rotated")
            if theirs.interleaved != mine.interleaved:
                words.append("neighbouring elements rotated" if theirs.interleaved else "halves rotated")
    weights = trained.weights
    held = {one.name: one.held for one in apart if one.held is not None} if "weights" not in own else {}
    for name, tensor in held.items():
        weights = weights.borrowing(name, tensor)
    if held:
        words.append("the weights as loaded")
    if not words:
        return None
    return Company(f"the deployed {', '.join(words)}", trained.varied(weights=weights, **changed))
