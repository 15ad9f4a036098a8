"""Streaming gives the numbers of one pass over everything, in whatever order and dtype the rows were
recorded.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from eagle_trace import Trace, open_trace, streams, writer
from eagle_trace.capture import Rows
from eagle_trace.manifest import Manifest
from eagle_trace_analysis import align
from eagle_trace_analysis.comparison import compare
from eagle_trace_analysis.comparison.compare import (
    Compared,
    SiteFold,
    ValuesFold,
    WholeSite,
    compare_statistics,
    partition,
)
from eagle_trace_analysis.comparison.fold import Serial, fold
from eagle_trace_analysis.comparison.worst import row_facts

COUNT, WIDTH = 700, 24
Data = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ROW_GROUP_BYTES", 40 * WIDTH)
    monkeypatch.setattr(compare, "CHUNK_BYTES", 30 * 4 * WIDTH)


def compared(site: SiteFold) -> dict[int, Compared]:
    (done,) = fold([site], Serial())
    return done.result()


def compare_values(train: Trace, serve: Trace) -> dict[int, Compared]:
    return compared(ValuesFold(train, serve, "embed", align(train, serve).pairs("embed")))


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
    found = compare_values(train, serve)
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
    by_values = ValuesFold(train, serve, "embed", pairs)
    for site in (by_values, WholeSite(train, serve, "embed", pairs, compare_statistics)):
        worst = compared(site)[301 % 3].worst
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
    from eagle_trace import valuereader

    decoded: list[int] = []
    original = valuereader._decode
    monkeypatch.setattr(valuereader, "_decode", lambda *args: (decoded.append(1), original(*args))[1])
    compare_values(train, serve)
    groups = sum(len(one.groups) for trace in (train, serve) for one in trace.site_data("embed"))
    assert len(decoded) == groups


# ---- parts


def parts_of(train: Trace, serve: Trace) -> list[compare.Part]:
    return partition(train, serve, "embed", align(train, serve).pairs("embed"))


@pytest.mark.parametrize("dtypes", [(np.float32,), (np.float32, ml_dtypes.bfloat16)], ids=["one-dtype", "two-dtypes"])
def test_parts_are_bounded_and_hold_every_pair_once(
    tmp_path: Path, data: Data, dtypes: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data
    monkeypatch.setattr(compare, "PART_BYTES", 100 * 4 * WIDTH)
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (20,), *dtypes)
    serve = make(tmp_path / "serve", "serve", rows_of(np.arange(COUNT)), x, (30,), np.float32)
    parts = parts_of(train, serve)
    assert len(parts) >= 4
    assert np.array_equal(np.concatenate([part.train.index for part in parts]), np.arange(COUNT))
    groups = [group.rows for one in train.site_data("embed") for group in one.groups]
    assert all(len(part.step) < 2 * (100 + max(groups)) for part in parts)
    for part in parts:
        needed = sum(group.rows for one in part.train.data for group in one.groups)
        assert needed < len(part.step) + 2 * max(groups), "a part names the row groups it needs, not all of them"


def test_a_part_grows_where_a_cut_would_read_the_other_side_twice(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data
    monkeypatch.setattr(compare, "PART_BYTES", 50 * 4 * WIDTH)
    # the server took prompts in waves of 200 rows, in any order within a wave
    waves = np.arange(COUNT)
    for start in range(0, COUNT, 200):
        np.random.default_rng(start).shuffle(waves[start : start + 200])
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (20,), np.float32)
    serve = make(tmp_path / "serve", "serve", rows_of(waves), x[waves], (20,), np.float32)
    cuts = np.cumsum([len(part.step) for part in parts_of(train, serve)])
    assert len(cuts) == 4
    assert np.abs(cuts - [200, 400, 600, COUNT]).max() <= 20
    monkeypatch.setattr(compare, "LARGEST_PART_BYTES", 100 * 4 * WIDTH)
    assert max(len(part.step) for part in parts_of(train, serve)) == 100


def test_small_parts_give_the_numbers_of_one_part(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data
    order = np.random.default_rng(3).permutation(COUNT)
    train = make(tmp_path / "train", "train", rows_of(np.arange(COUNT)), y, (20,), np.float32)
    serve = make(tmp_path / "serve", "serve", rows_of(order), x[order], (30,), np.float32)
    whole = compare_values(train, serve)
    monkeypatch.setattr(compare, "LARGEST_PART_BYTES", 50 * 4 * WIDTH)
    assert len(parts_of(train, serve)) > 10
    for step, found in compare_values(train, serve).items():
        assert np.array_equal(found.pairs, whole[step].pairs)
        assert found.worst == whole[step].worst
        for name, value in asdict(found.metrics).items():
            expected = getattr(whole[step].metrics, name)
            assert value == (pytest.approx(expected, rel=1e-5) if isinstance(value, float) else expected), name
