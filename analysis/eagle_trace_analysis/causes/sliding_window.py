"""A sliding window of attention, on one side only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle_trace_analysis.causes.base import Cause, Hypothesis, Outcome, counterfactual
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed

FLAG = "--speculative-draft-window-size"
MOST_WINDOWS, WINDOW_ROWS = 64, 4


def _served_window(context: Context) -> int | None:
    words = [str(word) for word in context.serve.manifest.settings.get("sglang_args", [])]
    for at, word in enumerate(words):
        if word == FLAG and at + 1 < len(words) and words[at + 1].isdigit():
            return int(words[at + 1])
        if word.startswith(f"{FLAG}=") and word.split("=")[1].isdigit():
            return int(word.split("=")[1])
    return None


def check(context: Context) -> Outcome:
    """A sliding window on one side only."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        def seeing(window: int | None) -> Replay:
            return replay.varied(view=View(replay.recorded, window=window, by_root=False))

        if replay.form.window is not None:
            yield Hypothesis("no window", seeing(None))
        served = _served_window(context)
        for window in (served, served + 1 if served else None):
            if window:
                yield Hypothesis(f"a window of {window} tokens", seeing(window), deployed=True)
        fitted = fit_window(replay, node)
        if fitted is not None:
            yield Hypothesis(f"a window of {fitted} tokens (fitted)", seeing(fitted))

    def fix(words: str) -> str:
        if context.form is not None and context.form.window:
            return f"serve with {FLAG} {context.form.window}, the window of the training"
        return f"the server attends with {words}, training with none: serve without {FLAG}"

    return counterfactual(context, context.layer_sites("attn.context"), others, fix, own=("window",))


def fit_window(replay: Replay, node: Replayed) -> int | None:
    """The window that comes nearest to the rows furthest off: evenly spaced ones first, then all around the best."""
    found = replay.recompute(node.site, node.step)
    if not isinstance(found, Recomputed):
        return None
    worst = np.argsort(-found.row_errors)[:WINDOW_ROWS]
    rows = found.rows[worst]
    keys = replay.recorded.keys.take(rows)
    view = View(replay.recorded, by_root=False)
    seeing = replay.varied(view=view)
    errors: dict[int, float] = {}

    def error(window: int) -> float:
        if window not in errors:
            view.window = window
            got, done = seeing.computed(node.site, rows, found.channels)
            off = got[done] - found.recorded[worst][done]
            errors[window] = float((off * off).sum()) if done.any() else float("inf")
        return errors[window]

    longest = int((keys.root + keys.step).max()) + 1
    best = min(np.unique(np.linspace(1, longest, MOST_WINDOWS).astype(int)).tolist(), key=error)
    around = max(1, longest // MOST_WINDOWS)
    step = max(1, 2 * around // MOST_WINDOWS)
    near = range(max(1, best - around), min(longest, best + around) + 1, step)
    found_window: int = min([*near, best], key=error)
    return found_window


CAUSE = Cause(
    "sliding-window",
    "Accept length falls with the length of the request.",
    "Attention recomputed over all keys, and over the last w of them for the w that comes nearest.",
    "Give the server the window of the training (--speculative-draft-window-size), or none.",
    ("layer.0.attn.context",),
    check,
)
