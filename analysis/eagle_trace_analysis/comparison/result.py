"""What a diff says: plain data, and verdicts that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.sketch import ROW_ERROR
from eagle_trace_analysis.comparison.tolerance import Tolerance
from eagle_trace_analysis.pairing.pairs import Coverage
from eagle_trace_analysis.pairing.roles import Roles
from eagle_trace_analysis.shown import html_of

if TYPE_CHECKING:
    from eagle_trace_analysis.comparison.rowwise import RowFigures
    from eagle_trace_analysis.comparison.tipped import Tipped
    from eagle_trace_analysis.diagnosis.diagnose import Diagnosis

Kind = Literal["shape", "presence", "parameters", "nonfinite", "tokens", "positions", "ids", "values", "step"]
SiteVerdict = Literal["agree", "diverged", "not compared"]
Verdict = Literal["agree", "diverged", "incomparable"]


@dataclass(frozen=True)
class RowKey:
    """Which row: the train side's prompt_id, the serve side's, and what both call it."""

    prompt_id: int
    serve_prompt_id: int
    prompt_key: str
    root: int
    step: int
    path: tuple[int, ...]


@dataclass(frozen=True)
class Divergence:
    """One place where train and serve part.

    Attributes:
        site: where.
        step: 0 for the extend row, s for the s-th draft step.
        kind: what differs; ``parameters`` are the weights as loaded, and ``step`` is what the server computes from its
            own inputs (`eagle_trace_analysis.diagnosis.proof`), both also where the figures stay within tolerance.
        why: one sentence with both sides' figures.
        train: facts of the train side at the worst row (shape, dtype, norm, ... whatever there is).
        serve: the same for the serve side.
        row: the worst row; None where no row is concerned (shape, presence).
        statistic: for `values`, the statistic that is furthest beyond what is allowed.
        value: its value.
        allowed: what is allowed.
    """

    site: str
    step: int
    kind: Kind
    why: str
    train: Mapping[str, Any]
    serve: Mapping[str, Any]
    row: RowKey | None = None
    statistic: str | None = None
    value: float | None = None
    allowed: float | None = None

    @property
    def prompt_key(self) -> str | None:
        """Key of the worst row's prompt."""
        return self.row.prompt_key if self.row else self.train.get("prompt_key")

    @property
    def prompt_id(self) -> int | None:
        """The train side's number of that prompt."""
        return self.row.prompt_id if self.row else self.train.get("prompt_id")

    @property
    def root(self) -> int | None:
        """Root of the worst row."""
        return self.row.root if self.row else None


@dataclass(frozen=True)
class SiteResult:
    """One site at one step.

    Attributes:
        site, step: where.
        coverage: fate of both sides' rows of this site and step.
        metrics: what was measured; None if no rows were compared.
        tolerance: what is allowed; None for sites that are compared exactly.
        divergence: how it diverged; None if it did not.
        reason: why it was not compared, if it was not.
        frontier: diverged, and nothing it is computed from did.
    """

    site: str
    step: int
    coverage: Coverage | None = None
    metrics: Metrics | IdMetrics | None = None
    tolerance: Tolerance | None = None
    divergence: Divergence | None = None
    reason: str | None = None
    frontier: bool = False

    @property
    def verdict(self) -> SiteVerdict:
        """agree, diverged, or not compared."""
        if self.divergence is not None:
            return "diverged"
        return "not compared" if self.reason is not None else "agree"


@dataclass(frozen=True)
class Note:
    """Something to know that is no divergence, by name."""

    name: str
    text: str


@dataclass(frozen=True)
class AcceptLength:
    """Accept length the server got: tokens committed a verify round, the bonus token included.

    A round commits the accepted draft tokens and one token of the target's own, so 1.0 means that no draft
    token was ever accepted, and the largest possible is the draft's depth + 1.

    Attributes:
        observed: mean over verify rounds; None if the serve trace holds no rounds ("not known").
        rounds: verify rounds.
        by_depth: of the rounds that proposed a token at depth d = 1, 2, ... and accepted all above it, the
            share that accepted one at depth d.
        by_prompt: mean over the rounds of each prompt, by prompt_key.
        predicted: what the training-side forward would get on the same tokens (`prediction.py`), counted alike;
            None if it cannot be said.
        predicted_by_depth: its shares by depth, conditional like `by_depth`.
        predicted_rounds: rounds it stands on.
        predicted_basis: ``walk`` (each round starts where the one before ended) or ``rounds`` (the server's own).
        undecided: of `predicted_rounds`, those not known at every depth.
        better, worse: of the server's rounds, those where training would have had more accepted, or fewer.
        branches: most branches that a proposed token had: 1 for a chain.
        predicted_range: of a tree, the least and the most that `predicted` lies between; None for a chain's.
        reference: of two servers, what the reference got; None for another pair.
    """

    observed: float | None
    rounds: int = 0
    by_depth: tuple[float, ...] = ()
    by_prompt: Mapping[str, float] = field(default_factory=dict)
    predicted: float | None = None
    predicted_by_depth: tuple[float, ...] = ()
    predicted_rounds: int = 0
    predicted_basis: str = ""
    undecided: int = 0
    better: int = 0
    worse: int = 0
    branches: int = 1
    reference: float | None = None
    predicted_range: tuple[float, float] | None = None

    @property
    def comparable(self) -> bool:
        """Whether observed and predicted are both known, and both of a chain or both of a tree."""
        alike = self.branches == 1 or self.predicted_range is not None
        return self.observed is not None and self.predicted is not None and alike


