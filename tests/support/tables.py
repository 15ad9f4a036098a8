"""Change a table of a sealed trace behind its back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.manifest import SEAL, sealed_json


def edit_manifest(trace: Path, change: Callable[[dict[str, Any]], object], name: str = SEAL) -> None:
    """Change a manifest and give it the checksum that goes with it, as somebody would who means to deceive."""
    data = json.loads((trace / name).read_bytes())
    change(data)
    (trace / name).write_bytes(sealed_json(data))


def replace_table(trace: Path, name: str, table: pa.Table | None) -> None:
    """Put `table` (or nothing) in place of all parts of one of `trace`'s tables, and say so in its manifest."""
    shutil.rmtree(trace / f"{name}.parquet", ignore_errors=True)
    facts = None
    if table is not None:
        file = trace / f"{name}.parquet" / "rank0-00000.parquet"
        file.parent.mkdir()
        pq.write_table(table, file)
        facts = {file.relative_to(trace).as_posix(): {"rows": table.num_rows, "bytes": file.stat().st_size}}

    def replace(manifest: dict[str, Any]) -> None:
        for listed in ("files", "checksums"):
            manifest[listed] = {
                file: one for file, one in manifest.get(listed, {}).items() if not file.startswith(f"{name}.parquet")
            }
        manifest["files"] |= facts or {}

    edit_manifest(trace, replace)
