"""Tokens that the target's routers sent to other experts, by rounding."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.margins import TIPS
from eagle_trace_analysis.evidence.context import Context

FIX = (
    "these features show no fault of the draft, and cannot show that there is none: compare with the server's own "
    "(record --mode train --features serve), or record both sides in float32"
)
#: what a confirmed cause about the draft's inputs speaks of
GIVEN = ("target.hidden.", "fused", "token", "position")


def check(context: Context) -> Outcome:
    """Whether rows of the features differ because two scores of a router lay within rounding of each other."""
    found = context.diff.tipped
    if found is None:
        return _of_no_rows(context)
    if found.verdict == "unread":
        return not_tested(
            found.why,
            "record both sides with --level values in one precision: in float32 hardly any two scores are near",
        )
    if found.verdict == "other":
        return ruled_out(found.why)
    if found.verdict == "excused":
        return ruled_out(f"{found.text}: that is no fault, and what is left of the features agrees")
    for name, one in context.outcomes.items():
        if one.verdict == "confirmed" and (one.site or "").startswith(GIVEN):
            return ruled_out(f"that the target's features differ is explained by {name}")
    evidence = f"{found.text}; without what follows from them the rest cannot be judged: {found.why}"
    return confirmed(evidence, FIX, found.site)


def _of_no_rows(context: Context) -> Outcome:
    """Where no row of the features was held against the margins."""
    wrong = [one for site in context.feature_sites for one in context.results(site) if one.divergence is not None]
    if not wrong:
        return ruled_out("no feature of the target differs")
    routers = context.train.manifest.settings.get("routers")
    if not isinstance(routers, Mapping):
        return not_tested(
            "the train trace says nothing of the target's routers", "record the training side with --features compute"
        )
    if not (routers.get("read") or routers.get("unread")):
        return ruled_out("no layer below the features has experts")
    return ruled_out("features differ in another way than in their values")


CAUSE = Cause(
    "router-tipped",
    "Single rows of the features of a target with experts are far off, and all others agree.",
    "The recorder's figures of every router below the features: in each row that differs two scores were at most "
    f"{TIPS:g} times as far apart as rounding moves them, by the target in the next higher precision. Rows with clear "
    "scores, rows that are zero, scaled or another row's, and more rows than rounding tips rule it out. Confirmed only "
    "where too few rows would be left without them: otherwise they are left out with a note, and the rest decides.",
    "Nothing that is known: compare with --features serve, or both sides in float32, where it does not happen.",
    ("target.hidden.0",),
    check,
    last=True,
    of_training=True,
)
