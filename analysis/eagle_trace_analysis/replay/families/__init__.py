"""The forward of each family of drafts in numpy: a step per site, by the last part of the site's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from eagle_trace.families import EAGLE3, EAGLE3_MLA, Family
from eagle_trace_analysis.replay.families import eagle3, eagle3_mla
from eagle_trace_analysis.replay.inputs import Inputs

#: (inputs, decoder layer such as ``layer.0``) -> rows [T, C]
Step = Callable[[Inputs, str], NDArray[Any]]
_STEPS: Mapping[str, Mapping[str, Step]] = {
    EAGLE3.name: eagle3.STEPS,
    EAGLE3_MLA.name: eagle3_mla.STEPS,
}


def steps_of(family: Family) -> Mapping[str, Step]:
    """The steps of a family that can be recomputed; none of a family whose forward is not written down here."""
    return _STEPS.get(family.name, {})
