"""Tolerances: how far two healthy implementations may be apart at a site, and where that number comes from.

``tolerance = 4 x max(measured floor, analytic floor)``, statistic by statistic.

**Measured floor.** The train recorder runs the draft on these very prompts in the serving dtype and in a
reference one dtype higher, and stores how far apart the two are (floors.parquet). It knows what no formula
does: how much this model amplifies a rounding error, and (if both sides computed their own target features)
how far the target itself drifts.

**Analytic floor.** Rounding to nearest is off by at most u times the power of two below the value. With the
error uniform over that interval and the mantissa spread as the logarithm's density, the RMS relative error of
one rounding is 0.425 u: 1.66e-3 for bfloat16 (u = 2^-8), 2.1e-4 for float16 (2^-11), 2.5e-8 for float32
(2^-24). Independent roundings add in squares: R of them give sqrt(R) times that, and two implementations that
round independently sqrt(Ra + Rb). R of a site counts every rounding (`Site.roundings`) of every site it was
computed from, each once: in the same step through `inputs`, from the steps before through `carried`. So R
grows by some 20 a draft step, and the floor by the square root of it: bfloat16 logits (R = 26, 45, 64) have
1.66e-3 sqrt(2 R) = 1.2 % at step 0 and 1.9 % at step 2.

Two things are added to R where they apply:

- *Accumulation.* bfloat16 and float16 products are summed in float32, which is free. A float32 product is
  summed in float32 too, in an order that each kernel chooses: a sum of K terms in blocks of 64 rounds about K
  / 64 times, with partial sums half as large on average, so K / 128 roundings more. K = 21504 makes 3.3e-7
  out of 2.5e-8. (Real pairs on one CPU: at most 9.4e-7 at the mlp's output of step 0, where 3.8e-6 are
  allowed.)
- *Drift of the target.* If the two sides computed their target features independently and no floor was
  measured, each target layer counts as 16 roundings (32 layers: 5 % in bfloat16, 8e-7 in float32).

**What is judged**, each against its own floor:

- `rho_median`: most rows are wrong (a wrong weight, a scale).
- `rho_max`: one row is wrong (a position, a cache slot) under a good median. Rows differ in how much cancels
  in them, so the worst healthy row lies some way above the median (up to 1.8 times in real pairs): the
  analytic floor of the maximum is 2 times that of the median, and 4 times in float32, where nothing is lost
  by it (R = 25: 2.8e-6 is allowed, a row taken from elsewhere is off by 1.4, one target layer's shift by
  1e-2). bfloat16 at R = 25: 9 % is allowed.
- `channel_median`: most channels are wrong while one huge channel carries the norm.
- `scale_median` (float16 and bfloat16): all rows are too long or too short by the same factor. Rounding is
  unbiased, so only what is common to all rows survives in the median of |scale - 1|: a few roundings of a
  huge channel that hardly changes. Its floor is that of min(R, 4) roundings, and never below a quarter of the
  measured `rho_median`; bfloat16 allows 1.9 %, where 4.5 % of `rho_median` would pass from the mlp on.

The tail of the channels (`channel_p99`, `channel_max`) is reported and not judged: in healthy pairs the
logits' 99th percentile lies 9 to 13 times above the median channel, because some channels are near zero in
all rows.

The factor 4 is what keeps bfloat16 from crying wolf. Simulated pairs that round 1.7 times as coarsely as they
should stay below 0.65 of what is allowed, over 40 seeds; real healthy pairs below 0.35. The dtype is the
lower of all that took part: a float32 trace against a bfloat16 one can agree no better than bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

from eagle_trace.reader import Trace
from eagle_trace.sites import Site
from eagle_trace_analysis.comparison.metrics import Metrics

FACTOR = 4.0
ONE_ROUNDING = 0.425
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-24}
#: rows whose RMS is smaller than this have lost digits: float16 keeps fewer of a number below its smallest normal one,
#: and where the exponent is of 8 bits a host may take such a number for zero, which is all of its size
LOST = {"float16": 2.0**-14} | dict.fromkeys(("bfloat16", "float32", "float64"), 2.0**-126 / UNIT["float32"])
#: analytic floor of a statistic, in units of the site's sqrt(Ra + Rb) x 0.425 u
SPREAD = {"rho_median": 1.0, "rho_max": 2.0, "channel_median": 1.0}
FLOAT32_SPREAD = SPREAD | {"rho_max": 4.0}
SCALE = "scale_median"
SCALE_ROUNDINGS = 4
BLOCK_TERMS = 128
ROUNDINGS_PER_TARGET_LAYER = 16
UNKNOWN_TARGET_LAYERS = 32

_TARGET = "target.hidden."


@dataclass(frozen=True)
class Tolerance:
    """What is allowed at one site and step, and why.

    Attributes:
        allowed: by statistic, what it may be at most (for `scale_median`, |scale - 1|).
        measured: measured floor by statistic; None if there is none.
        analytic: analytic floor by statistic.
        roundings: R, the roundings on the way to the site on one side.
        dtype: the lower precision of the two sides.
        source: where the floor that decides (the larger one, for the median) comes from.
    """

    allowed: dict[str, float]
    measured: dict[str, float] | None
    analytic: dict[str, float]
    roundings: float
    dtype: str
    source: str

    def exceeded(self, metrics: Metrics) -> list[str]:
        """Statistics beyond what is allowed, worst (relative to what is allowed) first."""
        over: dict[str, float] = {}
        for name, allowed in self.allowed.items():
            value = getattr(metrics, name)
            if value is None:
                continue
            size = abs(value - 1) if name == SCALE else value
            if not size <= allowed:
                over[name] = size / allowed if allowed else float("inf")
        return sorted(over, key=lambda name: -over[name])


def lower_dtype(names: Sequence[str]) -> str:
    """The least precise of some on-disk dtype names, float32 at best; unknown names are passed over."""
    known = ["float32", *(name for name in names if name in UNIT)]
    return max(known, key=UNIT.__getitem__)


def analytic_floor(roundings: float, dtype: str) -> float:
    """RMS relative error between two implementations that each round `roundings` times in `dtype`."""
    return ONE_ROUNDING * UNIT[dtype] * sqrt(2 * roundings)


class Tolerances:
    """Tolerances of all sites and steps of a pair of traces.

    Args:
        sites: the site list of the pair, in forward order.
        train: the train trace; its floors are used if they were measured in the pair's dtype.
        serve: the serve trace.
        widths: elements of a row, by site.
        floors: the train trace that lends its floors, where `train` is none.
        factor: how many times its floor an error may be.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        train: Trace,
        serve: Trace,
        widths: Mapping[str, int],
        floors: Trace | None = None,
        factor: float = FACTOR,
    ) -> None:
        self._factor = factor
        self._sites = {site.name: site for site in sites}
        self._widths = widths
        self.dtype = lower_dtype([train.manifest.dtype, serve.manifest.dtype])
        self._lent = floors
        self._two_servers = (train.side, serve.side) == ("serve", "serve")
        self._floors = _read_floors(floors or train)
        self.shared_features = shares_features(train, serve)
        # features out of a file have no other precision beside them: a floor of 0 says so, and nothing of rounding
        measured_drift = any(
            site.startswith(_TARGET) and dtype == self.dtype and floor["rho_max"] > 0
            for (site, _, dtype), floor in self._floors.items()
        )
        self._drift_layers = 0 if self.shared_features or measured_drift else _target_layers([train, serve])
        self._ancestors = cache(self._find_ancestors)

    def of(self, site: str, step: int, dtypes: Sequence[str] = ()) -> Tolerance:
        """Tolerance of one site and step whose rows have `dtypes` on the two sides."""
        dtype = lower_dtype([self.dtype, *dtypes])
        roundings = self.roundings(site, step, dtype)
        floor = analytic_floor(roundings, dtype)
        spreads = FLOAT32_SPREAD if dtype == "float32" else SPREAD
        analytic = {name: spread * floor for name, spread in spreads.items()}
        measured, found_step = self._measured(site, step, dtype)
        if UNIT[dtype] > UNIT["float32"]:
            analytic[SCALE] = analytic_floor(min(roundings, SCALE_ROUNDINGS), dtype)
            if measured is not None:
                measured = measured | {SCALE: measured["rho_median"] / FACTOR}
        allowed = {
            name: self._factor * max(floor, measured.get(name, 0.0) if measured else 0.0)
            for name, floor in analytic.items()
        }
        source = f"analytic ({roundings:.0f} roundings in {dtype})"
        if measured and measured["rho_median"] > analytic["rho_median"]:
            source = f"measured in {dtype} on these prompts" + (f" at step {found_step}" if found_step != step else "")
        return Tolerance(allowed, measured, analytic, roundings, dtype, source)

    @property
    def provenance(self) -> str:
        """One sentence on where the tolerances of this pair come from."""
        if not self._floors and self._two_servers:
            return f"analytic only, {self.dtype}: no train trace lends a measured rounding floor (--floors)"
        if not self._floors:
            return f"analytic only, {self.dtype}: the train trace measured no rounding floor"
        dtypes = sorted({dtype for _, _, dtype in self._floors})
        if self.dtype not in dtypes:
            return f"analytic only, {self.dtype}: the train trace measured its floor in {', '.join(dtypes)}"
        lent = f" ({self._lent.path} lends the measured one)" if self._lent is not None else ""
        return f"{self._factor:g} x the larger of the measured and the analytic floor, {self.dtype}{lent}"

    def roundings(self, site: str, step: int, dtype: str) -> float:
        """R: roundings on the way to a site, those of every ancestor counted once."""
        nodes = self._ancestors(site, step)
        total = sum(self._cost(name, dtype) for name, _ in nodes)
        if self._drift_layers and any(name.startswith(_TARGET) or name == "fused" for name, _ in nodes):
            total += self._drift(dtype)
        return total

    def _cost(self, name: str, dtype: str) -> float:
        site = self._sites[name]
        if site.kind == "integer":
            return 0.0
        cost = float(site.roundings)
        if UNIT[dtype] <= UNIT["float32"] and site.product:
            cost += sum(self._widths.get(source, 0) for source in site.inputs) / BLOCK_TERMS
        return cost

    def _drift(self, dtype: str) -> float:
        per_layer = float(ROUNDINGS_PER_TARGET_LAYER)
        if UNIT[dtype] <= UNIT["float32"]:
            # seven products a layer, one of them over the wider intermediate size
            per_layer += 10 * self._widths.get(f"{_TARGET}0", 0) / BLOCK_TERMS
        return self._drift_layers * per_layer

    def _find_ancestors(self, site: str, step: int) -> frozenset[tuple[str, int]]:
        found = {(site, step)}
        for source in sources(self._sites, site, step):
            found |= self._ancestors(*source)
        return frozenset(found)

    def _measured(self, site: str, step: int, dtype: str) -> tuple[dict[str, float] | None, int]:
        """The floor measured at this step, or else at the nearest step before it."""
        for candidate in range(step, -1, -1):
            if (floor := self._floors.get((site, candidate, dtype))) is not None:
                return floor, candidate
        return None, step


