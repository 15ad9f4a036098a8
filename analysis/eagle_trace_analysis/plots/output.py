"""What comes out of the draft: logits, best tokens, and what each side would have drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.rowwise import BestTokens, RowFigures
from eagle_trace_analysis.pairing.tokens import TokenNames, prompt_names
from eagle_trace_analysis.plots import style

Float64 = NDArray[np.float64]

_TINY = 1e-9
_LISTED = 3


def logits(diff: Diff, *, step: int = 0, train: Trace | None = None, serve: Trace | None = None) -> Any:
    """How far the two sides' predictions are apart, root by root.

    Args:
        diff: a finished diff.
        step: draft step.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure of three panels over the rows: KL(train || serve) in nats on a log axis (from 1e-9 on), the
        share of the best tokens that both sides name, and the share of rows where both would draft the same token.
        With more than 400 rows, neighbours are averaged (KL: the median and the worst).
    """
    figures = RowFigures.of(diff, train, serve)
    rows, best = _rows_with_output(figures, step)
    made = style.figure(
        f"Logits and best tokens, root by root, step {step}",
        _subtitle(best),
        height=560,
        grid={"rows": 3, "columns": 1, "pattern": "independent", "ygap": 0.16},
    )
    if not len(rows):
        return style.say(made, f"no logits of step {step} were compared")
    found = figures.logits(rows)
    columns = style.bins(len(rows))
    names = TokenNames.of(figures.train, figures.serve)
    labels = _labels(figures, rows, best, names, columns)
    if found is not None:
        _add_kl(made, found[0], columns, labels)
    for number, (values, name, color) in enumerate(
        (
            (best.overlap, "overlap of the best tokens", style.PURPLE),
            (np.where(best.paired, best.agree, np.nan), "same token drafted", style.GREEN),
        ),
        start=2,
    ):
        y = [100 * _mean(values[part]) for part in columns]
        _add_bars(made, y, labels, number, name, color)
    across = {"showticklabels": False, "showgrid": False, "ticks": "", "range": [-0.7, len(columns) - 0.3]}
    made.update_layout(
        xaxis=across,
        xaxis2=across,
        xaxis3=across | {"title": {"text": "rows: prompt by prompt, root by root"}},
        yaxis=_kl_axis(found) | {"title": {"text": "KL (nats)"}},
        yaxis2={
            "range": [0, 105],
            "title": {"text": f"top-{best.train.shape[1]}<br>overlap (%)"},
            "tickvals": [0, 50, 100],
        },
        yaxis3={"range": [0, 105], "title": {"text": "same best<br>token (%)"}, "tickvals": [0, 50, 100]},
        showlegend=found is not None and len(rows) > len(columns),
        bargap=0.08 if len(columns) < 80 else 0.0,
    )
    return made


def drafted(
    diff: Diff, *, step: int = 0, rows: int = 40, train: Trace | None = None, serve: Trace | None = None
) -> Any:
    """The tokens each side would have drafted, side by side, after d2t; rows that differ come first.

    Args:
        diff: a finished diff.
        step: draft step.
        rows: how many rows to list.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure holding a table: prompt, root, token fed, and the three best tokens of each side.
    """
    go = style.graph_objects()
    figures = RowFigures.of(diff, train, serve)
    keys, best = _rows_with_output(figures, step)
    made = style.figure(
        f"What each side would have drafted, step {step}", _subtitle(best), height=430, meta={"wide": 680}
    )
    if not len(keys):
        return style.say(made, f"no best tokens of step {step} were compared")
    order = np.argsort(best.agree, kind="stable")[:rows]
    cells = _table_cells(
        figures, keys.take(order), BestTokens(best.train[order], best.serve[order], best.paired[order])
    )
    fill = ["#ffffff" if agree else "#fdf0e6" for agree in best.agree[order]]
    made.add_trace(
        go.Table(
            columnwidth=[2.2, 0.8, 1.3, 4, 4, 1.1],
            header={
                "values": [
                    "prompt",
                    "root",
                    "token fed",
                    "training would draft",
                    "serving would draft",
                    "first choice",
                ],
                "align": "left",
                "fill": {"color": "#eef1f5"},
                "line": {"color": style.GRID},
                "font": {"color": style.INK},
                "height": 28,
            },
            cells={
                "values": cells,
                "align": "left",
                "fill": {"color": [fill]},
                "line": {"color": style.GRID},
                "height": 24,
                "font": {"color": style.INK, "size": 11},
            },
        )
    )
    made.update_layout(margin={"l": 10, "r": 16, "t": 64, "b": 10})
    return made


def _table_cells(figures: RowFigures, keys: Rows, best: BestTokens) -> list[list[str | int]]:
    """The columns of `drafted`."""
    names = TokenNames.of(figures.train, figures.serve)
    prompts = prompt_names(figures.train, 26)

    def listed(ids: NDArray[np.int64]) -> str:
        return style.text("  ".join(style.shorten(names(token), 16) for token in ids[:_LISTED] if token >= 0))

    return [
        [style.text(prompts.get(prompt, "")) for prompt in keys.prompt_id.tolist()],
        keys.root.tolist(),
        [style.text(style.shorten(names(token), 16)) for token in keys.token_id.tolist()],
        [listed(ids) for ids in best.train],
        [listed(ids) for ids in best.serve],
        ["same" if agree else "differs" for agree in best.agree],
    ]


def _rows_with_output(figures: RowFigures, step: int) -> tuple[Rows, BestTokens]:
    rows = figures.rows(step)
    best = figures.best_tokens(rows)
    at = np.flatnonzero(best.paired)
    return rows.take(at), BestTokens(best.train[at], best.serve[at], best.paired[at])


def _subtitle(best: BestTokens) -> str:
    if not len(best.paired):
        return "top-k tokens after d2t"
    return (
        f"both sides would draft the same token in {int(best.agree.sum())} of {len(best.paired)} rows; tokens after d2t"
    )


def _mean(values: Float64) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _labels(
    figures: RowFigures, rows: Rows, best: BestTokens, names: TokenNames, columns: list[NDArray[np.intp]]
) -> list[str]:
    prompts = prompt_names(figures.train, 30)
    labels = []
    for part in columns:
        at = int(part[0])
        words = f"{style.text(prompts.get(int(rows.prompt_id[at]), ''))}, root {int(rows.root[at])}"
        if len(part) > 1:
            words += f" and {len(part) - 1} rows behind it"
        else:
            pair = [style.text(style.shorten(names(int(ids[at, 0])), 20)) for ids in (best.train, best.serve)]
            words += f"<br>training would draft {pair[0]}, serving {pair[1]}"
        labels.append(words)
    return labels


def _add_kl(made: Any, kl: Float64, columns: list[NDArray[np.intp]], labels: list[str]) -> None:
    go = style.graph_objects()
    kinds: list[tuple[str, Any, str]] = (
        [("median", np.nanmedian, style.BLUE)] if len(columns) < len(kl) else [("KL", np.nanmax, style.BLUE)]
    )
    if len(columns) < len(kl):
        kinds.append(("worst", np.nanmax, style.RED))
    for name, reduce, color in kinds:
        y = [float(reduce(kl[part])) if not np.isnan(kl[part]).all() else None for part in columns]
        made.add_trace(
            go.Scatter(
                x=list(range(len(columns))),
                y=[None if one is None else max(one, _TINY) for one in y],
                mode="markers",
                name=name,
                marker={"color": color, "size": 6 if len(columns) < 120 else 4},
                text=labels,
                hovertemplate=f"%{{text}}<br>{name if name == 'KL' else f'{name} KL'} %{{y:.2e}} nats<extra></extra>",
            )
        )


def _kl_axis(found: tuple[Float64, Float64] | None) -> dict[str, Any]:
    known = np.maximum(found[0][~np.isnan(found[0])], _TINY) if found is not None else np.zeros(0)
    return style.log_ticks(float(known.min()) / 2, float(known.max()) * 2) if len(known) else {}


def _add_bars(made: Any, y: list[float], labels: list[str], axis: int, name: str, color: str) -> None:
    go = style.graph_objects()
    made.add_trace(
        go.Bar(
            x=list(range(len(y))),
            y=y,
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            marker={"color": color, "line": {"width": 0}},
            name=name,
            text=labels,
            textposition="none",
            showlegend=False,
            hovertemplate=f"%{{text}}<br>{name}: %{{y:.0f}} %<extra></extra>",
        )
    )
