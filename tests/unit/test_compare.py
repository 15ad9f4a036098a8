"""Streaming gives the numbers of one pass over everything, in whatever order and dtype the rows were
recorded.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from eagle_trace import Trace, open_trace, writer
from eagle_trace.capture import Rows
from eagle_trace.manifest import Manifest
from eagle_trace_analysis import align, compare
from eagle_trace_analysis.compare import compare_statistics, compare_values, row_facts

COUNT, WIDTH = 700, 24
Data = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ROW_GROUP_BYTES", 40 * WIDTH)
    monkeypatch.setattr(compare, "CHUNK_BYTES", 30 * 4 * WIDTH)


def make(path: Path, side: str, rows: Rows, values: np.ndarray, sizes: tuple[int, ...], *dtypes: type) -> Trace:
    """A trace of one site, recorded in batches of changing size, its dtype changing from batch to batch."""
    path.mkdir()
    out = writer.TraceWriter(path, Manifest(side, "values", "test"))  # type: ignore[arg-type]
    out.put_record("prompts", {"prompt_id": 0, "prompt_key": "p", "token_ids": list(range(COUNT + 1))})
    start = turn = 0
    while start < len(rows):
        at = np.arange(start, min(start + sizes[turn % len(sizes)], len(rows)))
        out.put_rows(rows.take(at))
        out.put_values("embed", rows.take(at), values[at].astype(dtypes[turn % len(dtypes)]))
        start, turn = start + len(at), turn + 1
    return open_trace(out.seal())


def rows_of(order: np.ndarray) -> Rows:
    step = (np.arange(COUNT) % 3).astype(np.int32)
    path = np.where(np.arange(2)[None, :] < step[:, None], np.arange(COUNT)[:, None], -1).astype(np.int32)
    zeros = np.zeros(COUNT, dtype=np.int32)
    rows = Rows(
        prompt_id=zeros, root=np.arange(COUNT, dtype=np.int32), step=step, round=zeros, call_id=zeros,
        token_id=zeros, position=zeros, path=path, own_path=np.ones(COUNT, dtype=np.bool_),
    )  # fmt: skip
    return rows.take(order)


@pytest.fixture
def data() -> Data:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((COUNT, WIDTH)).astype(ml_dtypes.bfloat16).astype(np.float32)
    return (y * (1 + 0.01 * rng.standard_normal(y.shape))).astype(np.float32), y


@pytest.mark.parametrize("dtypes", [(np.float32,), (np.float32, ml_dtypes.bfloat16)], ids=["one-dtype", "two-dtypes"])
def test_any_order_and_any_grouping_gives_the_same_numbers(
    tmp_path: Path, data: Data, dtypes: tuple[type, ...]
) -> None:
    x, y = data
    order = np.random.default_rng(1).permutation(COUNT)
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (7, 90, 1), *dtypes)
    serve = make(tmp_path / "serve", "serve", rows_of(order), x[order], (64, 3), np.float32)
    assert len(train.site_data("embed")[0].groups) > 10
    found = compare_values(train, serve, "embed", align(train, serve).pairs("embed"))
    for step in range(3):
        mine = np.arange(COUNT) % 3 == step
        rho = np.linalg.norm(x[mine] - y[mine], axis=1) / np.linalg.norm(y[mine], axis=1)
        channel = np.sqrt(((x[mine] - y[mine]) ** 2).sum(axis=0) / (y[mine] ** 2).sum(axis=0))
        metrics = found[step].metrics
        assert metrics.rows == mine.sum()
        assert metrics.rho_max == pytest.approx(rho.max(), rel=1e-5)
        assert metrics.rho_median == pytest.approx(np.quantile(rho, 0.5, method="higher"), rel=1e-5)
        assert metrics.channel_max == pytest.approx(channel.max(), rel=1e-5)


def test_the_worst_row_is_found_with_both_sides_facts(tmp_path: Path, data: Data) -> None:
    _, y = data
    x = y.copy()
    x[301, 5] = 100.0
    order = np.arange(COUNT)[::-1]
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (50,), np.float32)
    serve = make(tmp_path / "serve", "serve", rows_of(order), x[order], (64,), np.float32)
    pairs = align(train, serve).pairs("embed")
    for work in (compare_values, compare_statistics):
        worst = work(train, serve, "embed", pairs)[301 % 3].worst
        assert pairs.train_keys.root[pairs.train[worst]] == 301
    left, right = row_facts(train, serve, "embed", pairs, worst)
    assert (left["element"], left["element_value"], right["element_value"]) == (5, y[301, 5], 100.0)
    assert right["absmax"] == 100.0
    assert left["norm"] == pytest.approx(np.linalg.norm(y[301]))


def test_each_row_group_is_decoded_once(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (50,), np.float32)
    order = np.random.default_rng(2).permutation(COUNT)
    serve = make(tmp_path / "serve", "serve", rows_of(order), x[order], (64,), np.float32)
    from eagle_trace import sitedata

    decoded: list[int] = []
    original = sitedata._decode
    monkeypatch.setattr(sitedata, "_decode", lambda *args: (decoded.append(1), original(*args))[1])
    compare_values(train, serve, "embed", align(train, serve).pairs("embed"))
    groups = sum(len(one.groups) for trace in (train, serve) for one in trace.site_data("embed"))
    assert len(decoded) == groups


def test_the_cache_is_as_large_as_the_order_needs(tmp_path: Path, data: Data) -> None:
    _, y = data
    trace = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (50,), np.float32)
    side = trace.site_data("embed")
    largest = max(group.rows for group in side[0].groups) * 4 * WIDTH
    in_order = compare._cache_for(side, np.arange(COUNT)) - compare.TRAIN_CACHE_BYTES
    shuffled = compare._cache_for(side, np.random.default_rng(0).permutation(COUNT)) - compare.TRAIN_CACHE_BYTES
    assert in_order == 2 * largest
    assert 0.9 * 2 * y.nbytes < shuffled <= 2 * y.nbytes
