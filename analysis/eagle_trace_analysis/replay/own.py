"""One side held against what its own config says: each step from the inputs it recorded, with weights from memory.

What is masked, normed, rotated and mapped is seen this way whatever the weights are by now: no other side is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Array
from eagle_trace.reader import Trace
from eagle_trace_analysis.checkpoint.files import StoredTensor
from eagle_trace_analysis.replay.form import form_of
from eagle_trace_analysis.replay.recorded import Recorded, choose
from eagle_trace_analysis.replay.replay import Replay, Replayed, judge
from eagle_trace_analysis.replay.weights import Weights


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that lies in memory, read as one that is stored.

    Attributes:
        shape: of the tensor.
        nbytes: its size.
        array: gives it, or the rows of it that are named, in its own dtype.
    """

    shape: tuple[int, ...]
    nbytes: int
    array: Callable[[NDArray[np.int64] | None], Array]

    def read(self) -> Array:
        """The whole tensor."""
        return self.array(None)

    def rows(self, indices: NDArray[np.int64]) -> Array:
        """Some rows of a matrix, [len(indices), columns]."""
        return self.array(np.asarray(indices))


def own_steps(trace: Trace, tensors: Mapping[str, HeldTensor]) -> tuple[Replayed, ...]:
    """Every step of a trace with values, recomputed from its own inputs; in the order of its sites.

    Args:
        trace: with the draft's config in its manifest.
        tensors: the weights it was recorded with, by canonical names.

    Raises:
        CheckpointError, KeyError, TypeError, ValueError: the config does not describe a decoder.
    """
    form = form_of(cast(dict[str, Any], trace.manifest.draft.get("config") or {}))
    stored = cast(Mapping[str, StoredTensor], tensors)
    replay = Replay(Recorded(trace, choose(trace)), form, Weights(stored, trace.manifest.dtype))
    return tuple(
        judge(replay, None, site, step)
        for step in replay.recorded.steps
        for site, known in replay.sites.items()
        if replay.has_step(site) and (step == 0 or known.steps == "all")
    )
