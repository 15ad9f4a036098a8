"""Norm of every parameter as each side loaded it, and whether the bytes are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.params import same
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.comparison.rowwise import open_traces
from eagle_trace_analysis.plots import style

Float64 = NDArray[np.float64]

_STATUS = {
    "same": ("the same on both sides", style.GREEN, "circle"),
    "differ": ("values differ", style.RED, "x"),
    "dtype": ("another dtype", style.BLUE, "diamond"),
    "one side": ("on one side only", style.PURPLE, "triangle-right"),
    "not loaded": ("not in the checkpoint: left at its start", style.INK, "square"),
}


def weights(diff: Diff, *, train: Trace | None = None, serve: Trace | None = None) -> Any:
    """Norm of every parameter as each side loaded it, and whether the bytes are the same.

    Args:
        diff: a finished diff.
        train, serve: the traces, if they are no longer where the diff found them.

    Returns:
        A plotly figure: one line per parameter (speculators' names), L2 norm on a log axis, shape and colour say what
        became of it.
    """
    go = style.graph_objects()
    table = compare_params(*open_traces(diff, train, serve))
    counts = table["status"].value_counts()
    words = ", ".join(f"{counts[name]} {_STATUS[name][0]}" for name in _STATUS if name in counts)
    made = style.figure(
        "Weights as loaded", words or "no parameters were recorded", height=170 + 22 * max(4, len(table))
    )
    if table.empty:
        return style.say(made, "no parameters were recorded")
    names = table["name"].tolist()
    positive = table[["train_norm", "serve_norm"]].to_numpy(dtype=float)
    low = float(np.nanmin(positive[positive > 0])) / 3 if (positive > 0).any() else 0.1
    for status, (label, color, symbol) in _STATUS.items():
        part = table[table["status"] == status]
        if part.empty:
            continue
        norm = part["serve_norm"].fillna(part["train_norm"]).to_numpy(dtype=float)
        made.add_trace(
            go.Scatter(
                x=np.maximum(norm, low),
                y=part["name"],
                mode="markers",
                name=label,
                customdata=part[["train", "serve"]].to_numpy(),
                marker={"color": color, "symbol": symbol, "size": 11, "line": {"color": "white", "width": 0.5}},
                hovertemplate=f"<b>%{{y}}</b>: {label}<br>training: %{{customdata[0]}}"
                "<br>serving: %{customdata[1]}<extra></extra>",
            )
        )
    high = float(np.nanmax(positive, initial=low)) * 2
    made.update_xaxes(**style.log_ticks(low, high), title={"text": "L2 norm (of the serving side where both have it)"})
    made.update_yaxes(
        autorange="reversed",
        categoryorder="array",
        categoryarray=names,
        tickmode="array",
        tickvals=names,
        ticktext=[style.text(name) for name in names],
    )
    return made


def compare_params(train: Trace, serve: Trace) -> pd.DataFrame:
    """Parameters of both sides by canonical name: name, status, train_norm, serve_norm, and both sides in words."""
    sides = [trace.params.drop_duplicates("canonical_name").set_index("canonical_name") for trace in (train, serve)]
    names = style.unique([*sides[0].index, *sides[1].index])
    rows = []
    for name in names:
        pair = [side.loc[name] if name in side.index else None for side in sides]
        rows.append(
            {
                "name": str(name),
                "status": _status(pair),
                "train_norm": _norm(pair[0]),
                "serve_norm": _norm(pair[1]),
                "train": _param_words(pair[0]),
                "serve": _param_words(pair[1]),
            }
        )
    return pd.DataFrame(rows, columns=["name", "status", "train_norm", "serve_norm", "train", "serve"])


def _status(pair: list[Any]) -> str:
    known = [one for one in pair if one is not None]
    if any(_lacking(one) for one in known):
        return "not loaded"
    if len(known) < 2:
        return "one side"
    if pair[0]["dtype"] == pair[1]["dtype"] and same(pair[0], pair[1]):
        return "same"
    alike = abs(pair[0]["norm"] - pair[1]["norm"]) <= 1e-2 * max(pair[0]["norm"], 1e-30)
    return "dtype" if pair[0]["dtype"] != pair[1]["dtype"] and alike else "differ"


def _norm(param: Any) -> float:
    return float("nan") if param is None else float(param["norm"])


def _param_words(param: Any) -> str:
    if param is None:
        return "absent"
    shape = ", ".join(str(size) for size in param["shape"])
    words = f"[{shape}] {param['dtype']}, norm {style.number(float(param['norm']))}"
    if param["nonfinite"]:
        words += f", {param['nonfinite']} not finite"
    return style.text(words + (", not in the checkpoint" if _lacking(param) else ""))


def _lacking(param: Any) -> bool:
    """Whether a checkpoint was read and did not hold it; a model recorded while it trained has none."""
    return param["in_checkpoint"] is not None and not param["in_checkpoint"]
