"""A trace for people and for programs: what was recorded, by whom, how. Reads metadata only, whatever its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eagle_trace.capture import Rows
from eagle_trace.errors import UsageError
from eagle_trace.reader import SketchReader, Trace, ValueReader, read_keys, read_statistics
from eagle_trace_analysis.pairing.tokens import TokenNames
from eagle_trace_analysis.report.strict import strict_text

FORMAT_VERSION = 1
_PROMPTS = 8
_ROUNDS = 12


def summary(trace: Trace, *, prompts: int = _PROMPTS, rounds: int = _ROUNDS) -> dict[str, Any]:
    """What a trace holds, as plain data that strict JSON can hold.

    Args:
        trace: the trace; no row of any site is read.
        prompts: how many prompts to list.
        rounds: how many verify rounds to list.
    """
    manifest = trace.manifest
    names = TokenNames.of(trace)
    return {
        "format_version": FORMAT_VERSION,
        "path": str(trace.path),
        "sealed": trace.sealed,
        "missing": list(trace.missing),
        "without_checksums": len(trace.unchecked),
        "side": manifest.side,
        "level": manifest.level,
        "host": manifest.host,
        "packages": dict(manifest.packages),
        "dtype": manifest.dtype,
        "device": manifest.device,
        "ranks": manifest.ranks,
        "created": manifest.created,
        "stopped": manifest.stopped,
        "target": _checkpoint(manifest.target),
        "draft": _checkpoint(manifest.draft),
        "settings": {name: value for name, value in manifest.settings.items() if name != "server_counts"},
        "changes": list(manifest.changes),
        "not_materialised": list(manifest.not_materialised),
        "warnings": list(manifest.warnings),
        "argv": list(manifest.argv),
        "bytes": sum(facts["bytes"] for facts in trace.files.values()),
        "rows": trace.table_rows("rows"),
        "sites": _sites(trace),
        "prompts": _prompts(trace, names, prompts),
        "rounds": _rounds(trace, names, rounds),
    }


def _checkpoint(facts: Mapping[str, Any]) -> dict[str, Any]:
    kept = (
        "path", "config_digest", "architecture", "family", "model_type", "layer_ids", "captures", "captured_inputs",
        "dropped_keys", "missing_keys",
    )  # fmt: skip
    return {name: facts[name] for name in kept if facts.get(name) not in (None, [], "")}


def _sites(trace: Trace) -> list[dict[str, Any]]:
    """Every site with rows, dtypes, widths and bytes; of level ``shapes``, what the host showed."""
    found = []
    sizes: dict[str, int] = {}
    for file, facts in trace.files.items():
        if file.startswith("values/site="):
            site = file.split("/")[1].removeprefix("site=")
            sizes[site] = sizes.get(site, 0) + facts["bytes"]
    for site in trace.sites:
        data = trace.site_data(site)
        shapes = [(one.width, one.dtype) for one in data] or sorted(trace.shapes.get(site, ()))
        found.append(
            {
                "site": site,
                "rows": sum(one.rows for one in data),
                "bytes": sizes.get(site, 0),
                "shapes": [{"width": width, "dtype": dtype} for width, dtype in shapes],
            }
        )
    return found


def _prompts(trace: Trace, names: TokenNames, most: int) -> dict[str, Any]:
    table = trace.table("prompts")
    listed = []
    for row in table.slice(0, most).to_pylist():
        tokens = row["token_ids"] or []
        count = row["num_prompt_tokens"] or 0
        listed.append(
            {
                "prompt_id": row["prompt_id"],
                "prompt_key": row["prompt_key"],
                "request_id": row["request_id"],
                "prompt_tokens": count,
                "tokens": len(tokens),
                "text": row["text"] or "",
                "token_texts": [names(token) for token in tokens[:count]],
                "token_ids": list(tokens[:count]),
                "output": names.join(row["output_ids"] or []),
                "cached_tokens": row["cached_tokens"] or 0,
                "finish_reason": row["finish_reason"],
            }
        )
    return {"count": table.num_rows, "listed": listed}


def _rounds(trace: Trace, names: TokenNames, most: int) -> dict[str, Any]:
    table = trace.table("rounds")
    listed = []
    for row in table.slice(0, most).to_pylist():
        accepted = row["accepted"] or []
        listed.append(
            {
                "prompt_id": row["prompt_id"],
                "round": row["round"],
                "root": row["root"],
                "proposed": [names(token) for token in row["proposed"] or []],
                "accepted": [names(token) for token in accepted],
                "bonus": None if row["bonus"] is None or row["bonus"] < 0 else names(row["bonus"]),
            }
        )
    length = None
    if table.num_rows:
        accepted_count = pc.sum(pc.list_value_length(table.column("accepted"))).as_py() or 0
        bonus = pc.sum(pc.cast(pc.greater_equal(table.column("bonus"), 0), "int64")).as_py() or 0
        length = (accepted_count + bonus) / table.num_rows
    return {"count": table.num_rows, "accept_length": length, "listed": listed}


def row(trace: Trace, site: str, prompt: int | str, root: int, step: int = 0) -> dict[str, Any]:
    """The rows of one site at one place; more than one if the draft is a tree or the host computed it again.

    Args:
        trace: the trace.
        site: name of a site.
        prompt: prompt_id, or prompt_key.
        root, step: of the row.

    Raises:
        UsageError: no such prompt or row; the message says what there is.
        TraceError: the trace has no rows of the site.
    """
    prompt_id = _prompt_id(trace, prompt)
    names = TokenNames.of(trace)
    found: list[dict[str, Any]] = []
    steps: set[int] = set()
    roots: set[int] = set()
    if not trace.site_data(site):
        trace.keys(site)  # raises, naming the sites there are
    for data in trace.site_data(site):
        keys = read_keys(data)
        here = keys.prompt_id == prompt_id
        roots |= set(np.unique(keys.root[here & (keys.step == step)]).tolist())
        steps |= set(np.unique(keys.step[here]).tolist())
        at = np.flatnonzero(here & (keys.root == root) & (keys.step == step))
        if not len(at):
            continue
        statistics = read_statistics(data)
        values = ValueReader(data, 0).take(at) if data.has_values else None
        sketches = SketchReader(data, 0).take(at) if data.has_sketch else None
        for number, index in enumerate(at.tolist()):
            facts = {name: float(getattr(statistics, name)[index]) for name in ("norm", "absmax", "mean")}
            found.append(
                {
                    **_key(keys, index, names),
                    "site": site,
                    "shape": [data.width],
                    "dtype": data.dtype,
                    **facts,
                    "nonfinite": int(statistics.nonfinite[index]),
                    "values": None if values is None else values[number].astype(np.float64).tolist(),
                    "sketch": None if sketches is None else sketches[number].astype(np.float64).tolist(),
                }
            )
    if not found:
        there = f"roots {min(roots)} to {max(roots)}" if roots else "no rows"
        raise UsageError(
            f"{trace.path} has no row of {site} at prompt {prompt}, root {root}, step {step}: "
            f"it has {there} at that step, steps {', '.join(map(str, sorted(steps))) or 'none'}"
        )
    return {"format_version": FORMAT_VERSION, "path": str(trace.path), "rows": found}


def _prompt_id(trace: Trace, prompt: int | str) -> int:
    table = trace.table("prompts").select(["prompt_id", "prompt_key"])
    ids, keys = (table.column(name).to_pylist() for name in ("prompt_id", "prompt_key"))
    if str(prompt).isdigit() and int(prompt) in ids:
        return int(prompt)
    if prompt in keys:
        return int(ids[keys.index(prompt)])
    listed = ", ".join(f"{number} ({key})" for number, key in list(zip(ids, keys, strict=True))[:6])
    raise UsageError(f"{trace.path} has no prompt {prompt}: it has {listed or 'none'}{', ...' if len(ids) > 6 else ''}")


def _key(keys: Rows, index: int, names: TokenNames) -> dict[str, Any]:
    key = {
        name: int(getattr(keys, name)[index])
        for name in ("prompt_id", "root", "step", "round", "call_id", "token_id", "position")
    }
    path = keys.path[index][: key["step"]].tolist()
    return key | {"path": path, "own_path": bool(keys.own_path[index]), "token": names(key["token_id"])}


def to_json_text(data: Mapping[str, Any]) -> str:
    """`summary` or `row` as strict JSON; a number that is not finite is a string."""
    return strict_text(data)
