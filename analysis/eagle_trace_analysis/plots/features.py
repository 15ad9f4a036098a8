"""Norms of the target's features as each side fed them to the draft, and features that cannot be right."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_trace.capture import Statistics
from eagle_trace.reader import Trace, read_keys, read_statistics
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.rowwise import open_traces
from eagle_trace_analysis.plots import style


def features(diff: Diff, *, train: Trace | None = None, serve: Trace | None = None) -> Any:
    """Norms of the target's features as each side fed them to the draft, and features that cannot be right.

    Args:
        diff: a finished diff.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure: one panel a side, one line a feature, L2 norm over the rows in (prompt, root) order on a log
        axis. The subtitle names rows that are all zero, not finite, repeat the row before, or repeat another layer.
    """
    go = style.graph_objects()
    traces = dict(zip(("train", "serve"), open_traces(diff, train, serve), strict=True))
    sides = {side: feature_statistics(trace) for side, trace in traces.items()}
    faults = {side: degenerate(found) for side, found in sides.items()}
    words = "; ".join(f"{side}: {', '.join(found)}" for side, found in faults.items() if found)
    made = style.figure(
        "Target features fed to the draft",
        words or "no row is zero, not finite or a repetition",
        height=420,
        meta={"stack": True},
        grid={"rows": 1, "columns": 2, "pattern": "independent", "xgap": 0.12},
    )
    for number, (side, found) in enumerate(sides.items(), start=1):
        axis = "" if number == 1 else "2"
        for index, (site, statistics) in enumerate(found.items()):
            norm = statistics.norm
            columns = style.bins(len(norm))
            y = [float(np.median(norm[part])) for part in columns]
            made.add_trace(
                go.Scatter(
                    x=[int(part[0]) for part in columns],
                    y=[one if one > 0 else None for one in y],
                    name=site if len(found) > 1 else f"{site} ({side})",
                    legendgroup=site,
                    showlegend=number == 1 or site not in sides["train"],
                    xaxis=f"x{axis}",
                    yaxis=f"y{axis}",
                    mode="lines",
                    line={"color": style.STEP_COLORS[index % 7] if len(found) > 1 else style.INK, "width": 1.4},
                    hovertemplate=f"{site} ({side})<br>row %{{x}}: norm %{{y:.4g}}<extra></extra>",
                )
            )
        made.update_layout({f"xaxis{axis}": {"title": {"text": f"{side}: row (prompt by prompt)"}}})
    norms = np.concatenate(
        [np.zeros(0), *(one.norm[one.norm > 0] for found in sides.values() for one in found.values())]
    )
    norms = norms if len(norms) else np.ones(1)
    scale = style.log_ticks(float(norms.min()) / 1.2, float(norms.max()) * 1.2)
    made.update_layout(yaxis=scale | {"title": {"text": "L2 norm"}}, yaxis2=scale)
    return made


def feature_statistics(trace: Trace) -> dict[str, Statistics]:
    """Statistics of each feature (`fused` if it has no parts), rows by (prompt, root)."""
    names = [site for site in trace.sites if site.startswith("target.hidden.")] or ["fused"]
    found = {}
    for name in names:
        if len(data := trace.site_data(name)) != 1:
            continue
        keys, every = read_keys(data[0]), read_statistics(data[0])
        order = np.lexsort((keys.root, keys.prompt_id))
        found[name] = Statistics(every.norm[order], every.absmax[order], every.mean[order], every.nonfinite[order])
    return found


def degenerate(found: dict[str, Statistics]) -> list[str]:
    """What cannot be right about some features, in words; told from statistics alone, so at every level."""
    words = []
    for name, one in found.items():
        if count := int(((one.norm == 0) & (one.nonfinite == 0)).sum()):
            words.append(f"{name} is all zero in {count} of {len(one.norm)} rows")
        if count := int((one.nonfinite > 0).sum()):
            words.append(f"{name} is not finite in {count} rows")
        if count := int(_same(one, one, shift=1)):
            words.append(f"{name} repeats the row before in {count} rows")
    names = list(found)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if count := int(_same(found[name], found[other], shift=0)):
                words.append(f"{name} equals {other} in {count} rows")
    return words


def _same(a: Statistics, b: Statistics, *, shift: int) -> int:
    if len(a.norm) != len(b.norm) or len(a.norm) <= shift:
        return 0
    stop = len(a.norm) - shift
    equal = [getattr(a, name)[shift:] == getattr(b, name)[:stop] for name in ("norm", "absmax", "mean")]
    return int((np.logical_and.reduce(equal) & (a.norm[shift:] > 0)).sum())
