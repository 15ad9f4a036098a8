"""Change a table of a sealed trace behind its back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def replace_table(trace: Path, name: str, table: pa.Table | None) -> None:
    """Put `table` (or nothing) in place of all parts of one of `trace`'s tables, and say so in its manifest."""
    shutil.rmtree(trace / f"{name}.parquet", ignore_errors=True)
    manifest = json.loads((trace / "manifest.json").read_text(encoding="utf-8"))
    files = {file: facts for file, facts in manifest["files"].items() if not file.startswith(f"{name}.parquet")}
    if table is not None:
        file = trace / f"{name}.parquet" / "rank0-00000.parquet"
        file.parent.mkdir()
        pq.write_table(table, file)
        files[file.relative_to(trace).as_posix()] = {"rows": table.num_rows, "bytes": file.stat().st_size}
    (trace / "manifest.json").write_text(json.dumps(manifest | {"files": files}), encoding="utf-8")
