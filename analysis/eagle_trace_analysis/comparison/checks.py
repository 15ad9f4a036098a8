"""What is compared exactly and without reading a value: presence, shapes, tokens, positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.errors import IncomparableError
from eagle_trace.reader import Trace
from eagle_trace.sites import ROW_SITES, TOPK_SITES, Site
from eagle_trace_analysis.comparison.metrics import IdMetrics
from eagle_trace_analysis.comparison.params import shown_at
from eagle_trace_analysis.comparison.result import Divergence, Note, RowKey, SiteResult
from eagle_trace_analysis.pairing.align import Alignment, not_materialised, position_offset, unequal_tokens
from eagle_trace_analysis.pairing.pairs import Pairs

Int = NDArray[np.int64]
Int32 = NDArray[np.int32]
Shapes = dict[str, set[tuple[int, str]]]


def check_families(train: Trace, serve: Trace) -> None:
    """Raises IncomparableError where the two drafts are said to be of different families."""
    said = [trace.manifest.draft.get("family") for trace in (train, serve)]
    if all(said) and said[0] != said[1]:
        raise IncomparableError(
            f"{train.path} is of a draft of the family {said[0]}, {serve.path} of the family {said[1]}: they compute "
            "different things; record the same draft on both sides"
        )


def two_drafts(train: Trace, serve: Trace, sites: Sequence[Site], shapes: tuple[Shapes, Shapes]) -> str | None:
    """That these are two drafts, in words: where no site of the hidden size has one width in both."""
    seen = [
        [{width for width, _ in side[site.name]} for side in shapes]
        for site in sites
        if site.kind == "value" and site.axes[0] == "H" and all(site.name in side for side in shapes)
    ]
    if len(seen) < 2 or any(mine & theirs for mine, theirs in seen):
        return None
    mine, theirs = (min(widths) for widths in seen[0])
    return (
        f"{train.path} is of a draft that is {mine} wide, {serve.path} of one that is {theirs} wide: these are two "
        "drafts, so give two recordings of the same one"
    )


def shapes_of(trace: Trace) -> Shapes:
    """Width and dtype of each value site a trace knows: of its rows where it kept some, else as the host
    showed them.

    ``topk.*`` is listed with width 0 where the table of best ids holds rows. ``token`` and ``position`` are left out.
    """
    seen = {site: set(shapes) for site, shapes in trace.shapes.items() if site not in (*ROW_SITES, *TOPK_SITES)}
    for site in trace.sites:
        if data := trace.site_data(site):
            seen[site] = {(one.width, one.dtype) for one in data}
    if trace.table_rows("topk"):
        seen |= {site: {(0, "int64")} for site in TOPK_SITES}
    return seen


def check_shapes(
    sites: Sequence[Site], train: Trace, serve: Trace, shapes: tuple[Shapes, Shapes]
) -> dict[str, Divergence]:
    """Sites that one side lacks, or that differ in width, with the divergence of each.

    A side that lacks a site is excused if its manifest says that the host never computes it, or if its level
    keeps no such thing (``topk`` at level ``shapes``).
    """
    found: dict[str, Divergence] = {}
    for site in sites:
        if site.name in ("token", "position"):
            continue
        seen = [side.get(site.name, set()) for side in shapes]
        facts = [_shape_facts(side) for side in seen]
        step = 1 if site.steps == "later" else 0
        if seen[0] and seen[1]:
            if {width for width, _ in seen[0]} == {width for width, _ in seen[1]}:
                continue
            why = f"rows are {facts[0]['text']} in training and {facts[1]['text']} in serving"
            found[site.name] = Divergence(site.name, step, "shape", why, facts[0], facts[1])
        elif seen[0] or seen[1]:
            lacking, name, has = (serve, "serve", "train") if seen[0] else (train, "train", "serve")
            if not_materialised(lacking, site.name) or (lacking.level == "shapes" and site.name in TOPK_SITES):
                continue
            why = f"the {has} side has it, the {name} side does not"
            found[site.name] = Divergence(site.name, step, "presence", why, facts[0], facts[1])
    return found


def _shape_facts(seen: set[tuple[int, str]]) -> dict[str, Any]:
    if not seen:
        return {"shape": None, "dtype": None, "text": "absent"}
    listed = sorted(seen)
    text = ", ".join(f"[T, {width}] {dtype}" if width else "present" for width, dtype in listed)
    return {"shape": ["T", listed[-1][0]], "dtype": listed[-1][1], "text": text}


def check_parameters(
    apart: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]],
    results: Mapping[tuple[str, int], SiteResult],
) -> dict[tuple[str, int], SiteResult]:
    """Sites whose parameters as loaded are not the trained ones, where nothing else was seen to differ.

    Args:
        apart: parameters that differ: name, and the rows of params.parquet in training and in serving.
        results: what was compared so far.
    """
    by_site: dict[str, list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]] = {}
    for one in apart:
        by_site.setdefault(shown_at(one[0]), []).append(one)
    found = {}
    for site, differing in by_site.items():
        known = results.get((site, 0)) or SiteResult(site, 0)
        if known.divergence is None:
            facts = [_parameter_facts(row) for row in differing[0][1:]]
            names = ", ".join(name for name, _, _ in differing)
            are = "is not the trained one" if len(differing) == 1 else "are not the trained ones"
            why = f"as loaded, {names} {are} (norm {facts[1]['norm']:.6g}, trained {facts[0]['norm']:.6g})"
            divergence = Divergence(site, 0, "parameters", why, facts[0], facts[1])
            found[site, 0] = replace(known, divergence=divergence, reason=None)
    return found


def _parameter_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    shape = list(row["shape"])
    text = f"{row['canonical_name']} {shape} {row['dtype']}, norm {row['norm']:.6g}"
    return {"shape": shape, "dtype": row["dtype"], "norm": row["norm"], "digest": row["digest"], "text": text}


@dataclass(frozen=True)
class PromptMismatch:
    """The first place where one prompt's tokens differ between the sides (None: that side has no token
    there).
    """

    prompt_key: str
    prompt_id: int
    position: int
    train: int | None
    serve: int | None
    train_tokens: int
    serve_tokens: int
    shift: int

    @property
    def why(self) -> str:
        """One sentence."""
        text = f"prompt {self.prompt_key!r} differs at token {self.position}: "
        text += f"{_or_end(self.train)} in training, {_or_end(self.serve)} in serving"
        if self.shift:
            longer = "train" if self.shift > 0 else "serve"
            text += f" (the {longer} side has one more token in front, so its roots are shifted by one)"
        elif self.train_tokens != self.serve_tokens:
            text += f" ({self.train_tokens} tokens in training, {self.serve_tokens} in serving)"
        return text


def _or_end(token: int | None) -> str:
    return "nothing" if token is None else str(token)


def check_prompts(alignment: Alignment) -> list[PromptMismatch]:
    """Prompts that both sides name alike and that consist of different tokens."""
    train, serve = prompt_tokens(alignment.train), prompt_tokens(alignment.serve)
    found = []
    for key in alignment.prompt_keys:
        (prompt_id, a), (_, b) = train[key], serve[key]
        short = min(len(a), len(b))
        unequal = unequal_tokens(a[:short], b[:short])
        if len(a) == len(b) and not unequal.size:
            continue
        at = int(unequal[0]) if unequal.size else short
        shift = int(len(a) > 1 and np.array_equal(a[1:], b)) - int(len(b) > 1 and np.array_equal(b[1:], a))
        one = [int(side[at]) if at < len(side) else None for side in (a, b)]
        found.append(PromptMismatch(key, prompt_id, at, one[0], one[1], len(a), len(b), shift))
    return found


def prompt_tokens(trace: Trace) -> dict[str, tuple[int, Int]]:
    """Number and token ids of each prompt, by its key, without what was answered."""
    found = {}
    for row in trace.table("prompts").select(["prompt_key", "prompt_id", "token_ids", "num_prompt_tokens"]).to_pylist():
        # slicing by None keeps all: a trace that does not say how many belong to the prompt
        tokens = np.asarray((row["token_ids"] or [])[: row["num_prompt_tokens"]], dtype=np.int64)
        found[str(row["prompt_key"])] = int(row["prompt_id"]), tokens
    return found


def row_key(alignment: Alignment, pairs: Pairs, pair: int) -> RowKey:
    """Which row the `pair`-th pair is."""
    keys, at = pairs.train_keys, int(pairs.train[pair])
    step, prompt = int(keys.step[at]), int(keys.prompt_id[at])
    return RowKey(
        prompt_id=prompt,
        serve_prompt_id=int(pairs.serve_keys.prompt_id[pairs.serve[pair]]),
        prompt_key=alignment.prompt_key(prompt),
        root=int(keys.root[at]),
        step=step,
        path=tuple(keys.path[at, :step].tolist()),
    )


def _integer_site(
    alignment: Alignment,
    site: str,
    differs: NDArray[np.bool_],
    columns: tuple[Int32, Int32],
    constant: str = "",
) -> dict[int, SiteResult]:
    """Results of one integer site, step by step, from `differs` over the pairs of rows."""
    pairs = alignment.rows
    kind = "tokens" if site == "token" else "positions"
    steps = pairs.train_keys.step[pairs.train]
    results = {}
    for step in pairs.steps:
        here = np.flatnonzero(steps == step)
        coverage = pairs.coverage(step)
        if not here.size:
            results[step] = SiteResult(site, step, coverage, reason="no rows in common")
            continue
        bad = here[differs[here]]
        divergence = None
        if bad.size:
            row = row_key(alignment, pairs, int(bad[0]))
            a, b = (int(column[bad[0]]) for column in columns)
            why = f"{len(bad)} of {len(here)} rows differ; "
            why += f"first at root {row.root}: {a} in training, {b} in serving{constant}"
            divergence = Divergence(site, step, kind, why, {site: a}, {site: b}, row)  # type: ignore[arg-type]
        results[step] = SiteResult(site, step, coverage, IdMetrics(len(here), len(bad)), divergence=divergence)
    return results


def check_tokens(alignment: Alignment) -> dict[int, SiteResult]:
    """Tokens fed, exactly. A prompt whose tokens differ is a divergence at step 0, whether or not the token
    was fed.
    """
    pairs = alignment.rows
    a, b = pairs.train_keys.token_id[pairs.train], pairs.serve_keys.token_id[pairs.serve]
    results = _integer_site(alignment, "token", a != b, (a, b))
    mismatches = check_prompts(alignment)
    if mismatches and 0 in results:
        first = mismatches[0]
        count = f"{len(mismatches)} of {len(alignment.prompt_keys)} prompts differ; " if len(mismatches) > 1 else ""
        facts: list[Mapping[str, Any]] = [
            {
                "token": token,
                "token_position": first.position,
                "num_prompt_tokens": length,
                "prompt_id": first.prompt_id,
                "prompt_key": first.prompt_key,
            }
            for token, length in ((first.train, first.train_tokens), (first.serve, first.serve_tokens))
        ]
        divergence = Divergence("token", 0, "tokens", count + first.why, facts[0], facts[1])
        results[0] = SiteResult("token", 0, results[0].coverage, results[0].metrics, divergence=divergence)
    return results


def check_positions(alignment: Alignment) -> tuple[dict[int, SiteResult], list[Note]]:
    """Positions, up to a constant for each prompt; a constant that is not 0 becomes a benign note.

    Rotary attention sees differences of positions only, and only within a prompt, so a shift that is the same
    for all rows of a prompt changes no attention weight. It must be all of them, prefill, extends and draft steps,
    those without a partner too: a query may attend to their keys.
    """
    pairs = alignment.rows
    offset = position_offset(pairs)
    prompts = pairs.train_keys.prompt_id[pairs.train]
    constant = _expected_offset(prompts, offset, pairs.train_keys.step[pairs.train] == 0)
    columns = pairs.train_keys.position[pairs.train], pairs.serve_keys.position[pairs.serve]
    shifted = f" (other rows: shifted by {_range(constant)})" if constant.any() else ""
    results = _integer_site(alignment, "position", offset != constant, columns, shifted)
    for step, divergence in _moved_alone(alignment).items():
        found = results.get(step)
        if found is None or found.divergence is None:
            results[step] = SiteResult(
                "position", step, pairs.coverage(step), found.metrics if found else None, divergence=divergence
            )
    if not constant.any() or any(result.divergence for result in results.values()):
        return results, []
    text = f"train positions are shifted by {_range(constant)} against serve: no effect under RoPE"
    cached = alignment.serve.prompts.get("cached_tokens")
    if cached is not None and cached.fillna(0).any():
        text += " unless those of the cached prefix, which the server did not compute here, are not"
    return results, [Note("position-offset", text)]


def _expected_offset(prompts: Int32, offset: Int, first: NDArray[np.bool_]) -> Int:
    """The constant that each pair's offset should be: that of its prompt's step-0 rows, `first`.

    Drafts can outnumber those, and may be what is wrong. Where step 0 itself has several, rows that are not shifted
    at all are taken for the right ones, so that what is named is the rows that are.
    """
    due, known = _constant_of_each(prompts, offset, np.flatnonzero(first))
    unmoved = ~known & np.isin(prompts, prompts[first & (offset == 0)])
    return np.where(unmoved, 0, np.where(known, due, _median_of_each(prompts, offset)))


def _moved_alone(alignment: Alignment) -> dict[int, Divergence]:
    """Rows of one side without a partner that are rotated otherwise than the rows of their prompt that have one.

    The place of a row is its root plus its step; where all paired rows of a prompt stand one constant apart from
    their places, the others must too.
    """
    pairs = alignment.rows
    found: dict[int, Divergence] = {}
    for side, keys, paired in (
        ("training", pairs.train_keys, pairs.train),
        ("serving", pairs.serve_keys, pairs.serve),
    ):
        moved = keys.position.astype(np.int64) - keys.root - keys.step
        alone = np.ones(len(keys), dtype=np.bool_)
        alone[paired] = False
        if alone.any() and len(paired):
            due, known = _constant_of_each(keys.prompt_id, moved, paired)
            bad = np.flatnonzero(alone & known & (moved != due))
            for step in set(keys.step[bad].tolist()) - set(found):
                found[step] = _moved(side, keys, bad[keys.step[bad] == step], due)
    return found


def _constant_of_each(groups: Int32, values: Int, known: Int) -> tuple[Int, NDArray[np.bool_]]:
    """For each element the one value that the `known` elements of its group have, and whether they have one."""
    numbers, of = np.unique(groups, return_inverse=True)
    low = np.full(len(numbers), np.iinfo(np.int64).max)
    high = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(low, of[known], values[known])
    np.maximum.at(high, of[known], values[known])
    return low[of], (low == high)[of]


def _moved(side: str, keys: Rows, at: Int, due: Int) -> Divergence:
    """The divergence of the rows `at` of one side, which should stand `due` away from their places."""
    first, step = int(at[0]), int(keys.step[at[0]])
    position = int(keys.position[first])
    why = (
        f"{len(at)} rows of {side} without a partner are not rotated as the rest of their prompt; first at root "
        f"{keys.root[first]}: {position}, where {int(keys.root[first]) + step + int(due[first])} is due"
    )
    facts = {"position": position, "prompt_id": int(keys.prompt_id[first])}
    sides = ({}, facts) if side == "serving" else (facts, {})
    return Divergence("position", step, "positions", why, *sides)


def _median_of_each(groups: NDArray[np.int32], values: Int) -> Int:
    """For each element the (lower) median of its group."""
    if not len(values):
        return values
    order = np.lexsort((values, groups))
    _, first, inverse, count = np.unique(groups[order], return_index=True, return_inverse=True, return_counts=True)
    median = values[order][first + (count - 1) // 2]
    out = np.empty_like(values)
    out[order] = median[inverse]
    return out


def _range(values: Int) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:+d}" if low == high else f"{low:+d} to {high:+d} (one constant a prompt)"
