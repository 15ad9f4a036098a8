"""The parts of the HTML report. Everything that comes from outside (prompts, keys, paths) goes through `e`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from eagle_trace.printable import html_text
from eagle_trace.sites import known_site
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import Diff, Divergence, SiteResult
from eagle_trace_analysis.pairing.pairs import Coverage, skipped_because
from eagle_trace_analysis.pairing.roles import Roles
from eagle_trace_analysis.report.causes import CONFIRMED, NOT_TESTED, RULED_OUT, CauseView, causes_of, unexplained

#: what every word from outside goes through
e = html_text

HEADLINE = {
    "agree": "Training and serving agree",
    "incomparable": "The two traces could not be compared",
}
_WORDS = {
    "site": "a named point of the draft model's forward pass, the same on both sides (fc.out: the output of fc)",
    "root": "the position whose target feature a draft row starts from",
    "step": "0 for the row computed from the target's feature, 1, 2, … for the drafted tokens behind it",
    "error": "relative L2 error of a row: the length of (serving minus training) over the length of training",
    "tolerance": "how far two correct implementations may be apart there by rounding; measured where possible",
    "first divergence": "the first place that differs although everything it is computed from agrees",
}


def figure(value: float | None) -> str:
    """A number in three digits."""
    if value is None:
        return "–"
    return f"{value:.3g}" if value == value else "NaN"


def headline(diff: Diff) -> str:
    """The verdict as one sentence of HTML."""
    first = diff.first_divergence
    if diff.verdict == "diverged" and first is not None:
        return f"Training and serving part at <code>{e(first.site)}</code>, step {first.step}"
    return e(HEADLINE[diff.verdict])


def lead(diff: Diff) -> str:
    """Two or three sentences that need no knowledge of the tool."""
    if diff.incomparable is not None:
        return e(diff.incomparable)
    first = diff.first_divergence
    if first is None:
        compared = sum(result.verdict == "agree" for result in diff.sites)
        return e(
            f"All {compared} sites and steps are equal within rounding: "
            "what the server computes is what training computed."
        )
    site = known_site(first.site)
    behind = sum(result.verdict == "diverged" and not result.frontier for result in diff.sites)
    words = f"{first.site}: {site.meaning}. " if site is not None else ""
    words += _sentence(first.why)
    # a shape comes first even where tokens differ too, which is then a divergence of its own
    if first.kind not in ("shape", "presence") or len(diff.frontier) == 1:
        words += " Nothing it is computed from was found to differ."
    return e(words + (f" {behind} sites and steps behind it differ too." if behind else ""))


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def header(diff: Diff, version: str) -> str:
    """Verdict, what it means, the causes found, four figures, and the whole forward at one glance."""
    traces = diff.traces
    confirmed = [cause for cause in causes_of(diff) if cause.verdict == CONFIRMED]
    kicker = (
        f"eagle-trace {e(version)} · {e(traces['train'].get('path', ''))} against {e(traces['serve'].get('path', ''))}"
    )
    hosts = [e(traces[side].get("host") or "?") for side in ("train", "serve")]
    cards = "".join(f"<div class='card'><b>{value}</b><span>{words}</span></div>" for value, words in _cards(diff))
    ran = f"as it was trained ({hosts[0]}) and as it is served\n({hosts[1]})"
    if not diff.roles.usual:
        names = e(diff.roles.reference), e(diff.roles.other)
        ran = f"in {names[0]} ({hosts[0]}), which is the reference, and in {names[1]} ({hosts[1]})"
    return f"""<header><div>
