"""Ranks that write side by side: shards are put together, copies are compared, rows of other ranks are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle_trace import open_trace
from eagle_trace.capture import Rows, Shard
from eagle_trace.errors import OutputExistsError, TraceDamagedError, TraceUnsealedError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.reader import Trace, ValueReader, iter_blocks
from eagle_trace.recording.params import parameter_row
from eagle_trace.writer import DP_STRIDE, TOO_SLOW, TraceWriter, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.comparison.params import same
from eagle_trace_analysis.pairing.ranks import check_ranks
from tests.support.synthetic import Side, make_prompts, write_trace
from tests.support.tables import edit_manifest

COUNT, WIDTH = 50, 8
RNG = np.random.default_rng(3)
WHOLE = {
    "fc.out": RNG.standard_normal((COUNT, WIDTH)).astype(np.float32),
    "layer.0.attn.q": RNG.standard_normal((COUNT, WIDTH)).astype(np.float16),
}
WHOLE["layer.0.attn.q"][3, 2] = np.nan
SHARDED = ("layer.0.attn.q",)
WEIGHT = RNG.standard_normal((4, 6)).astype(np.float32)


def rows_of(index: Sequence[int] | np.ndarray, call: int = 0) -> Rows:
    index = np.asarray(index, dtype=np.int32)
    zeros = np.zeros_like(index)
    return Rows.build(prompt_id=zeros, root=index, step=zeros, token_id=index, position=index, call_id=call)


def manifest(rank: int, ranks: int, *, tp: int = 0, dp: int = 0, level: str = "values") -> Manifest:
    return Manifest("serve", level, "test", rank=rank, ranks=ranks, tp_rank=tp, dp_rank=dp)


def record_rank(
    path: Path,
    made: Manifest,
    *,
    tp: int,
    order: np.ndarray | None = None,
    spoil: float = 0.0,
    seal: bool = True,
    calls: int = 5,
) -> TraceWriter:
    """What one rank of `tp` hands to its writer: the same calls on every rank."""
    order = np.arange(COUNT) if order is None else order
    writer = TraceWriter(path, made)
    number = made.tp_rank
    writer.put_record("prompts", {"prompt_id": 0, "prompt_key": f"p{made.dp_rank}", "token_ids": [1, 2]})
    for name, shard in (("w.weight", True), ("norm.weight", False)):
        row = parameter_row(
            name, name, np.split(WEIGHT, tp, axis=1)[number] if shard else WEIGHT[0] + spoil, in_checkpoint=True
        )
        if shard and tp > 1:
            row |= {"shard_axis": 1, "shard_index": number, "shard_count": tp}
        writer.put_record("params", row)
    for call, some in enumerate(np.array_split(order, 5)[:calls]):
        rows = rows_of(some, call)
        writer.put_rows(rows)
        for site, whole in WHOLE.items():
            values = whole[some]
            if site in SHARDED:
                values = np.split(values, tp, axis=1)[number]
                writer.put_values(site, rows, values.copy(), Shard(number, tp) if tp > 1 else None)
            else:
                values = values.copy()
                values[rows.root == 7] *= 1 + spoil
                writer.put_values(site, rows, values)
        writer.put_topk(rows, *(np.zeros((len(rows), 2)) for _ in range(4)))
        writer.put_record("calls", {"call_id": call, "role": "draft", "mode": "x", "batch_size": 1, "tokens": 1})
    if seal:
        writer.seal(TOO_SLOW if calls < 5 else None)
    return writer


def record_all(path: Path, tp: int, **options: object) -> Trace:
    prepare_output(path)
    for rank in reversed(range(tp)):  # rank 0 need not be first
        record_rank(path, manifest(rank, tp, tp=rank), tp=tp, **options if rank else {})  # type: ignore[arg-type]
    return open_trace(path)


def assert_whole(trace: Trace) -> None:
    """The trace reads like that of one rank."""
    for site, whole in WHOLE.items():
        (data,) = trace.site_data(site)
        assert (data.width, data.rows) == (WIDTH, COUNT)
        at = trace.keys(site).root
        assert ValueReader(data).take(np.arange(COUNT)).tobytes() == whole[at].tobytes()
        np.testing.assert_array_equal(np.concatenate(list(iter_blocks(data, 7))), whole[at])
    assert len(trace.rows) == COUNT
    assert len(trace.topk) == 2 * COUNT
    assert len(trace.calls) == 5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_are_put_together(tmp_path: Path, tp: int) -> None:
    trace = record_all(tmp_path / "t", tp) if tp < 4 else None
    if trace is None:
        # the parameter has 6 columns: 4 ranks hold sites only
        prepare_output(tmp_path / "t")
        for rank in range(4):
            writer = TraceWriter(tmp_path / "t", manifest(rank, 4, tp=rank))
            part = np.split(WHOLE["layer.0.attn.q"], 4, axis=1)[rank]
            writer.put_values("layer.0.attn.q", rows_of(np.arange(COUNT)), part.copy(), Shard(rank, 4))
            writer.seal()
        (data,) = open_trace(tmp_path / "t").site_data("layer.0.attn.q")
        assert ValueReader(data).take(np.arange(COUNT)).tobytes() == WHOLE["layer.0.attn.q"].tobytes()
        return
    assert_whole(trace)
    assert trace.sealed
    assert check_ranks(trace) == []
    plain = record_all(tmp_path / "one", 1)
    for site in WHOLE:
        for name in ("norm", "absmax", "mean", "nonfinite"):
            ours, theirs = (getattr(one.statistics(site), name) for one in (trace, plain))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        assert trace.frame(site).columns.tolist() == plain.frame(site).columns.tolist()


def test_a_budget_ends_before_the_same_call_on_every_rank(tmp_path: Path) -> None:
    prepare_output(tmp_path / "t")
    kept = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        writer = TraceWriter(tmp_path / f"{ranks}", manifest(rank, ranks, tp=rank), max_bytes=500)
        calls = 0
        while writer.accepting:
            rows = rows_of(np.arange(3), calls)
            writer.put_rows(rows)
            writer.put_values("fc.out", rows, WHOLE["fc.out"][:3])
            part = np.split(WHOLE["layer.0.attn.q"][:3], ranks, axis=1)[rank]
            writer.put_values("layer.0.attn.q", rows, part.copy(), Shard(rank, ranks) if ranks > 1 else None)
            writer.put_topk(rows, *(np.zeros((3, 10)) for _ in range(4)))
            calls += 1
        writer.seal()
        kept.append(calls)
    assert kept == [2, 2, 2]  # 144 bytes of values and 192 of keys per call
    trace = open_trace(tmp_path / "2")
    assert trace.manifest.stopped == "max-bytes"
    assert check_ranks(trace) == []


def test_shards_in_another_order_are_matched_by_their_keys(tmp_path: Path) -> None:
    trace = record_all(tmp_path / "t", 2, order=RNG.permutation(COUNT))
    assert_whole(trace)
    assert check_ranks(trace) == []


def test_rows_that_a_rank_lost_are_left_out_of_sharded_sites(tmp_path: Path) -> None:
    trace = record_all(tmp_path / "t", 2, order=np.delete(np.arange(COUNT), [10, 11, 30]))
    (data,) = trace.site_data("layer.0.attn.q")
    kept = np.delete(np.arange(COUNT), [10, 11, 30])
    assert trace.keys("layer.0.attn.q").root.tolist() == kept.tolist()
    assert data.rows == len(kept) == len(trace.statistics("layer.0.attn.q").norm)
    np.testing.assert_array_equal(ValueReader(data).take(np.arange(data.rows)), WHOLE["layer.0.attn.q"][kept])
    (finding,) = check_ranks(trace)
    assert (finding.what, finding.differing, finding.unpaired) == ("fc.out", 0, 3)


def test_copies_that_differ_are_found_and_measured(tmp_path: Path) -> None:
    trace = record_all(tmp_path / "t", 2, spoil=1e-3)
    site, parameter = check_ranks(trace)
    assert (site.what, site.first, site.other, site.rows, site.differing) == ("fc.out", 0, 1, COUNT, 1)
    assert site.largest == pytest.approx(1e-3, rel=1e-3)
    assert parameter.what == "norm.weight"


def test_ranks_that_differ_are_a_note_of_the_diff(tmp_path: Path) -> None:
    prompts = make_prompts(1)
    train = write_trace(tmp_path / "train", Side("train"), prompts)
    serve = write_trace(tmp_path / "serve", Side("serve"), prompts)
    edit_manifest(tmp_path / "serve", lambda data: data.update(ranks=2))
    alike = {name: getattr(serve.manifest, name) for name in ("host", "dtype", "target", "draft")}
    writer = TraceWriter(tmp_path / "serve", replace(manifest(1, 2, tp=1), **alike))
    (site,) = serve.site_data("fc.out")
    values = ValueReader(site).take(np.arange(site.rows)).copy()
    values[0, 0] += 1
    writer.put_values("fc.out", serve.keys("fc.out"), values)
    writer.seal()
    result = diff(train, open_trace(tmp_path / "serve"))
    (note,) = [note for note in result.notes if note.name == "ranks"]
    assert "fc.out: 1 of" in note.text
    assert result.verdict == "agree"


def test_sharded_parameters_have_the_whole_shape_and_norm_and_no_digest(tmp_path: Path) -> None:
    two, one = (record_all(tmp_path / str(tp), tp).params.set_index("name") for tp in (2, 1))
    assert list(two.loc["w.weight", "shape"]) == [4, 6]
    assert two.loc["w.weight", "digest"] == ""
    assert two.loc["norm.weight", "digest"] == one.loc["norm.weight", "digest"]
    ours, theirs = two.loc["w.weight"].to_dict(), one.loc["w.weight"].to_dict()
    assert same(ours, theirs)
    assert same(theirs, ours)
    assert not same(ours, theirs | {"norm": theirs["norm"] * 1.001})
    assert not same(ours | {"shape": [2, 12]}, theirs)


def test_a_missing_rank_is_named_and_the_others_can_be_read(tmp_path: Path) -> None:
    prepare_output(tmp_path / "t")
    record_rank(tmp_path / "t", manifest(0, 2), tp=2)
    with pytest.raises(TraceUnsealedError, match="rank 1 of 2: all that it recorded is missing"):
        open_trace(tmp_path / "t")
    trace = open_trace(tmp_path / "t", allow_partial=True)
    assert trace.sites == ["fc.out"]
    assert any("layer.0.attn.q lacks part 1 of 2" in problem for problem in trace.missing)
    assert trace.params.name.tolist() == ["norm.weight"]
    unsealed = record_rank(tmp_path / "t", manifest(1, 2, tp=1), tp=2, seal=False)
    unsealed.flush()
    with pytest.raises(TraceUnsealedError, match="rank 1 of 2: what came after"):
        open_trace(tmp_path / "t")
    assert_whole(open_trace(tmp_path / "t", allow_partial=True))
    unsealed.seal()
    assert_whole(open_trace(tmp_path / "t"))


def test_rank_1_alone_can_be_read_in_part(tmp_path: Path) -> None:
    record_rank(tmp_path / "t", manifest(1, 2, tp=1), tp=2)
    with pytest.raises(TraceUnsealedError, match="rank 0 of 2"):
        open_trace(tmp_path / "t")
    assert open_trace(tmp_path / "t", allow_partial=True).sites == ["fc.out"]


def test_rows_of_data_parallel_ranks_are_added_up(tmp_path: Path) -> None:
    """Two hosts of two ranks each; both number their prompts and calls from 0."""
    for rank in range(4):
        record_rank(tmp_path / "t", manifest(rank, 4, tp=rank % 2, dp=rank // 2), tp=2)
    trace = open_trace(tmp_path / "t")
    assert trace.prompts.prompt_id.tolist() == [0, DP_STRIDE]
    assert trace.prompts.prompt_key.tolist() == ["p0", "p1"]
    assert len(trace.rows) == 2 * COUNT
    assert len(set(trace.rows.call_id.tolist())) == len(trace.calls) == 10
    assert len(trace.params) == 2
    for site, whole in WHOLE.items():
        (data,) = trace.site_data(site)
        keys = trace.keys(site)
        assert sorted(set(keys.prompt_id.tolist())) == [0, DP_STRIDE]
        np.testing.assert_array_equal(ValueReader(data).take(np.arange(data.rows)), whole[keys.root])
    assert check_ranks(trace) == []


def test_each_rank_prepares_its_own_share_only(tmp_path: Path) -> None:
    for rank in range(2):
        prepare_output(tmp_path / "t", rank=rank, ranks=2)
        record_rank(tmp_path / "t", manifest(rank, 2, tp=rank), tp=2)
    with pytest.raises(OutputExistsError):
        prepare_output(tmp_path / "t", rank=1, ranks=2)
    prepare_output(tmp_path / "t", rank=1, ranks=2, force=True)
    left = {path.name for path in (tmp_path / "t").rglob("*") if path.is_file()}
    assert "manifest.json" in left
    assert not any("rank1" in name for name in left)


def test_ranks_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for wrong in (manifest(2, 2), manifest(0, 2, tp=1), manifest(1, 2, dp=1 << 12)):
        with pytest.raises(UsageError):
            TraceWriter(tmp_path / "t", wrong)
    writer = TraceWriter(tmp_path / "t", manifest(0, 1))
    with pytest.raises(ValueError, match="no part 2 of 2"):
        writer.put_values("embed", rows_of([0]), np.zeros((1, 2), np.float32), Shard(2, 2))
    writer.seal()


def test_ranks_of_different_recordings_are_refused(tmp_path: Path) -> None:
    record_rank(tmp_path / "t", manifest(0, 2), tp=2)
    record_rank(tmp_path / "t", replace(manifest(1, 2, tp=1), side="train"), tp=2)
    with pytest.raises(TraceDamagedError, match="different recordings"):
        open_trace(tmp_path / "t")


def test_sketches_of_shards_add_up_to_that_of_the_whole_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for width in (48, 512):
        x = rng.standard_normal((40, width)).astype(np.float32)
        keys = Rows.build(
            prompt_id=[0] * 40, root=range(40), step=[0] * 40, token_id=[1] * 40, position=range(40), call_id=0
        )
        folder = tmp_path / f"{width}.trace"
        prepare_output(folder)
        for rank in range(2):
            manifest = Manifest("serve", "sketch", "sglang", rank=rank, ranks=2, tp_rank=rank)
            writer = TraceWriter(folder, manifest)
            writer.put_rows(keys)
            half = x[:, rank * width // 2 : (rank + 1) * width // 2]
            writer.put_values("layer.0.attn.q", keys, half.copy(), Shard(rank, 2))
            writer.seal()
        whole = tmp_path / f"{width}-whole.trace"
        prepare_output(whole)
        writer = TraceWriter(whole, Manifest("serve", "sketch", "sglang"))
        writer.put_rows(keys)
        writer.put_values("layer.0.attn.q", keys, x.copy())
        writer.seal()
        both, one = (open_trace(place).sketch("layer.0.attn.q") for place in (folder, whole))
        np.testing.assert_allclose(both, one, rtol=1e-5, atol=1e-5)
        assert open_trace(folder).site_data("layer.0.attn.q")[0].width == width


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_whose_disks_gave_up_at_different_forwards_keep_the_rows_they_share(tmp_path: Path, early: int) -> None:
    prepare_output(tmp_path / "t")
    for rank in range(2):
        record_rank(tmp_path / "t", manifest(rank, 2, tp=rank), tp=2, calls=2 if rank == early else 5)
    trace = open_trace(tmp_path / "t")
    (sharded,) = trace.site_data("layer.0.attn.q")
    assert (sharded.rows, sharded.width) == (20, WIDTH)
    np.testing.assert_array_equal(ValueReader(sharded).take(np.arange(20)), WHOLE["layer.0.attn.q"][:20])
    np.testing.assert_array_equal(trace.values("fc.out"), WHOLE["fc.out"][: 20 if early == 0 else COUNT])
    assert TOO_SLOW in str(trace.manifest.ended_early)
    assert check_ranks(trace) == []
    # against the same forward on one rank, recorded to its end: nothing differs but the element that is not a number
    prepare_output(tmp_path / "one")
    record_rank(tmp_path / "one", replace(manifest(0, 1), side="train"), tp=1)
    result = diff(open_trace(tmp_path / "one"), trace)
    assert {one.site for one in result.sites if one.verdict == "diverged"} == {"layer.0.attn.q"}
    assert result.first_divergence is not None
    assert result.first_divergence.kind == "nonfinite"
