"""Traces whose prompts, keys and paths try to break out of whatever shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.schema import TABLES
from tests.support.synthetic import Side, make_prompts, only, write_trace
from tests.support.tables import edit_manifest, replace_table

SCRIPT = "</script><script>window.hacked=1</script>"
TEXT = f"{SCRIPT}<img src=x onerror='window.hacked=1'><b>bold</b> \"quoted\" &amp; \u202egnp \x1b[31mred"
ROUND = {
    "prompt_id": 0, "round": 1, "root": 9, "proposed": [1, 2], "parents": [0, 1], "target_argmax": [], "accepted": [1],
    "bonus": 5,
}  # fmt: skip


def hostile_pair(folder: Path) -> tuple[Path, Path]:
    """A train and a serve trace that diverge at the worst row of a hostile prompt."""
    where = folder / "<img src=x onerror=alert(1)>"
    where.mkdir()
    prompts = [replace(prompt, key=f"{number}{SCRIPT}&\x1b[2J") for number, prompt in enumerate(make_prompts(2))]
    fault = only("layer.0.attn.q", 0, lambda _, values: values * 1.045)
    paths = where / "train.trace", where / "serve.trace"
    write_trace(paths[0], Side("train"), prompts)
    write_trace(paths[1], Side("serve", fault=fault), prompts, rounds=[ROUND])
    for path in paths:
        _poison(path)
    return paths


def _poison(trace: Path) -> None:
    rows = pq.read_table(trace / "prompts.parquet").to_pylist()
    for row in rows:
        row["text"] = TEXT
    replace_table(trace, "prompts", pa.Table.from_pylist(rows, schema=TABLES["prompts"]))
    edit_manifest(trace, _poisoned)


def _poisoned(manifest: dict[str, Any]) -> None:
    manifest["host"] = f"host{SCRIPT}"
    manifest["changes"] = [TEXT]
    manifest["packages"] = {SCRIPT: SCRIPT}
    manifest["settings"]["seed"] = TEXT
    manifest["draft"] = {"path": TEXT}
    manifest["argv"] = [TEXT]
