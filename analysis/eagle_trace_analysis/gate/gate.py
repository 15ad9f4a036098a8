"""A gate over a finished diff: the accept length it may lose, and the baseline it must not be worse than.

**Worse than a baseline** is a site and step that agreed with the reference there and diverges now, a site that was
compared there and is not any more, and an error that grew by more than one floor (what is allowed over the factor of
the tolerance: an error within tolerance may still have tripled). What diverged in the baseline already is known, and
fails nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eagle_trace.errors import IncomparableError
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.comparison.result import AcceptLength, Diff, Failure, Gate, SiteResult
from eagle_trace_analysis.comparison.tolerance import FACTOR

_GROWING = {"rho_median": "median row error", "rho_max": "largest row error", "channel_median": "median channel error"}
#: a share is a quotient of two numbers that were rounded
_LEAST = 1e-9


def gated(
    diff: Diff, *, max_drop: float | None = None, baseline: Diff | None = None, tolerance: float = FACTOR
) -> Diff:
    """`diff` with its gate.

    Args:
        diff: what is judged.
        max_drop: share (0..1) of the predicted accept length that the server may lose; of two servers, of the
            reference's. None not to judge it.
        baseline: comparison of the same reference with the trace that this one must not be worse than.
        tolerance: the factor that both comparisons were made with.

    Raises:
        IncomparableError: the baseline has nothing in common with the reference.
    """
    if max_drop is None and baseline is None:
        return diff
    failures: list[Failure] = []
    unknown = None
    if max_drop is not None:
        failed, unknown = _accept_length(diff, max_drop)
        failures += failed
    place = None
    if baseline is not None:
        place = str(baseline.traces["serve"]["path"])
        if baseline.incomparable is not None:
            raise IncomparableError(f"the baseline {place} cannot be compared: {baseline.incomparable}")
        failures += worse_than(diff, baseline, tolerance=tolerance)
    return replace(diff, gate=Gate(tuple(failures), unknown, max_drop, place))


def _accept_length(diff: Diff, max_drop: float) -> tuple[list[Failure], str | None]:
    """What fails of the accept length, and why nothing can be said of it."""
    accept = diff.accept_length
    if accept.observed is None:
        return [], "no accept length is known: the server's trace holds no verify rounds"
    expected, whose = expected_length(accept, diff)
    if expected is None:
        return [], f"no accept length can be held against the server's {accept.observed:.2f}: {whose}"
    drop = 1 - accept.observed / expected
    if drop <= max_drop + _LEAST:
        return [], None
    text = (
        f"accept length {accept.observed:.2f} is {drop:.1%} below {expected:.2f}, {whose} ({max_drop:.1%} allowed, "
        f"{accept.rounds} rounds)"
    )
    return [Failure("accept-length", text)], None


def expected_length(accept: AcceptLength, diff: Diff) -> tuple[float | None, str]:
    """What the server should get and where that figure comes from; None and why there is none."""
    if accept.reference is not None:
        return accept.reference, f"what {diff.roles.reference} got"
    if accept.comparable and accept.predicted is not None:
        if accept.predicted_range is not None:
            return accept.predicted_range[0], "the least that is predicted for such trees on these tokens"
        return accept.predicted, "predicted by the training forward on these tokens"
    if accept.branches > 1:
        return None, "the server drafts a tree, and what is predicted is a chain's"
    return None, "nothing is predicted (record the train side with --replay)"


def worse_than(now: Diff, before: Diff, *, tolerance: float = FACTOR) -> list[Failure]:
    """What is worse than in the baseline's comparison with the same reference, first in the forward first."""
    known = {(one.site, one.step): one for one in before.sites if one.verdict == "agree"}
    both = [(one, known[one.site, one.step]) for one in now.sites if (one.site, one.step) in known]
    new = [one for one, _ in both if one.divergence is not None]
    # what follows from another is not told again, unless what it follows from is known from the baseline
    first = [one for one in new if one.frontier] or new
    found = [_diverges(one, len(new) - len(first)) for one in first]
    if not new:  # an error that grew behind a new divergence follows from it
        found += [failure for one, old in both if one.verdict == "agree" for failure in _grown(one, old, tolerance)]
    compared = {one.site for one in now.sites if one.verdict != "not compared"}
    lost = {site: one for (site, _), one in known.items() if one.metrics is not None and site not in compared}
    return found + [_lost(now, one) for one in lost.values()]


def _diverges(result: SiteResult, behind: int) -> Failure:
    why = result.divergence.why if result.divergence is not None else ""
    more = f" ({behind} sites and steps behind it, too)" if behind else ""
    text = f"{result.site}, step {result.step} agreed in the baseline and diverges now{more}: {why}"
    return Failure("diverges-now", text, result.site, result.step)


def _grown(result: SiteResult, old: SiteResult, tolerance: float) -> Iterator[Failure]:
    """The statistic that grew most beyond its floor, if one did."""
    if not isinstance(result.metrics, Metrics) or not isinstance(old.metrics, Metrics) or result.tolerance is None:
        return
    grown = []
    for name, words in _GROWING.items():
        new, was, allowed = (
            getattr(result.metrics, name),
            getattr(old.metrics, name),
            result.tolerance.allowed.get(name),
        )
        if new is None or was is None or allowed is None:
            continue
        floor = allowed / tolerance
        if new > was + floor:
            grown.append(((new - was) / floor, f"its {words} grew from {was:.2e} to {new:.2e} (floor {floor:.2e})"))
    if grown:
        text = f"{result.site}, step {result.step} agrees, but {max(grown)[1]}"
        yield Failure("error-grew", text, result.site, result.step)


def _lost(now: Diff, old: SiteResult) -> Failure:
    why = next((one.reason for one in now.sites if one.site == old.site and one.reason), "it is not in the trace")
    text = f"{old.site} was compared in the baseline and is no longer: {why}"
    return Failure("no-longer-compared", text, old.site, None)
