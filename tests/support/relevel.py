"""A trace as it would have been at another level: the same rows, put through the writer again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from eagle_trace.reader import Trace, ValueReader, open_trace, read_keys
from eagle_trace.writer import TraceWriter, prepare_output

#: rows a call: not a divisor of what the writer gathers
BATCH = 37


def at_level(trace: Trace, path: Path, level: str) -> Trace:
    """Write `trace`, recorded at level ``values``, again at a lower one."""
    prepare_output(path)
    tables = {name: facts for name, facts in trace.manifest.files.items() if "/" not in name}
    writer = TraceWriter(path, replace(trace.manifest, level=level, files=dict(tables)))
    for name in tables:
        shutil.copy(trace.path / name, path / name)
    for site in trace.sites:
        for data in trace.site_data(site):
            keys, reader = read_keys(data), ValueReader(data)
            for start in range(0, data.rows, BATCH):
                index = np.arange(start, min(start + BATCH, data.rows))
                writer.put_values(site, keys.take(index), reader.take(index).copy())
    return open_trace(writer.seal())
