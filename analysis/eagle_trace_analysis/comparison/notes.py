"""What is to be said of two traces themselves, whatever their rows hold."""

from __future__ import annotations

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.params import differing, other_form
from eagle_trace_analysis.comparison.result import Note
from eagle_trace_analysis.comparison.words import LISTED, some
from eagle_trace_analysis.pairing.ranks import check_ranks


def notes_on(train: Trace, serve: Trace) -> list[Note]:
    """Notes on damage, early ends, ranks that differ, parameters and prompts."""
    notes: list[Note] = []
    for trace in (train, serve):
        if trace.unchecked:
            text = f"{trace.path} has no checksums ({len(trace.unchecked)} files): damage may go unnoticed"
            notes.append(Note("no-checksums", text))
        if not trace.sealed:
            lost = f": {'; '.join(trace.missing[:3])}" if trace.missing else ""
            notes.append(Note("partial", f"{trace.path} was not finished or is damaged{lost}"))
        if early := trace.manifest.ended_early:
            notes.append(Note("stopped", f"{trace.path}: {early}"))
        if found := check_ranks(trace):
            more = f"; and {len(found) - LISTED} more" if len(found) > LISTED else ""
            text = "; ".join(one.text for one in found[:LISTED])
            notes.append(Note("ranks", f"{trace.path}: ranks differ at {text}{more}"))
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
