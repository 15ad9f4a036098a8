"""What attention sees: a window, a stale cache, a cached prefix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import (
    RECORD_VALUES,
    Cause,
    Hypothesis,
    Outcome,
    as_trained,
    confirmed,
    counterfactual,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.comparison.metrics import relative_error
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View, cached_sites
from eagle_trace_analysis.replay.replay import Recomputed, Replay, Replayed

#: keys and values of some roots of a prompt, and the roots, in order
Given = tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]
FLAG = "--speculative-draft-window-size"
MOST_WINDOWS, WINDOW_ROWS = 64, 4
#: factors on the scores that are tried: powers of 2 up to this one, so many
MOST_SCALE, SCALES, SCALE_ROWS = 3.0, 13, 8
NEWTON_STEPS, NUDGE = 8, 1e-3


def _sites(context: Context) -> list[str]:
    return context.layer_sites("attn.context")


def _served_window(context: Context) -> int | None:
    words = [str(word) for word in context.serve.manifest.settings.get("sglang_args", [])]
    for at, word in enumerate(words):
        if word == FLAG and at + 1 < len(words) and words[at + 1].isdigit():
            return int(words[at + 1])
        if word.startswith(f"{FLAG}=") and word.split("=")[1].isdigit():
            return int(word.split("=")[1])
    return None


def check_window(context: Context) -> Outcome:
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

    return counterfactual(context, _sites(context), others, fix, own=("window",))


def fit_window(replay: Replay, node: Replayed) -> int | None:
    """The window that comes nearest to the rows furthest off: evenly spaced ones first, then all around the best."""
    found = replay.recompute(node.site, node.step)
    if not isinstance(found, Recomputed):
        return None
    d, y = found.recorded - found.expected, found.expected
    worst = np.argsort(-relative_error((d * d).sum(axis=1), (y * y).sum(axis=1)))[:WINDOW_ROWS]
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


def check_scale(context: Context) -> Outcome:
    """Another factor on the scores: the deployed config's, that of no YaRN, or the one that the recorded rows show."""

    def others(replay: Replay, node: Replayed) -> Iterator[Hypothesis]:
        form = replay.form
        served = context.served_form.on_scores if context.served_form is not None else form.on_scores
        if served != form.on_scores:
            yield Hypothesis(f"the deployed factor {served:.6g}", replay.varied(scale=served), deployed=True)
        width = form.head_dim + (form.latent.nope if form.latent is not None else 0)
        if not math.isclose(form.on_scores, width**-0.5):
            words = f"{width**-0.5:.6g} = 1 / sqrt({width})"
            yield Hypothesis(words, replay.varied(scale=width**-0.5))
        fitted = fit_scale(replay, node)
        if fitted is not None:
            yield Hypothesis(f"{fitted:.6g} (fitted)", replay.varied(scale=fitted))

    def fix(words: str) -> str:
        trained = f"{context.form.on_scores:.6g}" if context.form is not None else "the trained factor"
        what = f"a factor of {trained} on the scores"
        otherwise = (
            f"the server multiplies the scores by {words}, training by {trained}: copy the rope parameters of the "
            "training config (mscale_all_dim, factor), and the widths of the heads"
        )
        return as_trained(context, "rope", ("scale",), what, otherwise)

    return counterfactual(context, _sites(context), others, fix, own=("scale",))


def fit_scale(replay: Replay, node: Replayed) -> float | None:
    """The factor on the scores that comes nearest to some recorded rows.

    The nearest of evenly spaced logarithms, and from there Gauss-Newton steps.
    """
    found = replay.recompute(node.site, node.step)
    if not isinstance(found, Recomputed):
        return None
    some = np.unique(np.linspace(0, len(found.rows) - 1, SCALE_ROWS).astype(np.int64))
    rows, target = found.rows[some], found.recorded[some].astype(np.float64)
    start = replay.form.on_scores

    def off(power: float) -> NDArray[Any]:
        scaled = replay.varied(scale=start * 2.0**power, view=replay.view if replay.view_given else None)
        return scaled.channels(node.site, rows, found.channels).astype(np.float64) - target

    power = min(np.linspace(-MOST_SCALE, MOST_SCALE, SCALES).tolist(), key=lambda one: float(np.square(off(one)).sum()))
    for _ in range(NEWTON_STEPS):
        here = off(power)
        slope = (off(power + NUDGE) - here) / NUDGE
        steep = float(np.square(slope).sum())
        if not np.isfinite(steep) or steep == 0:
            return None
        power = float(np.clip(power - float((slope * here).sum()) / steep, -MOST_SCALE, MOST_SCALE))
    return float(start * 2.0**power)


