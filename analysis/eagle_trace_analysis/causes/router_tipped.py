"""Tokens that the target's routers sent to other experts, by rounding."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.tipped import TIPS
from eagle_trace_analysis.evidence.context import Context

FIX = (
    "nothing is wrong with the draft: hold it against the server's own features (record --mode train --features "
    "serve), or record both sides in float32"
)


def check(context: Context) -> Outcome:
    """Whether rows of the features differ because two scores of a router lay within rounding of each other."""
    found = context.diff.tipped
    if found is None:
        return _of_no_rows(context)
    if found.verdict == "unread":
        return not_tested(
            found.why, "record both sides in one precision: in float32 hardly any two scores are that near"
        )
    if found.verdict == "other":
        return ruled_out(found.why)
    if found.verdict == "excused":
        return ruled_out(f"{found.text}: that is no fault, and what is left of the features agrees")
    evidence = f"{found.text}; that is most of the rows, so too few are left to say that the features agree"
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
    "scores, or more rows than rounding tips, rule it out. Confirmed only where most rows are concerned: otherwise "
    "they are left out with a note, and the rest decides.",
    "Nothing to fix: compare with --features serve, or both sides in float32.",
    ("target.hidden.0",),
    check,
    of_training=True,
)
