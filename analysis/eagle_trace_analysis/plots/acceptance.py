"""Accept length by depth: what the server got, and what the training-side forward predicts."""

from __future__ import annotations

from typing import Any

from eagle_trace.errors import TraceError
from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis.comparison.result import Diff
from eagle_trace_analysis.pairing.tokens import prompt_names
from eagle_trace_analysis.plots import style


def accept_length(diff: Diff, *, serve: Trace | None = None) -> Any:
    """Share of draft tokens accepted at each depth, and accept length by prompt.

    Args:
        diff: a finished diff.
        serve: the serve trace, if it is no longer where the diff found it (only for the prompts' texts).

    Returns:
        A plotly figure of two panels: of the rounds that accepted all above a depth, the share (percent) that accepted
        a token there, observed and (if the diff predicts it) as the training-side forward predicts; and the mean accept
        length (tokens a verify round, bonus token included) of each prompt.
    """
    go = style.graph_objects()
    accept = diff.accept_length
    made = style.figure(
        "Accept length",
        _subtitle(diff),
        height=420,
        barmode="group",
        meta={"stack": True},
    )
    if accept.observed is None:
        return style.say(made, "not known: the serve trace holds no verify rounds")
    shares = [("observed", style.SERVE, accept.by_depth)]
    if accept.predicted_by_depth:
        name = "predicted by the training forward"
        shares.append((name if accept.comparable else f"{name}, as a chain", style.TRAIN, accept.predicted_by_depth))
    for name, color, by_depth in shares:
        made.add_trace(
            go.Bar(
                x=[f"{depth}" for depth in range(1, len(by_depth) + 1)],
                y=[100 * share for share in by_depth],
                name=name,
                marker={"color": color, "line": {"color": style.INK, "width": 0.6}},
                text=[f"{share:.0%}" for share in by_depth],
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"depth %{{x}}: %{{y:.1f}} % accepted ({name})<extra></extra>",
            )
        )
    _add_prompts(made, diff, _names(diff, serve))
    made.update_layout(
        xaxis={"title": {"text": "depth of the draft token"}, "type": "category", "domain": [0, 0.42]},
        yaxis={
            "title": {"text": "accepted (% of rounds that got there)"},
            "range": [0, 112],
            "tickvals": [0, 25, 50, 75, 100],
        },
        xaxis2={
            "title": {"text": "accept length by prompt (tokens per round)"},
            "rangemode": "tozero",
            "domain": [0.62, 1],
            "anchor": "y2",
        },
        yaxis2={"autorange": "reversed", "anchor": "x2", "tickfont": {"size": 11}},
    )
    return made


def _subtitle(diff: Diff) -> str:
    accept = diff.accept_length
    if accept.observed is None:
        return "tokens committed a verify round, bonus token included"
    words = f"{accept.observed:.2f} tokens a verify round, bonus token included, over {accept.rounds} rounds"
    if accept.predicted is not None and not accept.comparable:
        return words + f" (a tree); a chain of the training forward gets {accept.predicted:.2f}, not to be compared"
    return words + (f"; the training forward predicts {accept.predicted:.2f}" if accept.predicted is not None else "")


def _names(diff: Diff, serve: Trace | None) -> dict[str, str]:
    """What to call each prompt, by key."""
    try:
        trace = serve or open_trace(str(diff.traces["serve"]["path"]), allow_partial=True)
        names = prompt_names(trace, 24)
        return {
            str(key): names[number]
            for number, key in zip(trace.prompts["prompt_id"], trace.prompts["prompt_key"], strict=True)
        }
    except TraceError:
        return {}


def _add_prompts(made: Any, diff: Diff, names: dict[str, str]) -> None:
    go = style.graph_objects()
    by_prompt = sorted(diff.accept_length.by_prompt.items(), key=lambda item: item[1])
    most = 20
    shown = by_prompt if len(by_prompt) <= most else [*by_prompt[: most // 2], *by_prompt[-most // 2 :]]
    labels = [style.text(names.get(key, style.shorten(key, 24))) for key, _ in shown]
    made.update_layout(yaxis2={"tickmode": "array", "tickvals": list(range(len(shown))), "ticktext": labels})
    made.add_trace(
        go.Scatter(
            x=[value for _, value in shown],
            y=list(range(len(shown))),
            xaxis="x2",
            yaxis="y2",
            mode="markers",
            marker={"color": style.SERVE, "size": 10, "line": {"color": style.INK, "width": 0.6}},
            showlegend=False,
            hovertemplate="%{y}: %{x:.2f} tokens per round<extra></extra>",
        )
    )
    if diff.accept_length.observed is not None:
        made.add_shape(
            type="line",
            x0=diff.accept_length.observed,
            x1=diff.accept_length.observed,
            y0=0,
            y1=1,
            xref="x2",
            yref="y2 domain",
            line={"color": style.MUTED, "dash": "dash", "width": 1},
        )
