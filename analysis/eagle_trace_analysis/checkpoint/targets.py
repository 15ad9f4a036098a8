"""Whether the engine's class for the target can feed an EAGLE-3 draft at all."""

from __future__ import annotations

from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped
from eagle_trace_analysis.checkpoint.subject import Subject

SINGLE = "single-layer-features"


def check_target(subject: Subject) -> Finding:
    """The target's class against the table; not checked where the table does not have it."""
    check = "target-class"
    if subject.target is None:
        return skipped(check, SINGLE, "whether the target's class can feed an EAGLE-3 draft: give --target")
    name = subject.target.architecture
    if name is None:
        return skipped(check, SINGLE, "the target's config names no class (architectures)")
    lacks = subject.engine.why_it_cannot_serve(name, subject.served)
    if lacks is not None:
        return failed(
            check,
            SINGLE,
            f"{subject.engine.ENGINE}'s {name} {lacks}, so the server stops before it serves",
            "serve this target with another engine, or a release whose class can: no change to the draft helps",
        )
    if subject.target.refused:
        refused = subject.target.refused
        return failed(
            check,
            "",
            f"{subject.engine.ENGINE} stops at the target's own config: {'; '.join(one.why for one in refused)}",
            f"in the target's config: {'; '.join(dict.fromkeys(one.fix for one in refused))}",
        )
    since = subject.engine.feeds_since(name)
    if since is not None:
        words = f" (from {since} on)" if since else ""
        return passed(check, SINGLE, f"{subject.engine.ENGINE}'s {name} feeds EAGLE-3 drafts{words}")
    if subject.engine.is_known_target(name):
        return skipped(check, SINGLE, f"{name} feeds its last layer only, which is what the draft's config asks for")
    return skipped(check, SINGLE, f"{name} is not among the classes of {subject.engine.ENGINE} known here")
