"""What the HTML report says, section by section, as text and figures; its templates lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eagle_trace.sites import known_site
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import Diff, Divergence, SiteResult
from eagle_trace_analysis.pairing.pairs import skipped_because

GLOSSARY = {
    "site": "a named point of the draft model's forward pass, the same on both sides (fc.out: the output of fc)",
    "root": "the position whose target feature a draft row starts from",
    "step": "0 for the row computed from the target's feature, 1, 2, … for the drafted tokens behind it",
    "error": "relative L2 error of a row: the length of (serving minus training) over the length of training",
    "tolerance": "how far two correct implementations may be apart there by rounding; measured where possible",
    "first divergence": "the first place that differs although everything it is computed from agrees",
}
#: facts of a divergence that are shown of both sides, and what they are called
_FACTS = {
    "shape": "shape (T rows)",
    "dtype": "dtype",
    "norm": "norm of the worst row",
    "absmax": "largest element",
    "mean": "mean",
    "nonfinite": "NaN or infinite elements",
    "element": "element furthest apart",
    "element_value": "its value",
    "token": "token",
    "position": "position",
    "draft_id": "draft id",
    "target_id": "target id",
    "logit": "logit",
    "digest": "digest",
    "scale": "scale of the step by itself",
    "coherent": "error of the step that follows its inputs",
    "rho_median": "error of the step by itself, median row",
}


def lead(diff: Diff) -> str:
    """Two or three sentences that need no knowledge of the tool."""
    if diff.incomparable is not None:
        return diff.incomparable
    first = diff.first_divergence
    if first is None:
        compared = sum(result.verdict == "agree" for result in diff.sites)
        return (
            f"All {compared} sites and steps are equal within rounding: "
            "what the server computes is what training computed."
        )
    site = known_site(first.site)
    behind = sum(result.verdict == "diverged" and not result.frontier for result in diff.sites)
    words = f"{first.site}: {site.meaning}. " if site is not None else ""
    words += sentence(first.why)
    # a shape comes first even where tokens differ too, which is then a divergence of its own
    if first.kind not in ("shape", "presence") or len(diff.frontier) == 1:
        words += " Nothing it is computed from was found to differ."
    return words + (f" {behind} sites and steps behind it differ too." if behind else "")


def sentence(words: str) -> str:
    """Words with a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def cards(diff: Diff) -> Iterator[tuple[str, str]]:
    """Four figures and what each is."""
    accept = diff.accept_length
    if accept.observed is None:
        yield "not known", "accept length: the serve trace holds no verify rounds"
    else:
        more = f"; {accept.predicted:.2f} predicted by the training forward" if accept.comparable else ""
        more += f"; {accept.reference:.2f} in training" if accept.reference is not None else ""
        yield f"{accept.observed:.2f}", f"accept length (tokens a verify round, bonus included){more}"
    verdicts = [result.verdict for result in diff.sites]
    differ, compared = verdicts.count("diverged"), len(verdicts) - verdicts.count("not compared")
    yield f"{differ} of {compared}", "sites and steps differ"
    coverage = diff.coverage
    yield (
        coverage.per_cent,
        f"of the comparable rows matched ({coverage.matched} of {coverage.matched + coverage.unmatched_serve})",
    )
    found = diff.diagnosis
    if found is not None and found.causes:
        words = f"known causes confirmed, {len(found.of('ruled_out'))} ruled out"
        yield f"{len(found.confirmed)} of {len(found.causes)}", words
    else:
        yield diff.level, "level of detail that was compared"


@dataclass(frozen=True)
class Square:
    """One site of the forward at a glance; `kind` is its class in the style sheet."""

    site: str
    verdict: str
    kind: str


def forward(diff: Diff) -> list[Square]:
    """Every site at its worst step, in forward order."""
    rank = {"not compared": 0, "agree": 1, "diverged": 2}
    worst: dict[str, str] = {}
    for result in diff.sites:
        worst[result.site] = max(worst.get(result.site, "not compared"), result.verdict, key=rank.__getitem__)
    first = diff.first_divergence
    kinds = {"not compared": ""}
    return [
        Square(site, verdict, "first" if first and first.site == site else kinds.get(verdict, verdict))
        for site, verdict in worst.items()
    ]


def sides(one: Divergence) -> list[tuple[str, str, str]]:
    """Facts of both sides at the worst row: what, training, serving."""
    return [
        (label, _fact(one.train.get(name)), _fact(one.serve.get(name)))
        for name, label in _FACTS.items()
        if name in one.train or name in one.serve
    ]


def _fact(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(one) for one in value)}]"
    return str(value)


@dataclass(frozen=True)
class SiteRow:
    """A row of the table of sites; `numbers` are words and the number to sort by: rows, median error, largest error,
    allowed, error over allowed.
    """

    site: str
    step: int
    numbers: list[tuple[str, float | None]]
    verdict: str
    first: bool
    why: str


def site_row(result: SiteResult) -> SiteRow:
    """One site at one step."""
    metrics = result.metrics
    numbers: list[tuple[str, float | None]] = [("", None)] * 5
    if isinstance(metrics, Metrics):
        allowed = result.tolerance.allowed["rho_max"] if result.tolerance else None
        ratio = metrics.rho_max / allowed if allowed else None
        values = (metrics.rho_median, metrics.rho_max, allowed, ratio)
        numbers = [(str(metrics.rows), metrics.rows), *((_figure(value), value) for value in values)]
    elif isinstance(metrics, IdMetrics):
        differing = (f"{metrics.differing} differ", metrics.differing)
        numbers = [(str(metrics.rows), metrics.rows), ("", None), differing, ("0", 0), ("", None)]
    why = result.divergence.why if result.divergence else result.reason or ""
    return SiteRow(result.site, result.step, numbers, result.verdict, result.frontier, why)


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if value == value else "NaN"


def fates(diff: Diff) -> list[str]:
    """What became of both sides' rows."""
    coverage = diff.coverage
    lines = [
        f"Training has {coverage.train_rows} rows, serving {coverage.serve_rows}; {coverage.matched} are matched, "
        f"{coverage.unmatched_train} and {coverage.unmatched_serve} found no partner"
    ]
    for side, skipped in (("training", coverage.skipped_train), ("serving", coverage.skipped_serve)):
        lines += [
            f"{count} {side} rows skipped: {skipped_because(reason, diff.roles)}" for reason, count in skipped.items()
        ]
    return lines


def provenance(diff: Diff) -> Iterable[tuple[str, list[str], list[str]]]:
    """What made the two traces: what is known, and the lines of both sides."""
    train, serve = diff.traces["train"], diff.traces["serve"]
    for name in {**train, **serve}:
        yield name.replace("_", " "), _value(train.get(name)), _value(serve.get(name))


def _value(value: Any) -> list[str]:
    if value in (None, "", [], {}):
        return ["–"]
    if isinstance(value, Mapping):
        return [
            f"{name} {one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}"
            for name, one in value.items()
        ]
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return [{True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)]