<p class="kicker">{kicker}</p>
<h1><span class="badge verdict">{e(diff.verdict)}</span>{headline(diff)}</h1>
<p class="lead">{lead(diff)}</p>
{_gate(diff)}
{"".join(_cause(cause) for cause in confirmed)}
<p class="what">The same draft model ran twice on the same tokens: {ran}.
Each square is one point of its forward pass, compared row by row.</p>
{_forward(diff)}
<div class="cards">{cards}</div>
</div></header>"""


def _gate(diff: Diff) -> str:
    """What was asked beyond agreement, and everything that fails it; nothing if nothing was."""
    gate = diff.gate
    if gate is None:
        return ""
    if gate.failures:
        failed = "".join(f"<li>{e(one.text)}</li>" for one in gate.failures)
        return f"<p class='what'>The gate fails:</p><ul class='what'>{failed}</ul>"
    words = f"The gate cannot be judged: {gate.unknown}." if gate.unknown is not None else "The gate passes."
    return f"<p class='what'>{e(words)}</p>"


def _cards(diff: Diff) -> Iterable[tuple[str, str]]:
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
        f"{coverage.share:.0%}",
        f"of the comparable rows matched ({coverage.matched} of {coverage.matched + coverage.unmatched_serve})",
    )
    if suspects := causes_of(diff):
        count = [sum(cause.verdict == verdict for cause in suspects) for verdict in (CONFIRMED, RULED_OUT)]
        yield f"{count[0]} of {len(suspects)}", f"known causes confirmed, {count[1]} ruled out"
    else:
        yield e(diff.level), "level of detail that was compared"


def _forward(diff: Diff) -> str:
    if not diff.sites:
        return ""
    rank = {"not compared": 0, "agree": 1, "diverged": 2}
    worst: dict[str, SiteResult] = {}
    for result in diff.sites:
        if result.site not in worst or rank[result.verdict] > rank[worst[result.site].verdict]:
            worst[result.site] = result
    first = diff.first_divergence
    cells = []
    for name, result in worst.items():
        kind = "first" if first and first.site == name else ("" if result.verdict == "not compared" else result.verdict)
        cells.append(f'<i class="{kind}" title="{e(name)}: {e(result.verdict)}">{"!" if kind == "first" else ""}</i>')
    legend = [("#7cc4ac", "equal"), ("#e3a578", "differs"), ("#d5d9e0", "not compared")]
    if first:
        legend.insert(0, ("#b84a00", f"first divergence: {e(first.site)}"))
    return (
        f'<div class="forward" role="img" aria-label="the sites of the forward, in order">{"".join(cells)}</div>'
        + '<p class="legend">'
        + "".join(f'<i style="background:{color}"></i>{words}' for color, words in legend)
        + " (forward pass, left to right)</p>"
    )


def first_divergence(diff: Diff) -> str:
    """Both sides' figures where they first part, and what parts there independently."""
    first = diff.first_divergence
    if first is None:
        return ""
    others = "".join(f"<li><code>{e(one.site)}</code>, step {one.step}: {e(one.why)}</li>" for one in diff.frontier[1:])
    row = first.row
    where = ""
    if row is not None:
        path = f", drafted tokens {list(row.path)}" if row.path else ""
        where = f"<p>Worst row: prompt <code>{e(row.prompt_key)}</code>, root {row.root}{e(path)}.</p>"
    return f"""<section id="first"><h2>First divergence: <code>{e(first.site)}</code>, step {first.step}</h2>
<p>{e(_sentence(first.why))}</p>
{_sides(first)}{where}
{f"<p>Parts here too, independently:</p><ul>{others}</ul>" if others else ""}</section>"""


