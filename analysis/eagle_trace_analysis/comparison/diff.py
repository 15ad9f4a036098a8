"""Diff: numbers for every site, and the first place where two traces part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import LEVELS
from eagle_trace.errors import IncomparableError
from eagle_trace.reader import Trace
from eagle_trace.sites import TOPK_SITES, Site, family_of, sites_of
from eagle_trace_analysis.comparison.acceptance import accept_length, contradiction
from eagle_trace_analysis.comparison.checks import (
    Shapes,
    check_families,
    check_parameters,
    check_positions,
    check_shapes,
    check_tokens,
    row_key,
    shapes_of,
    two_drafts,
)
from eagle_trace_analysis.comparison.compare import Compared, SiteFold
from eagle_trace_analysis.comparison.fold import Executor, Threads, fold
from eagle_trace_analysis.comparison.frontier import find_frontier, shape_order
from eagle_trace_analysis.comparison.left import least_left
from eagle_trace_analysis.comparison.metrics import ANY_NUMBERS, Metrics
from eagle_trace_analysis.comparison.notes import (
    benign_notes,
    dtype_notes,
    parting_notes,
    row_notes,
    trace_notes,
)
from eagle_trace_analysis.comparison.params import differing
from eagle_trace_analysis.comparison.prediction import predict
from eagle_trace_analysis.comparison.result import Diff, Note, SiteResult
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.comparison.site import site_fold
from eagle_trace_analysis.comparison.sketch import WORDS, widened
from eagle_trace_analysis.comparison.tipped import Tipped, beside_tipped
from eagle_trace_analysis.comparison.tolerance import FACTOR, Tolerances
from eagle_trace_analysis.comparison.topk import check_topk
from eagle_trace_analysis.comparison.words import (
    both,
    extent,
    numeric_divergence,
    provenance,
    why_no_rows,
)
from eagle_trace_analysis.comparison.worst import row_facts
from eagle_trace_analysis.pairing.align import Alignment, align, not_materialised, replays_another
from eagle_trace_analysis.pairing.pairs import Pairs
from eagle_trace_analysis.pairing.roles import Roles, in_order

Results = dict[tuple[str, int], SiteResult]

#: agreement must speak for at least half of what the server computed; a divergence needs no quorum
MINIMUM_SHARE = 0.5


@ANY_NUMBERS
def diff(
    reference: Trace,
    other: Trace,
    *,
    minimum_share: float = MINIMUM_SHARE,
    executor: Executor | None = None,
    floors: Trace | None = None,
    tolerance: float = FACTOR,
) -> Diff:
    """Compare two traces of the same prompts and name the first place where they part.

    Of a train and a serve trace the train trace is the reference, in whichever order they are given. Two traces of one
    side, such as two servers, are compared with the first as the reference.

    Works at the lower of the two levels: ``shapes`` compares shapes, presence, tokens and positions;
    ``stats`` also norms, largest elements and means; ``sketch`` estimates the errors of rows
    (`eagle_trace_analysis.comparison.sketch`); ``values`` measures everything. Values are streamed, so that memory does
    not grow with the traces.

    Args:
        reference: what is taken to be right.
        other: what is held against it.
        minimum_share: share (0..1) of the other trace's comparable rows that must be matched before the traces
            can be said to agree. Rows that are skipped for a reason (`align.SKIP_REASONS`) are not
            comparable.
        executor: who compares the values (`eagle_trace_analysis.comparison.fold`); the cores of this machine if None.
            The result is the same to the last bit.
        floors: a train trace of the same draft whose measured rounding floors are used, where the reference has none.
        tolerance: how many times its rounding floor the error of a site may be.

    Raises:
        IncomparableError: the drafts are of different families, or `floors` is of no use here.
        TraceError: a file cannot be read.
    """
    train, serve = in_order(reference, other)
    check_families(train, serve)
    if floors is not None:
        _check_floors(train, floors)
    comparison = _Comparison(train, serve, executor or Threads(), floors, tolerance)
    found = comparison.run(minimum_share)
    return replace(found.roles.said(found), figures=comparison.figures)


def _check_floors(train: Trace, floors: Trace) -> None:
    if floors.table("floors").num_rows == 0:
        raise IncomparableError(
            f"{floors.path} holds no rounding floors to lend: give the trace of a training (record --mode train)"
        )
    if train.table("floors").num_rows:
        raise IncomparableError(f"{train.path} has measured floors of its own: leave --floors out")


class _Comparison:
    """One run of `diff`."""

    def __init__(
        self, train: Trace, serve: Trace, executor: Executor, floors: Trace | None = None, tolerance: float = FACTOR
    ) -> None:
        self.roles = Roles.of({"train": provenance(train), "serve": provenance(serve)})
        self.train = train
        self.serve = serve
        self.executor = executor
        self.level = min(train.level, serve.level, key=LEVELS.index)
        self.notes: list[Note] = []
        self.benign: list[Note] = []
        self.shapes: tuple[Shapes, Shapes] = (shapes_of(train), shapes_of(serve))
        self.sites = self._known_sites()
        widths = {site: max(width for width, _ in seen) for side in self.shapes for site, seen in side.items()}
        self.tolerances = Tolerances(self.sites, train, serve, widths, floors, tolerance)
        self.alignment: Alignment = align(train, serve)
        self.figures = RowFigures(train, serve, self.alignment)
        self.tipped: Tipped | None = None
        self._logit_errors: tuple[NDArray[np.int64], NDArray[np.float64]] = (
            np.zeros(0, dtype=np.int64),
            np.zeros(0),
        )

    def run(self, minimum_share: float) -> Diff:
        results: Results = {}
        reason = self._nothing_in_common() or two_drafts(self.train, self.serve, self.sites, self.shapes)
        if reason is None:
            results = self._compare()
        self.benign += benign_notes(results, self.tipped)
        self.notes += row_notes(self.alignment, self.serve, self.roles)
        self.notes += dtype_notes(self.train, self.serve, self.tolerances.dtype)
        if self.level == "sketch":
            self.notes.append(Note("sketch", WORDS))
        self.notes += parting_notes(self.alignment, self.roles)
        self.notes += trace_notes(self.train, self.serve)
        frontier = find_frontier(self.sites, results)
        ordered = self._in_order({node: replace(result, frontier=node in frontier) for node, result in results.items()})
        if reason is None and not frontier:
            reason = self._too_little(minimum_share, results) or self._no_numbers(results)
        accept = accept_length(self.serve)
        if self.serve.side != self.train.side:
            accept = predict(accept, self.train, self.serve)
        else:
            accept = replace(accept, reference=accept_length(self.train).observed)
        if reason is None and not frontier and (text := contradiction(accept)) is not None:
            also = "; the training forward replays another recording" if replays_another(self.train, self.serve) else ""
            self.notes.append(Note("accept-length", text + also))
        return Diff(
            sites=tuple(ordered),
            coverage=self.alignment.coverage,
            minimum_share=minimum_share,
            incomparable=reason,
            accept_length=accept,
            benign=tuple(self.benign),
            notes=tuple(self.notes),
            level=self.level,
            tipped=self.tipped,
            tolerance=self.tolerances.provenance,
            traces={"train": provenance(self.train), "serve": provenance(self.serve)},
        )

    # ---- what can be compared ------------------------------------------------------------------------------

    def _known_sites(self) -> list[Site]:
        names = set(self.shapes[0]) | set(self.shapes[1])
        known = set()
        for name in names:
            try:
                sites_of([name])
            except ValueError:
                self.notes.append(Note("unknown-site", f"{name} is no site this version knows: left out"))
            else:
                known.add(name)
        said = [trace.manifest.draft.get("family") for trace in (self.train, self.serve)]
        family = family_of(sorted(known), said[0] or said[1])
        sites, others = family.sites_of(known)
        for name in others:
            self.notes.append(Note("unknown-site", f"{name} is no site of the family {family.name}: left out"))
        for side in self.shapes:
            for name in names - known.difference(others):
                side.pop(name, None)
        return sites

    def _nothing_in_common(self) -> str | None:
        alignment = self.alignment
        if not alignment.prompt_keys:
            train, serve = (list(trace.prompts["prompt_key"]) for trace in (self.train, self.serve))
            return f"no prompt in common: {both(train, serve, 'prompt keys')}{self._ended_early()}"
        if not len(alignment.rows):
            rows = both(extent(self.train), extent(self.serve), "rows")
            return f"no row in common: {rows}{self._ended_early()}"
        if not set(self.shapes[0]) & set(self.shapes[1]):
            return "no site in common: " + both(list(self.shapes[0]), list(self.shapes[1]), "sites")
        return None

    def _ended_early(self) -> str:
        """What to say behind rows that are missing: which recordings never came that far."""
        found = [(trace.path, trace.manifest.ended_early) for trace in (self.train, self.serve)]
        return "".join(f"; of {path} {early}" for path, early in found if early)

    def _too_little(self, minimum_share: float, results: Results) -> str | None:
        coverage = self.alignment.coverage
        if coverage.share >= minimum_share:
            return self._too_few_beside_tipped(minimum_share, results)
        comparable = coverage.matched + coverage.unmatched_serve
        return (
            f"only {coverage.matched} of {comparable} comparable serve rows ({coverage.per_cent}) "
            f"have a train row, fewer than {minimum_share:.0%}: "
            f"{both(extent(self.train), extent(self.serve), 'rows')}{self._ended_early()}. "
            f"{self._record_again()}, or lower --minimum-share"
        )

    def _too_few_beside_tipped(self, minimum_share: float, results: Results) -> str | None:
        """The rest has to speak for rows that the target sent elsewhere as for those that have no partner."""
        if self.tipped is None or not self.tipped.left_out:
            return None
        left = least_left(results.values())
        if self.alignment.coverage.share * left.share >= minimum_share:
            return None
        return (
            f"only {left.text} are left beside those that follow from a row that rounding sent to other experts, fewer "
            f"than {minimum_share:.0%}: compare with --features serve, or lower --minimum-share"
        )

    def _record_again(self) -> str:
        if self.roles.usual:
            return f"Record the train side with --replay {self.serve.path}"
        return "Record both on the same prompts, greedily and as far"

    def _no_numbers(self, results: Results) -> str | None:
        """Agreement above level shapes must speak of numbers."""
        if self.level == "shapes" or any(isinstance(result.metrics, Metrics) for result in results.values()):
            return None
        kept = both(self.train.kept_sites, self.serve.kept_sites, "sites with values")
        return f"no values were compared, though nothing else differs: {kept}. Record both sides with the same --sites"

    # ---- the comparison ------------------------------------------------------------------------------------

    def _compare(self) -> Results:
        results: Results = {}
        faults = check_shapes(shape_order(self.sites), self.train, self.serve, self.shapes)
        for name, divergence in faults.items():
            results[name, divergence.step] = SiteResult(name, divergence.step, divergence=divergence)
        for step, result in check_tokens(self.alignment).items():
            results["token", step] = result
        positions, benign = check_positions(self.alignment)
        self.benign += benign
        for step, result in positions.items():
            results["position", step] = result
        sites = [site for site in self.sites if site.kind == "value" and site.name not in faults]
        results |= self._compare_values(sites)
        results, self.tipped = beside_tipped(
            (self.train, self.serve),
            self.sites,
            self.tolerances.dtype,
            results,
            self.figures.errors,
            self._judged_again,
        )
        if self.level != "shapes" and not set(TOPK_SITES) & set(faults) and self._both_have(TOPK_SITES[0]):
            wrong = [
                step for (site, step), result in results.items() if site == "logits" and result.verdict == "diverged"
            ]
            for node, result in check_topk(self.alignment, self._logit_errors, wrong).items():
                if node not in results or results[node].divergence is None:
                    results[node] = result
        results |= check_parameters(differing(self.train, self.serve), results)
        return results

    def _both_have(self, site: str) -> bool:
        return all(site in side for side in self.shapes)

    def _compare_values(self, sites: Sequence[Site]) -> Results:
        found: dict[str, Results] = {site.name: {} for site in sites}

        def to_compare() -> Iterator[SiteFold]:
            for site in sites:
                site_or_why = self._site_fold(site)
                if isinstance(site_or_why, SiteFold):
                    yield site_or_why
                else:
                    found[site.name] = site_or_why

        for done in fold(to_compare(), self.executor):
            found[done.site] = self._results_of(done)
        return {node: result for results in found.values() for node, result in results.items()}

    def _judged_again(self, pairs: Mapping[str, Pairs]) -> Results:
        """Sites compared by these pairs alone; the figures of all rows stay as they are."""
        whole = (site_fold(self.train, self.serve, site, one) for site, one in pairs.items() if len(one))
        found = {done.site: done.result() for done in fold(whole, self.executor)}
        return {
            (site, step): self._result(site, step, one, found.get(site, {}).get(step))
            for site, one in pairs.items()
            for step in one.steps
        }

    def _site_fold(self, site: Site) -> SiteFold | Results:
        """A site ready to be compared, or why it is not."""
        name = site.name
        first = 1 if site.steps == "later" else 0
        if not self._both_have(name):
            excuses = [
                *not_materialised(self.train, name).values(),
                *not_materialised(self.serve, name).values(),
            ]
            return {(name, first): SiteResult(name, first, reason=excuses[0])} if excuses else {}
        data = [trace.site_data(name) for trace in (self.train, self.serve)]
        if self.level == "shapes" or not all(data):
            return {(name, first): SiteResult(name, first, reason="shapes alone were compared (level shapes)")}
        if len({one.width for side in data for one in side}) > 1:
            return {(name, first): SiteResult(name, first, reason="its shape changes from call to call on both sides")}
        pairs = self.alignment.pairs(name)
        if not len(pairs):
            return {(name, step): self._result(name, step, pairs, None) for step in pairs.steps}
        return site_fold(self.train, self.serve, name, pairs)

    def _results_of(self, site: SiteFold) -> Results:
        found, pairs = site.result(), site.pairs
        self.figures.keep(site.site, pairs, found.values())
        if site.site == "logits":
            logits = [(pairs.train[part.pairs], part.logits.largest_error) for part in found.values() if part.logits]
            if logits:
                self._logit_errors = np.concatenate([a for a, _ in logits]), np.concatenate([b for _, b in logits])
        return {(site.site, step): self._result(site.site, step, pairs, found.get(step)) for step in pairs.steps}

    def _result(self, name: str, step: int, pairs: Pairs, found: Compared | None) -> SiteResult:
        coverage = pairs.coverage(step)
        if found is None:
            return SiteResult(name, step, coverage, reason=why_no_rows(coverage, self.roles))
        dtypes = [one.dtype for trace in (self.train, self.serve) for one in trace.site_data(name)]
        tolerance = self.tolerances.of(name, step, dtypes)
        metrics = found.metrics
        if metrics.basis == "sketch":
            tolerance = widened(tolerance, self.train.site_data(name)[0].width, metrics.rows)
        exceeded = tolerance.exceeded(metrics)
        divergence = None
        if metrics.nonfinite_train or metrics.nonfinite_serve or exceeded:
            facts = row_facts(self.train, self.serve, name, pairs, found.worst, found.worst_rows, found.statistics)
            row = row_key(self.alignment, pairs, found.worst)
            divergence = numeric_divergence(name, step, metrics, tolerance, exceeded)
            divergence = replace(divergence, train=facts[0], serve=facts[1], row=row)
        return SiteResult(name, step, coverage, metrics, tolerance, divergence)

    # ---- the result ----------------------------------------------------------------------------------------

    def _in_order(self, results: Results) -> list[SiteResult]:
        order = {site.name: index for index, site in enumerate(shape_order(self.sites))}
        return [results[node] for node in sorted(results, key=lambda node: (node[1], order[node[0]]))]
