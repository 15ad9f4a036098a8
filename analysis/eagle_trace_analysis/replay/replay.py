"""Isolated replay: every step recomputed from what one side recorded just before it.

The propagated comparison (diff) finds where two sides first part; behind that everything differs. Here each step
of a side is computed from that side's own inputs, with the trained form and the trained weights. So each faulty
step is found, also behind another fault, and under a changed form (a *counterfactual*) it can be asked which
hypothesis brings the error down to rounding.

**What is allowed.** The recomputation is in one dtype higher than the trace's, so only the host rounds:
0.425 u sqrt(R) for the R roundings of this one step (`tolerance.analytic_floor` counts two sides), times 4.
Where the same recomputation of the *training* side comes out larger (the control), 4 times that is allowed
instead; and a step whose control is beyond `CONTROL_LIMIT` times what is allowed is not judged at all: the
recomputation is then not what the training side computes, and says nothing about the other side.

Within these sizes a fault is still one if it is systematic (`eagle_trace_analysis.replay.systematic`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eagle_trace.sites import Site, sites_of
from eagle_trace_analysis.comparison.metrics import quantile, relative_error, row_errors
from eagle_trace_analysis.comparison.tolerance import BLOCK_TERMS, FACTOR, LOST, ONE_ROUNDING, UNIT
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.families import Step, steps_of
from eagle_trace_analysis.replay.form import Form
from eagle_trace_analysis.replay.inputs import Inputs, NotReplayedError
from eagle_trace_analysis.replay.recorded import Recorded
from eagle_trace_analysis.replay.systematic import Limits, Systematic, systematic
from eagle_trace_analysis.replay.weights import CHANNELS, Weights, sampled

Int = NDArray[np.int64]
Real = NDArray[Any]
Node = tuple[str, int]

#: the worst row and the median channel against the median row
SPREAD = {"rho_median": 1.0, "rho_max": 4.0, "channel_median": 2.0}
CONTROL_LIMIT = 4.0
ATTENTION_ROWS = 48
#: a float32 product is off by some 2e-7 on real hosts whatever its length (1.7e-7 to 2.8e-7 for 128 to 1728 terms)
FLOAT32_PRODUCT = 16.0


@dataclass(frozen=True)
class Recomputed:
    """One step on the rows where all its inputs were recorded.

    Attributes:
        expected: recomputed, [T, C].
        recorded: what the trace holds, [T, C].
        rows: the rows, indices into the sample, int64 [T].
        channels: the outputs, int64 [C].
        limits: what may be systematic.
    """

    expected: Real
    recorded: Real
    rows: Int
    channels: Int
    limits: Limits

    @property
    def row_errors(self) -> Real:
        """Relative L2 error of each row, float64 [T]."""
        return row_errors(self.recorded, self.expected)

    @cached_property
    def systematic(self) -> Systematic | None:
        """What of the error is systematic; None if that cannot be said."""
        return systematic(self.recorded, self.expected, self.channels, self.limits)


@dataclass(frozen=True)
class Measured:
    """How far the recorded rows of a step are from the recomputed ones.

    Attributes:
        rows: how many.
        rho_median, rho_max: relative L2 error of a row.
        channel_median: RMS error of a channel over the channel's RMS.
        nonfinite: recorded elements that are not finite; they count as no error here.
        allowed: what is allowed of each statistic.
        step: the rows themselves, if what is systematic shall be looked at.
        control: the training side's figures; None on the training side itself.
    """

    rows: int
    rho_median: float
    rho_max: float
    channel_median: float
    nonfinite: int
    allowed: dict[str, float]
    step: Recomputed | None = field(default=None, repr=False, compare=False)
    control: Measured | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> float:
        """The size furthest beyond what is allowed, over what is allowed."""
        return max(float(getattr(self, name)) / allowed for name, allowed in self.allowed.items())

    @property
    def systematic(self) -> Systematic | None:
        """What of the error is systematic; None if that cannot be said."""
        return self.step.systematic if self.step is not None else None

    @cached_property
    def excess(self) -> float:
        """What is systematic, over what is allowed beside the control; 0 without a control."""
        # the control's own is not looked at before there is a reason to
        found = self.systematic if self.control is not None else None
        if found is None or self.control is None or found.excess() <= 1:
            return 0.0
        control = self.control.systematic
        return found.excess(control) if control is not None else 0.0

    @property
    def ratio(self) -> float:
        """What is furthest beyond what is allowed, over what is allowed."""
        return max(self.size, self.excess)

    @property
    def reproduced(self) -> bool:
        """Within what is allowed."""
        return self.ratio <= 1

    def figures(self) -> dict[str, float | int]:
        """The figures by name, with what is systematic if that is known."""
        names = ("rows", "rho_median", "rho_max", "channel_median", "nonfinite")
        found = {name: getattr(self, name) for name in names}
        return found | (self.systematic.figures() if self.systematic is not None else {})

    def brief(self) -> str:
        """What is wrong, in a few words."""
        found = self.systematic
        if found is not None and found.excess() > 1:
            return found.words()
        return f"error {self.rho_median:.1e} (median row), {self.allowed['rho_median']:.1e} allowed"

    def words(self) -> str:
        """The figures in words."""
        text = f"error {self.rho_median:.1e} (median row), {self.rho_max:.1e} (worst of {self.rows})"
        found = self.systematic
        # of an error that its size shows, the size says enough
        return f"{text}, {found.words()}" if found is not None and self.size <= 1 < self.excess else text

    def against(self) -> str:
        """The figures and what is allowed."""
        return f"{self.words()}, {self.allowed['rho_median']:.1e} and {self.allowed['rho_max']:.1e} allowed"


@dataclass(frozen=True)
class Replayed:
    """Verdict on one step of one side.

    Attributes:
        site, step: where.
        verdict: ``reproduced``, ``faulty`` or ``not replayed``.
        serve: figures of the serve side; None if it could not be recomputed.
        train: the control.
        reason: why not.
    """

    site: str
    step: int
    verdict: Literal["reproduced", "faulty", "not replayed"]
    serve: Measured | None = None
    train: Measured | None = None
    reason: str | None = None


class Replay:
    """The steps of one side, recomputed under a form and with weights.

    Attributes:
        recorded: the side's sample.
        form: what the forward is said to do.
        weights: with what weights.
        view: what attention sees; by default all of the prompt, as `form.window` says.
    """

    def __init__(self, recorded: Recorded, form: Form, weights: Weights, view: View | None = None) -> None:
        self.recorded, self.form, self.weights = recorded, form, weights
        #: whether `view` is another than the form's
        self.view_given = view is not None
        self.view = view or View(recorded, window=form.window)
        names = [site for site in recorded.trace.sites if recorded.data(site)]
        self.sites: dict[str, Site] = {site.name: site for site in sites_of(names, recorded.trace.family)}
        layers = [int(match.group(1)) for name in names if (match := re.match(r"layer\.(\d+)\.", name))]
        self._last = f"layer.{max(layers, default=0)}"
        self._steps = steps_of(recorded.trace.family)
        self._done: dict[Node, Recomputed | str] = {}

    def varied(self, *, weights: Weights | None = None, view: View | None = None, **form: Any) -> Replay:
        """The same under another form (fields of `Form`), with other weights, or seeing other keys."""
        changed = replace(self.form, **form)
        return Replay(self.recorded, changed, weights or self.weights, view)

    def recompute(self, site: str, step: int) -> Recomputed | str:
        """One step, or why it cannot be recomputed."""
        if (site, step) not in self._done:
            try:
                self._done[site, step] = self._recompute(site, step)
            except NotReplayedError as error:
                self._done[site, step] = str(error)
        return self._done[site, step]

    def channels(self, site: str, rows: Int, channels: Int) -> Real:
        """Any channels of a step that `recompute` can recompute, on rows of the sample where it can: [T, C]."""
        return self.computed(site, rows, channels)[0]

    def computed(self, site: str, rows: Int, channels: Int) -> tuple[Real, NDArray[np.bool_]]:
        """A step on rows of the sample [T, C], and the rows whose inputs are all there, bool [T]."""
        found = self._step(site)
        if found is None:
            raise NotReplayedError(f"{site} is not computed from other sites")
        step, layer = found
        inputs = Inputs(self.recorded, rows, channels, self.form, self.weights, self.view)
        return step(inputs, layer), inputs.present

    def has_step(self, site: str) -> bool:
        """Whether a site is computed from others in a way that is known here."""
        return self._step(site) is not None

    def _step(self, site: str) -> tuple[Step, str] | None:
        """The step that computes a site, and the decoder layer it is said of."""
        at = re.match(r"(layer\.\d+)\.(.+)$", site)
        layer, kind = (at.group(1), at.group(2)) if at else (self._last, site)
        return (self._steps[kind], layer) if kind in self._steps else None

    def measure(self, site: str, step: int, control: Measured | None = None) -> Measured | str:
        """How far a step is from what was recorded, or why that cannot be said."""
        found = self.recompute(site, step)
        if isinstance(found, str):
            return found
        lost = max(LOST.get(dtype, 0.0) for dtype in self._dtypes(site))
        return measure(found.recorded, found.expected, self.allowed(site, control), found, control, lost)

    def allowed(self, site: str, control: Measured | None = None) -> dict[str, float]:
        """What is allowed of each statistic at a site, from roundings and the training side's own figures."""
        unit = self._unit(site)
        floor = ONE_ROUNDING * unit * self._roundings(site, unit) ** 0.5
        if self.sites[site].rotated:
            # hosts reckon the angle, position times frequency, in float32 whatever their dtype
            floor += ONE_ROUNDING * UNIT["float32"] * self._last_position
        return {
            name: FACTOR * max(spread * floor, getattr(control, name) if control else 0.0)
            for name, spread in SPREAD.items()
        }

    def _limits(self, site: str) -> Limits:
        unit = self._unit(site)
        known = self.sites[site]
        position = self._last_position if known.rotated else 0.0
        return Limits.of(unit, self._roundings(site, unit), product=known.product, position=position)

    @property
    def _last_position(self) -> float:
        return float(self.recorded.keys.position.max(initial=0))

    def _unit(self, site: str) -> float:
        return max(UNIT["float32"], *(UNIT.get(dtype, 0.0) for dtype in self._dtypes(site)))

    def _dtypes(self, site: str) -> list[str]:
        data = self.recorded.data(site)
        return [self.recorded.trace.manifest.dtype, *([data.dtype] if data else [])]

    def _roundings(self, name: str, unit: float) -> float:
        site = self.sites[name]
        count = float(max(1, site.roundings) + site.kernel_roundings)
        if unit <= UNIT["float32"]:
            count += FLOAT32_PRODUCT if site.product else 0.0
            count += sum(self.recorded.width(source) or 0 for source in site.inputs) / BLOCK_TERMS
            if name.endswith(".attn.context"):
                # a score is rounded relative to itself, and its exponential is off by as much as the score is
                count += self._score(name.removesuffix(".context")) ** 2
        return count

    @cache  # noqa: B019 (a replay lives as long as a diagnosis)
    def _score(self, attention: str) -> float:
        """Typical size of a score, q k / sqrt(size), of the largest head: |q| |k| / size for unrelated directions."""
        q, k = (self.recorded.values(f"{attention}.{name}_rope") for name in "qk")
        size = self.form.head_dim
        if q is None or k is None or q.values.shape[1] % size or k.values.shape[1] % size:
            return 0.0
        q_norms, k_norms = (
            np.linalg.norm(one.values[one.present].reshape(-1, one.values.shape[1] // size, size), axis=-1)
            for one in (q, k)
        )
        typical = quantile(q_norms.max(axis=-1), 0.5) * quantile(k_norms.max(axis=-1), 0.5) / size
        return typical if np.isfinite(typical) else 0.0

    def _recompute(self, site: str, step: int) -> Recomputed:
        if not self.has_step(site):
            raise NotReplayedError(f"{site} is not computed from other sites")
        target = self.recorded.values(site)
        if target is None:
            raise NotReplayedError(f"{site} was not recorded")
        rows = self.recorded.at_step(step)
        rows = rows[target.present[rows]]
        attention = site.endswith(".attn.context")
        if attention and len(rows) > ATTENTION_ROWS:
            rows = rows[np.linspace(0, len(rows) - 1, ATTENTION_ROWS).astype(np.int64)]
        if not len(rows):
            raise NotReplayedError("no rows recorded at this step")
        channels = sampled(target.values.shape[1], 1 << 30 if attention else CHANNELS)
        expected, present = self.computed(site, rows, channels)
        if expected.shape[1] != len(channels):
            raise NotReplayedError(f"{site} is {target.values.shape[1]} wide, as trained it would be "
                                   f"{expected.shape[1]}")  # fmt: skip
        kept = np.flatnonzero(present)
        if not kept.size:
            raise NotReplayedError("its inputs were not recorded on any row")
        found = target.values[rows[kept]][:, channels]
        return Recomputed(expected[kept], found, rows[kept], channels, self._limits(site))


def measure(
    recorded: Real,
    expected: Real,
    allowed: dict[str, float],
    step: Recomputed | None = None,
    control: Measured | None = None,
    lost: float = 0.0,
) -> Measured:
    """Errors of recorded rows [T, C] against expected ones, relative to an RMS of `lost` where they are smaller
    (`tolerance.LOST`); see `Measured` for the rest.
    """
    d, y = recorded - expected, expected
    if not np.isfinite(d.sum()):
        finite = np.isfinite(d)
        d, y = np.where(finite, d, 0.0), np.where(finite, y, 0.0)
    rho, channel = (_relative(d, y, axis, lost) for axis in (1, 0))
    if float(np.abs(y).max(initial=0.0)) < lost:
        step = None  # what is systematic there is what was lost
    return Measured(
        rows=len(recorded),
        rho_median=quantile(rho, 0.5),
        rho_max=quantile(rho, 1.0),
        channel_median=quantile(channel, 0.5),
        nonfinite=int((~np.isfinite(recorded)).sum()),
        allowed=allowed,
        step=step,
        control=control,
    )


def _relative(d: Real, y: Real, axis: int, lost: float) -> Real:
    """Relative errors along an axis, in float64: a square of what `lost` is would be nothing in float32."""
    error, power = (np.square(one).sum(axis=axis).astype(np.float64) for one in (d, y))
    return relative_error(error, np.maximum(power, lost * lost * y.shape[axis]))


def judge(serve: Replay, train: Replay | None, site: str, step: int) -> Replayed:
    """Judge one step of the serve side."""
    control = train.measure(site, step) if train and site in train.sites else "no training side to hold it against"
    checked = control if isinstance(control, Measured) else None
    if checked is not None and checked.ratio > CONTROL_LIMIT:
        reason = f"this recomputation does not reproduce the training side either ({checked.words()})"
        return Replayed(site, step, "not replayed", train=checked, reason=reason)
    found = serve.measure(site, step, checked)
    if isinstance(found, str):
        return Replayed(site, step, "not replayed", train=checked, reason=found)
    verdict: Literal["reproduced", "faulty"] = "reproduced" if found.reproduced else "faulty"
    return Replayed(site, step, verdict, found, checked)