def _sides(one: Divergence) -> str:
    labels = {
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
    rows = []
    for name, label in labels.items():
        if name not in one.train and name not in one.serve:
            continue
        a, b = (_fact(side.get(name)) for side in (one.train, one.serve))
        mark = " style='font-weight:650'" if a != b else ""
        rows.append(f"<tr><th>{label}</th><td{mark}>{a}</td><td{mark}>{b}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th></th><th class='train'>training</th><th class='serve'>serving</th></tr>"
    return f"<div class='scroll'><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"


def _fact(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return e(f"[{', '.join(str(one) for one in value)}]")
    return e(value)


def causes(diff: Diff) -> str:
    """Every suspect with its verdict and evidence; empty if the diff was not diagnosed."""
    found = causes_of(diff)
    if not found:
        return ""
    groups = {
        verdict: [cause for cause in found if cause.verdict == verdict]
        for verdict in (CONFIRMED, RULED_OUT, NOT_TESTED)
    }
    parts = ["<section id='causes'><h2>Causes</h2>"]
    if diff.verdict == "diverged" and not groups[CONFIRMED]:
        parts.append("<p>No known cause was confirmed. What was ruled out below need not be looked at again.</p>")
    elif groups[CONFIRMED]:
        names = ", ".join(f"<b>{e(cause.name)}</b>" for cause in groups[CONFIRMED])
        parts.append(f"<p>Confirmed (above): {names}. What was ruled out need not be looked at again.</p>")
    if lines := unexplained(diff):
        parts.append(f"<p>Not explained by any of them:</p><ul>{''.join(f'<li>{e(line)}</li>' for line in lines)}</ul>")
    for verdict, title in ((RULED_OUT, "Ruled out"), (NOT_TESTED, "Not tested")):
        if groups[verdict]:
            is_open = " open" if verdict == RULED_OUT else ""
            inner = _suspects(groups[verdict])
            parts.append(f"<details{is_open}><summary>{title}: {len(groups[verdict])}</summary>{inner}</details>")
    return "".join([*parts, "</section>"])


def _suspects(found: list[CauseView]) -> str:
    """Suspects as a table: there are many, and each has one line to say."""
    rows = []
    for cause in found:
        words = "<br>".join(e(line) for line in cause.evidence)
        words += f"<br><b>To test it:</b> {e(cause.fix)}" if cause.fix else ""
        rows.append(f"<tr><th>{e(cause.name)}</th><td class='text'>{words}</td></tr>")
    return f"<div class='scroll'><table><tbody>{''.join(rows)}</tbody></table></div>"


def _cause(cause: CauseView) -> str:
    """A confirmed cause with its evidence and its fix."""
    evidence = "".join(f"<p>{e(line)}</p>" for line in cause.evidence)
    fix = f"<p class='fix'><b>Fix:</b> {e(cause.fix)}</p>" if cause.fix else ""
    at = f" at <code>{e(cause.site)}</code>" if cause.site else ""
    title = f"<h3><span class='badge bad'>{e(cause.verdict)}</span>{e(cause.name)}{at}</h3>"
    return f"<div class='cause'>{title}{evidence}{fix}</div>"


def sites(diff: Diff) -> str:
    """The full table of sites and steps, sortable and filtered by the page's script."""
    if not diff.sites:
        return ""
    columns = ["site", "step", "rows", "median error", "largest error", "allowed", "error / allowed", "verdict", "why"]
    numeric = range(1, 7)
    head = "".join(
        f"<th{' class=n' if at in numeric else ''}><button type='button'>{name}</button></th>"
        for at, name in enumerate(columns)
    )
    rows = "".join(_site(result) for result in diff.sites)
    return f"""<section id="all"><h2>All sites and steps</h2>
<p>In forward order; click a column to sort. Errors are relative L2 errors of rows; a site of integers counts the
rows that differ.</p>
<div class="controls"><input id="filter" type="search" placeholder="filter by site" aria-label="filter by site">
<label><input id="only" type="checkbox"> only what differs</label></div>
<div class="scroll table">
<table id="sites"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"""


def _site(result: SiteResult) -> str:
    metrics = result.metrics
    numbers: list[tuple[str, float | None]] = [("", None)] * 5
    if isinstance(metrics, Metrics):
        allowed = result.tolerance.allowed["rho_max"] if result.tolerance else None
        ratio = metrics.rho_max / allowed if allowed else None
        values = [metrics.rows, metrics.rho_median, metrics.rho_max, allowed, ratio]
        numbers = [(str(metrics.rows), metrics.rows), *((figure(value), value) for value in values[1:])]
    elif isinstance(metrics, IdMetrics):
        numbers = [
            (str(metrics.rows), metrics.rows),
            ("", None),
            (f"{metrics.differing} differ", metrics.differing),
            ("0", 0),
            ("", None),
        ]
    cells = "".join(
        f'<td class="n" data-value="{"NaN" if value is None else value}">{words}</td>' for words, value in numbers
    )
    why = result.divergence.why if result.divergence else result.reason or ""
    star = " (first)" if result.frontier else ""
    return (
        f'<tr class="{result.verdict.replace(" ", "-")}" data-verdict="{result.verdict}">'
        f'<td><code>{e(result.site)}</code></td><td class="n" data-value="{result.step}">{result.step}</td>{cells}'
        f'<td>{result.verdict}{star}</td><td class="text">{e(why)}</td></tr>'
    )


def rows(diff: Diff) -> str:
    """Fate of the rows, what is benign, what else to know."""
    notes = [*diff.benign, *diff.notes]
    listed = "".join(f"<li><b>{e(note.name)}</b>: {e(note.text)}</li>" for note in notes)
    fates = "".join(f"<li>{e(line)}</li>" for line in _coverage(diff.coverage, diff.roles))
    return f"""<section id="rows"><h2>Rows and notes</h2>
<ul>{fates}<li>Tolerance: {e(diff.tolerance)}</li>{listed}</ul></section>"""


def _coverage(coverage: Coverage, roles: Roles) -> list[str]:
    lines = [
        f"Training has {coverage.train_rows} rows, serving {coverage.serve_rows}; {coverage.matched} are matched, "
        f"{coverage.unmatched_train} and {coverage.unmatched_serve} found no partner"
    ]
    for side, skipped in (("training", coverage.skipped_train), ("serving", coverage.skipped_serve)):
        lines += [f"{count} {side} rows skipped: {skipped_because(reason, roles)}" for reason, count in skipped.items()]
    return lines


def provenance(diff: Diff) -> str:
    """What made the two traces."""
    names = {name: None for side in ("train", "serve") for name in diff.traces[side]}
    rows = "".join(
        f"<tr><th>{e(name.replace('_', ' '))}</th>"
        + "".join(f"<td class=text>{_value(diff.traces[side].get(name))}</td>" for side in ("train", "serve"))
        + "</tr>"
        for name in names
    )
    head = "<tr><th></th><th class='train'>training</th><th class='serve'>serving</th></tr>"
    return f"""<section id="made"><h2>How the two traces were made</h2>
<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div></section>"""


def _value(value: Any) -> str:
    if value in (None, "", [], {}):
        return "–"
    if isinstance(value, Mapping):
        return "<br>".join(
            f"{e(name)} {e(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False))}"
            for name, one in value.items()
        )
    if isinstance(value, list | tuple):
        return "<br>".join(e(one) for one in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else e(value)


def glossary() -> str:
    """The words of the report."""
    listed = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in _WORDS.items())
    return f"<details><summary>The words used here</summary><dl>{listed}</dl></details>"
