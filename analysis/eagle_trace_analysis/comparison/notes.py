"""What a comparison says beside its figures: what is harmless, what limits it, and what is odd about a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.left import least_left
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.params import differing, other_form
from eagle_trace_analysis.comparison.result import Note, SiteResult
from eagle_trace_analysis.comparison.tipped import Tipped
from eagle_trace_analysis.comparison.words import LISTED, some
from eagle_trace_analysis.pairing.align import Alignment
from eagle_trace_analysis.pairing.ranks import check_ranks
from eagle_trace_analysis.pairing.roles import Roles


def benign_notes(results: Mapping[tuple[str, int], SiteResult], tipped: Tipped | None) -> list[Note]:
    """Differences that are none: rounding, rows that a router tipped, best ids within the logits' error."""
    notes = []
    agreeing = [
        (result.metrics.rho_max, result)
        for result in results.values()
        if result.verdict == "agree" and isinstance(result.metrics, Metrics) and result.metrics.rho_max > 0
    ]
    if agreeing:
        worst, at = max(agreeing, key=lambda item: item[0])
        allowed = at.tolerance.allowed["rho_max"] if at.tolerance else 0.0
        text = f"{len(agreeing)} sites and steps differ by rounding only, at most {worst:.2g} "
        notes.append(Note("rounding", text + f"({at.site}, step {at.step}; {allowed:.2g} allowed)"))
    if tipped is not None and tipped.verdict == "excused":
        notes.append(Note("router-tipped", f"{tipped.text}; {least_left(results.values()).text} are left to compare"))
    excused = sum(one.metrics.excused for one in results.values() if isinstance(one.metrics, IdMetrics))
    if excused:
        text = f"{excused} rows pick another best id within the margin of the logits' error"
        notes.append(Note("tie-flips", text))
    return notes


def row_notes(alignment: Alignment, serve: Trace, roles: Roles) -> list[Note]:
    """Rows that were not compared: draft steps, and rows that a replay of the very trace lacks."""
    notes = []
    steps = alignment.rows.train_keys.step[alignment.rows.train]
    if len(steps) and not steps.any() and serve.rows.step.any():
        text = "only step 0 was compared: record the train side with --replay to compare draft steps too"
        if not roles.usual:
            text = "only step 0 was compared: the two have no draft row in common"
        notes.append(Note("draft-steps", text))
    lacking = alignment.coverage.unmatched_serve
    if alignment.same_run and lacking:
        text = (
            f"{lacking} of {len(serve.rows)} rows of the serve trace are not in the replay of it, so nothing is said "
            "of them: training was recorded with fewer steps or a selection, or the server computed rows that its own "
            "books do not know"
        )
        notes.append(Note("replay-lacks", text))
    return notes


def dtype_notes(train: Trace, serve: Trace, rounding: str) -> list[Note]:
    """That the sides compute in two dtypes, of which rounding to `rounding` is allowed, or cache keys in two."""
    notes, computed = [], [trace.manifest.dtype for trace in (train, serve)]
    if len(set(computed)) > 1 and all(computed):
        text = f"training computes in {computed[0]}, serving in {computed[1]}: what rounding to "
        notes.append(Note("dtypes", text + f"{rounding} may do is no divergence"))
    for name, whose in (("kv_cache_dtype", "the target"), ("draft_kv_cache_dtype", "the draft")):
        kept = [trace.manifest.settings.get(name, trace.manifest.dtype) for trace in (train, serve)]
        for side, held, dtype in zip(("training", "serving"), kept, computed, strict=True):
            if isinstance(held, str) and held != dtype and len(set(map(str, kept))) > 1:
                text = (
                    f"{side} keeps keys and values of {whose} in {held} and computes in {dtype}: rows that attend to "
                )
                notes.append(Note("kv-cache", text + "its cache carry that rounding, for which no floor allows"))
    return notes


def parting_notes(alignment: Alignment, roles: Roles) -> list[Note]:
    """Where greedy answers part: at which token, how long they ran together, and that nothing follows from it."""
    parted = alignment.partings() if not roles.usual else []
    if not parted:
        return []
    said = "; ".join(one.words(roles.reference, roles.other) for one in parted[:LISTED])
    text = f"{len(parted)} of {len(alignment.prompt_keys)} answers part: {said}{_more(parted)}. Up to there rows are "
    return [Note("answers-part", text + "compared; what follows a parting is not, and is no divergence")]


def trace_notes(train: Trace, serve: Trace) -> list[Note]:
    """What is odd about a trace itself, and what the two were recorded with."""
    notes = [note for trace in (train, serve) for note in _damage(trace)]
    if wrong := differing(train, serve):
        text = f"as loaded, {some([name for name, _, _ in wrong])} in serving are not the trained ones"
        notes.append(Note("parameters", text))
    if unlike := other_form(train, serve):
        text = f"not compared with the trained ones, since they are held in another form: {some(unlike)}"
        notes.append(Note("parameters-form", text))
    digests = {train.manifest.prompts_digest, serve.manifest.prompts_digest}
    if len(digests) > 1 and "" not in digests:
        notes.append(Note("prompts-digest", "the two sides were recorded on different sets of prompts"))
    return notes


def _damage(trace: Trace) -> Iterator[Note]:
    """That a trace is not whole, cannot be held against its checksums, or has ranks that are not one model's."""
    if trace.unchecked:
        text = f"{trace.path} has no checksums ({len(trace.unchecked)} files): damage may go unnoticed"
        yield Note("no-checksums", text)
    if not trace.sealed:
        lost = f": {'; '.join(trace.missing[:3])}" if trace.missing else ""
        yield Note("partial", f"{trace.path} was not finished or is damaged{lost}")
    if early := trace.manifest.ended_early:
        yield Note("stopped", f"{trace.path}: {early}")
    if found := check_ranks(trace):
        text = "; ".join(one.text for one in found[:LISTED])
        yield Note("ranks", f"{trace.path}: ranks differ at {text}{_more(found)}")


def _more(listed: Sized) -> str:
    return f"; and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