def check_refresh(context: Context) -> Outcome:
    """Draft keys kept where the verify round should have replaced them."""
    rounds = context.serve.table("rounds")
    if not rounds.num_rows:
        return not_tested("the serve trace holds no verify rounds", "record the serve side with more than one round")

    def other(replay: Replay, _: Replayed) -> Iterator[Hypothesis]:
        stale = left_by_drafts(context)
        for fresh in (True, False):
            view = View(replay.recorded, window=replay.form.window, stale=stale, fresh_in_call=fresh)
            words = f"{len(stale)} positions still holding the keys of the draft step that guessed them"
            yield Hypothesis(words, replay.varied(view=view))

    return counterfactual(
        context,
        _sites(context),
        other,
        lambda _: (
            "the server must run the draft over the accepted tokens after each verify round (draft extend) and "
            "overwrite their keys and values; update it, or report it"
        ),
    )


def left_by_drafts(context: Context) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
    """For each (prompt, root) whose token a draft step guessed right: (root, path) of that step's row.

    The step s row below root r is fed the token at place r + 1 + s and writes the cache at position r + s, which is
    the place of the step-0 row at root r + s.
    """
    rows = context.serve.rows
    tokens = {
        int(number): ids
        for number, ids in zip(context.serve.prompts["prompt_id"], context.serve.prompts["token_ids"], strict=True)
    }
    found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    paths = rows.paths()
    for row in np.flatnonzero((rows.step > 0) & rows.own_path):
        prompt, root, path = int(rows.prompt_id[row]), int(rows.root[row]), paths[row]
        true = tokens.get(prompt, ())[root + 2 : root + 2 + len(path)]
        if len(true) == len(path) and tuple(int(token) for token in true) == path:
            found[prompt, root + len(path)] = root, path
    return found


def check_prefix(context: Context) -> Outcome:
    """Keys of a cached prefix that are not what this draft computes for it."""
    replay = context.replay
    if replay is None:
        return not_tested(context.no_replay, RECORD_VALUES)
    sites = _sites(context)
    missing = _missing_roots(context)
    if not missing:
        prompts = len(np.unique(replay.recorded.keys.prompt_id))
        return ruled_out(f"no cached prefix: the server computed every row of {prompts} prompts itself")
    if not sites:
        return not_tested("attention was not recorded", RECORD_VALUES)
    given = given_by_training(context, missing)
    if len(given) < len(missing):
        return not_tested(
            f"{len(missing)} prompts start from a cached prefix, of which the training side has {len(given)} only",
            "record the training side with --replay on the same prompts",
        )
    site = sites[0]
    warm, cold, allowed = errors_over_given(context, site, given)
    if not warm:
        return not_tested("no row behind a cached prefix could be recomputed", RECORD_VALUES)
    figures = (
        f"{site} over training's keys for the cached prefix of {len(given)} prompts: error {np.median(warm):.1e} "
        f"(median of {len(warm)}), of other prompts {np.median(cold) if cold else 0.0:.1e} ({len(cold)} rows), "
        f"{allowed:.1e} allowed"
    )
    own_prefix = all(context.agrees(name) for name in context.feature_sites)
    if np.median(warm) > allowed >= (np.median(cold) if cold else 0.0) and own_prefix:
        off = context.engine.WORDS.no_prefix_cache
        return confirmed(figures, f"serve with {off}, or flush the cache when the draft or its settings change", site)
    return ruled_out(figures)


