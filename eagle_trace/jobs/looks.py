"""What one look at a draft in training finds, and what is logged of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from eagle_trace.capture import Array
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.result import AcceptLength, Divergence

#: name of everything that is logged
NAME = "eagle_trace"
#: `first_divergence` where nothing diverges
NOWHERE = -1


@dataclass(frozen=True)
class Look:
    """One look at a draft in training.

    Attributes:
        step: optimizer steps done.
        seconds: what it took, of the training's time.
        accept: what the server got, and what is predicted for the draft as it is now.
        first: the first place where the two part that does not follow from weights which training has moved; None if
            there is none.
        place: its number in the forward order of the sites, -1 for none; None where the two could not be compared.
        causes: confirmed causes of it.
        incomparable: why the two could not be compared, None if they could.
    """

    step: int = 0
    seconds: float = 0.0
    accept: AcceptLength = field(default_factory=lambda: AcceptLength(None))
    first: Divergence | None = None
    place: int | None = None
    causes: tuple[str, ...] = ()
    incomparable: str | None = None

    def values(self) -> dict[str, float | str]:
        """What is logged, by name."""
        found: dict[str, float | str] = {f"{NAME}/seconds": self.seconds}
        if self.accept.predicted is not None:
            found[f"{NAME}/accept_length"] = self.accept.predicted
        for depth, share in enumerate(self.accept.predicted_by_depth, start=1):
            found[f"{NAME}/accept_share_{depth}"] = share
        if self.place is not None:
            found[f"{NAME}/first_divergence"] = float(self.place)
            found[f"{NAME}/first_divergence_at"] = self.where
        return found

    @property
    def where(self) -> str:
        """The place in words: site, step and causes."""
        if self.first is None:
            return "none"
        causes = f" ({', '.join(self.causes)})" if self.causes else ""
        return f"{self.first.site}, step {self.first.step}{causes}"


def predicted(trained: Trace, served: Trace) -> AcceptLength:
    """What a server would accept, as `diff` predicts it."""
    from eagle_trace_analysis.comparison.acceptance import accept_length
    from eagle_trace_analysis.comparison.prediction import predict

    return predict(accept_length(served), trained, served)


def own_fault(trained: Trace, tensors: Mapping[str, Any]) -> Divergence | None:
    """The first step that training computes otherwise than its own config says: masks, norms, rotation, maps.

    Args:
        trained: trace of the training, with values.
        tensors: the weights it was recorded with, torch tensors by canonical names.
    """
    from eagle_trace.recording.arrays import to_array
    from eagle_trace_analysis.replay.own import HeldTensor, own_steps
    from eagle_trace_analysis.replay.replay import CONTROL_LIMIT

    def array(tensor: Any, rows: Any) -> Array:
        return to_array(tensor if rows is None else tensor[rows])

    held = {
        name: HeldTensor(tuple(one.shape), one.numel() * one.element_size(), partial(array, one))
        for name, one in tensors.items()
    }
    for one in own_steps(trained, held):
        # there is no other side to hold it against, so that only what is far off counts
        if one.serve is not None and one.serve.ratio > CONTROL_LIMIT:
            why = f"training does not compute it as its own config says: {one.serve.against()}"
            return Divergence(one.site, one.step, "step", why, {}, {})
    return None


def confirmed(trained: Trace, other: Trace, moving: Collection[str]) -> tuple[str, ...]:
    """Causes that are confirmed where the two part, but for what follows from weights that have moved.

    Args:
        trained, other: the traces.
        moving: parameters that are trained, by their canonical names.
    """
    from eagle_trace_analysis import diagnosed, diff
    from eagle_trace_analysis.comparison.moved import beside_moved

    whole = diff(trained, other, minimum_share=0.0)
    diagnosis = diagnosed(whole, trained, other).diagnosis
    places = {one.site for one in beside_moved(whole, trained, other, moving).sites if one.divergence is not None}
    return tuple(one.cause for one in diagnosis.confirmed if one.site in places) if diagnosis is not None else ()


def place_of(site: str, *names: Iterable[str]) -> int:
    """The number of a site in the forward order of a draft's sites, from 0.

    Args:
        site: the site.
        names: sites that the traces hold, which say how many layers there are.
    """
    from eagle_trace.sites import known_site, sites_of

    known = {name for some in names for name in some if known_site(name) is not None}
    return [one.name for one in sites_of(sorted({*known, site}))].index(site)