def sources(sites: Mapping[str, Site], name: str, step: int) -> list[tuple[str, int]]:
    """Sites that (`name`, `step`) is computed from, with their steps.

    What attention reads from earlier steps stays in its cache, so those sites count at every step before; the
    hidden state comes from the step just before.
    """
    site = sites[name]
    found = [(source, step) for source in site.inputs if source in sites and _has_step(sites[source], step)]
    for source in site.carried if step else ():
        if source not in sites:
            continue
        first = step - 1 if source == "carry" else 0
        found += [(source, earlier) for earlier in range(first, step) if _has_step(sites[source], earlier)]
    return found


def _has_step(site: Site, step: int) -> bool:
    return site.steps == "all" or (site.steps == "first") == (step == 0)


def shares_features(train: Trace, serve: Trace) -> bool:
    """Whether both sides were fed the very same target features, so that no drift of the target is allowed for."""
    given = [trace.manifest.settings.get("features") for trace in (train, serve)]
    if train.side == serve.side:
        replayed = [trace.manifest.settings.get("replayed") for trace in (train, serve)]
        return given == ["serve", "serve"] and bool(replayed[0]) and replayed[0] == replayed[1]
    return given[0] == "serve"


def _read_floors(train: Trace) -> dict[tuple[str, int, str], dict[str, float]]:
    return {
        (row["site"], row["step"], row["dtype"]): {name: float(row[name]) for name in SPREAD}
        for row in train.table("floors").to_pylist()
    }


def _target_layers(traces: Sequence[Trace]) -> int:
    """Number of layers of the target, from whichever manifest says it."""
    for trace in traces:
        config: Any = trace.manifest.target.get("config", trace.manifest.target)
        for facts in (config, config.get("text_config", {}) if isinstance(config, dict) else {}):
            if isinstance(facts, dict) and isinstance(layers := facts.get("num_hidden_layers"), int):
                return layers
    return UNKNOWN_TARGET_LAYERS
