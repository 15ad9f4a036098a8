"""A trace as it would have been at another level: the same rows, put through the writer again.

The demo's rows are 128 wide and more, so every site is hashed; the synthetic draft's are 32 wide, their own sketch.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from eagle_trace.reader import Trace, ValueReader, open_trace, read_keys
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import Diff, diff

#: rows a call: not a divisor of what the writer gathers
BATCH = 97


def at_level(trace: Trace, path: Path, level: str) -> Trace:
    """Write `trace`, recorded at level ``values``, again at a lower one."""
    prepare_output(path)
    tables = {name: facts for name, facts in trace.manifest.files.items() if not name.startswith("values/")}
    writer = TraceWriter(path, replace(trace.manifest, level=level, files=dict(tables)), max_wait=None)
    for name in tables:
        (path / name).parent.mkdir(exist_ok=True)
        shutil.copy(Path(trace.path) / name, path / name)
    for site in trace.sites:
        for data in trace.site_data(site):
            keys, reader = read_keys(data), ValueReader(data)
            for start in range(0, data.rows, BATCH):
                index = np.arange(start, min(start + BATCH, data.rows))
                writer.put_values(site, keys.take(index), reader.take(index).copy())
    return open_trace(writer.seal())


def expect_the_same_at_sketch(
    full: Diff, train: Trace, serve: Trace, folder: Path, *, reference: str = "sketch"
) -> None:
    """The diff at level ``sketch`` has the verdict and the first divergence of `full`, at ``values``.

    `folder` holds the traces made for it: the same trace asked for again is not written again. The training's sketches
    are recorded ones, too, or with `reference` ``values`` made from its values (the same numbers: test_sketch.py).
    """
    sides = [train]
    for trace in (train, serve) if reference == "sketch" else (serve,):
        path = folder / f"{Path(trace.path).parent.name}-{Path(trace.path).name}-sketch"
        sides.append(open_trace(path) if path.exists() else at_level(trace, path, "sketch"))
    sketched = diff(*sides[-2:])
    assert sketched.level == "sketch"
    assert sketched.verdict == full.verdict, sketched.first_divergence
    assert _place(sketched) == _place(full)


def _place(result: Diff) -> tuple[str, int, str] | None:
    first = result.first_divergence
    return (first.site, first.step, first.kind) if first else None