def errors_over_given(context: Context, site: str, given: dict[int, Given]) -> tuple[list[float], list[float], float]:
    """Attention recomputed with keys that training has for roots which the server has not.

    Args:
        context: the pair, with a replay.
        site: attention's output of a layer.
        given: training's keys and values, and the roots they are of, by serve prompt (`given_by_training`).

    Returns:
        Relative errors of rows that see such a root, those of all others, and what is allowed.
    """
    replay, control = context.replay, context.control
    assert replay is not None
    whole = replay.varied(view=View(replay.recorded, window=replay.form.window, missing=given))
    allowed = 4 * max(replay.allowed(site)["rho_max"], control.allowed(site)["rho_max"] if control else 0.0)
    seeing: list[float] = []
    others: list[float] = []
    for step in replay.recorded.steps:
        found = whole.recompute(site, step)
        if not isinstance(found, Recomputed):
            continue
        d, y = found.recorded - found.expected, found.expected
        rho = relative_error((d * d).sum(axis=1), (y * y).sum(axis=1))
        keys = replay.recorded.keys.take(found.rows)
        for prompt, root, error in zip(keys.prompt_id.tolist(), keys.root.tolist(), rho.tolist(), strict=True):
            (seeing if prompt in given and root > given[prompt][2].min() else others).append(error)
    return seeing, others, allowed


def _missing_roots(context: Context) -> dict[int, Any]:
    """Roots before each prompt's first recorded step-0 row, by serve prompt."""
    replay = context.replay
    if replay is None:
        return {}
    rows, found = context.serve.rows, {}
    for prompt in np.unique(replay.recorded.keys.prompt_id):
        roots = rows.root[(rows.prompt_id == prompt) & (rows.step == 0)]
        if len(roots) and roots.min() > 0:
            found[int(prompt)] = np.arange(int(roots.min()))
    return found


def given_by_training(context: Context, missing: dict[int, Any]) -> dict[int, Given]:
    """Training's keys and values of roots that the server has no rows of, by serve prompt; of those it has alone."""
    control = context.control
    if control is None:
        return {}
    numbers = dict(zip(context.train.prompts["prompt_key"], context.train.prompts["prompt_id"], strict=True))
    keys = dict(zip(context.serve.prompts["prompt_id"], context.serve.prompts["prompt_key"], strict=True))
    found = {}
    for prompt, roots in missing.items():
        if (train_prompt := numbers.get(keys.get(prompt))) is None:
            continue
        template = context.train.rows
        at = np.flatnonzero((template.prompt_id == train_prompt) & (template.step == 0) & np.isin(template.root, roots))
        at = at[np.unique(template.root[at], return_index=True)[1]]
        wanted = template.take(at)
        k, v = (control.recorded.at(name, wanted) for name in cached_sites(control.recorded, "layer.0"))
        if len(at) == len(roots) and k is not None and v is not None and k.present.all() and v.present.all():
            found[prompt] = k.values, v.values, roots
    return found


CAUSES = (
    Cause(
        "softmax-scale",
        "Accept length falls, often only a little; queries and keys are equal, what attention makes of them is not.",
        "Attention recomputed with the deployed config's factor on the scores, with 1 / sqrt(width of a query), and "
        "with the factor that comes nearest.",
        "Copy the rope parameters of the training config (YaRN's mscale_all_dim and factor scale the scores of latent "
        "attention).",
        ("layer.0.attn.context",),
        check_scale,
    ),
    Cause(
        "sliding-window",
        "Accept length falls with the length of the request.",
        "Attention recomputed over all keys, and over the last w of them for the w that comes nearest.",
        "Give the server the window of the training (--speculative-draft-window-size), or none.",
        ("layer.0.attn.context",),
        check_window,
    ),
    Cause(
        "kv-not-refreshed",
        "8 to 15 % lower accept length; the first round is fine.",
        "Attention recomputed with the keys that draft steps left behind at accepted positions.",
        "Run the draft over accepted tokens after each verify round.",
        ("layer.0.attn.context",),
        check_refresh,
        of_server=True,
    ),
    Cause(
        "kv-cached-prefix",
        "Decays over time; a cold start is fine.",
        "Attention of prompts that start from a cached prefix recomputed with the keys that training has for it.",
        "Serve without a prefix cache, or flush the cache when the draft changes.",
        ("layer.0.attn.context",),
        check_prefix,
        of_server=True,
    ),
)