@dataclass(frozen=True)
class Failure:
    """Something a gate does not let through.

    Attributes:
        name: ``accept-length``, ``diverges-now``, ``error-grew`` or ``no-longer-compared``.
        text: one sentence, with figures.
        site, step: where, if anywhere.
    """

    name: str
    text: str
    site: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Gate:
    """What was asked of a comparison beyond that the two agree (`eagle_trace_analysis.gate`).

    Attributes:
        failures: what fails it.
        unknown: why it cannot be judged; None if it can.
        max_drop: greatest share of the accept length that may be lost; None if that was not asked.
        baseline: the trace that this one must not be worse than; None if that was not asked.
    """

    failures: tuple[Failure, ...] = ()
    unknown: str | None = None
    max_drop: float | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Diff:
    """The result of comparing two traces. Of any pair the reference is called ``train`` and the other ``serve``
    (`eagle_trace_analysis.pairing.roles`).

    Attributes:
        sites: every site and step, in (step, forward order).
        coverage: fate of the draft rows.
        minimum_share: share of the serve side's comparable rows that must be matched for `agree`.
        incomparable: why nothing can be said; None if something can.
        accept_length: what the server got.
        benign: differences that cannot matter, by name.
        notes: what else to know.
        level: level at which the two were compared.
        tolerance: where the tolerances come from.
        traces: provenance of both sides.
        diagnosis: every cause with its verdict; None if it was not asked for.
        gate: what else was asked, and whether it holds; None if nothing was.
        tipped: what the margins of the target's routers say of features that differ; None if there is nothing to say.
        figures: the traces, their alignment and the figures of each row, as they were compared; None if they are gone.
    """

    sites: tuple[SiteResult, ...]
    coverage: Coverage
    minimum_share: float
    incomparable: str | None
    accept_length: AcceptLength
    benign: tuple[Note, ...]
    notes: tuple[Note, ...]
    level: str
    tolerance: str
    traces: Mapping[str, Mapping[str, Any]]
    diagnosis: Diagnosis | None = None
    gate: Gate | None = None
    tipped: Tipped | None = field(default=None, compare=False, repr=False)
    figures: RowFigures | None = field(default=None, compare=False, repr=False)

    @property
    def roles(self) -> Roles:
        """What the two traces are called where a reader is told of them."""
        return Roles.of(self.traces)

    @property
    def captures(self) -> Coverage:
        """Fate of all captures: `coverage` of the draft rows, summed over every site and step instead."""
        return Coverage.total([site.coverage for site in self.sites if site.coverage is not None])

    @property
    def frontier(self) -> tuple[Divergence, ...]:
        """Divergences that follow from no other, first one first: shapes and presence, then (step, forward
        order).
        """
        found = [site.divergence for site in self.sites if site.frontier and site.divergence is not None]
        return tuple(sorted(found, key=lambda one: one.kind not in ("shape", "presence")))

    @property
    def first_divergence(self) -> Divergence | None:
        """Where the two sides first part."""
        return next(iter(self.frontier), None)

    @property
    def verdict(self) -> Verdict:
        """diverged, incomparable or agree.

        A divergence is proof on any number of rows; agreement is none unless enough rows were compared.
        """
        if self.incomparable is not None:
            return "incomparable"
        if self.first_divergence is not None:
            return "diverged"
        return "agree"

    @property
    def row_error(self) -> float | None:
        """Standard error of one row's `rho`, relative to it: 0 where it was measured, None where it is no estimate."""
        return {"values": 0.0, "sketch": ROW_ERROR}.get(self.level)

    @property
    def exit_status(self) -> int:
        """0 agree, 1 diverged, 2 could not compare; with a baseline, 1 only for what is worse than it."""
        if self.gate is not None and self.verdict != "incomparable":
            if self.gate.failures:
                return 1
            if self.gate.unknown is not None:
                return 2
            if self.gate.baseline is not None:
                return 0
        return {"agree": 0, "diverged": 1, "incomparable": 2}[self.verdict]

    def __repr__(self) -> str:
        first = self.first_divergence
        where = f" at {first.site}, step {first.step}" if first is not None else ""
        return f"Diff({self.verdict}{where}; {len(self.sites)} sites and steps, level {self.level})"

    def _repr_html_(self) -> str | None:
        return html_of(self)
