"""The sketch of a row: fixed for ever, as accurate as it says, the same on a device, and small on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from eagle_trace import open_trace
from eagle_trace.capture import Rows, drawn_channels, dtype_name, row_statistics
from eagle_trace.errors import TraceError
from eagle_trace.manifest import Manifest
from eagle_trace.sketch import (
    BUCKETS,
    STORED_NORM,
    Reduced,
    projection,
    reduce_on_device,
    reduce_rows,
    reduced_of,
    sample_channels,
    sketch,
    stored_dtype,
    unscale,
)
from eagle_trace.writer import TraceWriter, prepare_output

pytestmark = pytest.mark.slow

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


def of(values: Any) -> Any:
    """Sketches of the rows themselves, float32."""
    statistics = row_statistics(values)
    return unscale(sketch(values, statistics), statistics.norm)


def rows_of(count: int, start: int = 0) -> Rows:
    at = list(range(start, start + count))
    return Rows.build(prompt_id=[0] * count, root=at, step=[0] * count, token_id=[1] * count, position=at, call_id=0)


# ---- the projection


def test_the_projection_is_the_one_the_format_names() -> None:
    """Written down by hand from SplitMix64's published first outputs; a change here makes old traces unreadable."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    fixed = projection(576)
    signs = {int(channel): int(sign) for channel, sign in zip(fixed.channels.flat, fixed.signs.flat, strict=True)}
    assert [signs[channel] for channel in range(5)] == [1 - 2 * (word & 1) for word in first]
    places = {int(channel): place for place, channel in enumerate(fixed.channels.flat)}
    assert sorted(range(5), key=places.__getitem__) == sorted(range(5), key=first.__getitem__)
    assert fixed.channels[0, :6].tolist() == [410, 366, 503, 254, 566, 203]


@pytest.mark.parametrize("width", [65, 100, 576, 4096])
def test_every_channel_is_in_one_bucket_and_buckets_are_of_nearly_one_size(width: int) -> None:
    fixed = projection(width)
    there = fixed.signs != 0
    assert sorted(fixed.channels[there].tolist()) == list(range(width))
    sizes = there.sum(axis=0)
    assert len(sizes) == BUCKETS
    assert sizes.max() - sizes.min() <= 1
    assert set(np.unique(fixed.signs[there])) == {-1.0, 1.0}
    assert abs(fixed.signs.sum()) < 4 * width**0.5


@pytest.mark.parametrize("width", [1, 5, 64])
def test_a_narrow_row_is_its_own_sketch(width: int) -> None:
    values = np.random.default_rng(0).standard_normal((7, width)).astype(np.float32)
    np.testing.assert_allclose(of(values), values, rtol=1e-6)


@pytest.mark.parametrize("width", [128, 576, 4096])
@pytest.mark.parametrize("nonzero", [2, 16, None])
def test_the_length_of_a_difference_survives_within_its_error(width: int, nonzero: int | None) -> None:
    """|Sd|^2 has the mean |d|^2 and a variance of at most 2/64, over differences of many directions."""
    rng = np.random.default_rng(width)
    d = rng.standard_normal((4000, width)).astype(np.float32)
    if nonzero is not None:
        keep = rng.random((4000, width)).argsort(axis=1)[:, :nonzero]
        mask = np.zeros(d.shape, dtype=np.bool_)
        np.put_along_axis(mask, keep, values=True, axis=1)
        d[~mask] = 0.0
    ratio = (of(d).astype(np.float64) ** 2).sum(axis=1) / (d.astype(np.float64) ** 2).sum(axis=1)
    assert ratio.mean() == pytest.approx(1, abs=4 * np.sqrt(2 / BUCKETS / 4000))
    assert ratio.var() <= 2 / BUCKETS * 1.15
    if width > 128 and nonzero is None:  # of 128 channels, each shares its bucket with one other only
        assert np.sqrt(ratio).std() == pytest.approx(np.sqrt(2 / BUCKETS) / 2, rel=0.1)


def test_equal_rows_have_equal_sketches_however_they_came() -> None:
    values = np.random.default_rng(1).standard_normal((300, 1000)).astype(ml_dtypes.bfloat16)
    whole = of(values)
    np.testing.assert_array_equal(whole[::-1], of(values[::-1].copy()))
    np.testing.assert_array_equal(whole, np.concatenate([of(values[at : at + 7]) for at in range(0, 300, 7)]))


def test_a_huge_channel_is_in_one_bucket() -> None:
    values = np.random.default_rng(2).standard_normal((1, 512)).astype(np.float32)
    other = values.copy()
    other[0, 77] += 1e4
    assert (np.abs(of(other) - of(values)) > 1).sum() == 1


# ---- odd rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 200])
def test_what_is_not_finite_counts_as_zero(dtype: Any, width: int) -> None:
    values = np.random.default_rng(3).standard_normal((4, width)).astype(dtype)
    clean = values.copy()
    values[1, 3], values[2, 4], clean[1, 3], clean[2, 4] = np.nan, -np.inf, 0, 0
    # the norm of such a row is summed in float64, that of a clean one in float32
    np.testing.assert_allclose(of(values), of(clean), rtol=1e-6)


def test_rows_of_zeros_and_rows_near_the_largest_float_have_sketches() -> None:
    values = np.zeros((3, 576), dtype=np.float32)
    values[1], values[2] = 3e38, -3e38
    stored = sketch(values, row_statistics(values))
    assert np.isfinite(stored).all()
    assert not stored[0].any()
    np.testing.assert_array_equal(stored[1], -stored[2])
    assert np.isfinite(of(values)).all()


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e30])
def test_small_and_large_rows_keep_their_precision(size: float) -> None:
    values = np.random.default_rng(4).standard_normal((2, 300)).astype(np.float32)
    scaled = (values * np.float32(size)).astype(np.float32)
    np.testing.assert_allclose(of(scaled) / size, of(values), rtol=1e-5, atol=1e-5)


def test_float16_holds_small_buckets_beside_a_huge_one() -> None:
    values = np.random.default_rng(5).standard_normal((50, 4096)).astype(ml_dtypes.bfloat16)
    values[:, 9] = 1e6
    reduced = reduce_rows(values, "bfloat16", sketched=True)
    assert reduced.sketch is not None
    assert reduced.sketch.dtype == np.float16
    stored, exact = unscale(reduced.sketch, reduced.statistics.norm), of(values)
    # one rounding of float16, although these buckets are 1e5 times smaller than the norm
    error = np.median(np.abs(stored - exact), axis=0) / np.sqrt((exact**2).mean(axis=0))
    assert np.median(error) < 2.0**-11


# ---- on a device


def reduced_where_it_is(tensor: torch.Tensor, dtype: str, *, sketched: bool) -> Reduced:
    table = reduce_on_device(tensor, sketched=sketched)
    return reduced_of(table.numpy(), dtype, tensor.shape[-1], sketched=sketched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 576, 1000])
def test_reducing_where_the_tensor_is_gives_the_same_numbers(dtype: Any, width: int) -> None:
    values = np.random.default_rng(6).standard_normal((33, width)).astype(dtype)
    values[3], values[5, 2], values[6, 1] = 0, np.nan, np.inf
    bits = values.view(np.int16) if dtype is ml_dtypes.bfloat16 else values
    tensor = torch.from_numpy(bits)
    tensor = tensor.view(torch.bfloat16) if dtype is ml_dtypes.bfloat16 else tensor
    here = reduce_rows(values, dtype_name(values), sketched=True)
    there = reduced_where_it_is(tensor, here.dtype, sketched=True)
    assert (there.dtype, there.width, len(there)) == (here.dtype, here.width, len(here))
    for name in ("norm", "absmax", "mean"):
        np.testing.assert_allclose(
            getattr(there.statistics, name), getattr(here.statistics, name), rtol=2e-7, atol=1e-9
        )
    np.testing.assert_array_equal(there.statistics.nonfinite, here.statistics.nonfinite)
    assert here.sketch is not None
    assert there.sketch is not None
    assert there.sketch.dtype == here.sketch.dtype == np.dtype(stored_dtype(here.dtype))
    unit = 2.0**-11 if here.sketch.dtype == np.float16 else 2.0**-22
    assert np.abs(there.sketch.astype(float) - here.sketch.astype(float)).max() <= unit * STORED_NORM
    assert reduced_where_it_is(tensor, here.dtype, sketched=False).sketch is None


# ---- on disk


def write(path: Path, values: Any, level: str, batch: int = 8, *, reduced: bool = False) -> Any:
    prepare_output(path)
    writer = TraceWriter(path, Manifest("serve", level, "test"))
    for start in range(0, len(values), batch):
        part = values[start : start + batch].copy()
        given = reduce_rows(part, dtype_name(part), sketched=level == "sketch") if reduced else part
        writer.put_values("fc.out", rows_of(len(part), start), given)
    return open_trace(writer.seal())


@pytest.mark.parametrize(("dtype", "width"), [(np.float32, 576), (ml_dtypes.bfloat16, 576), (np.float32, 20)])
def test_a_recorded_sketch_is_that_of_the_values(dtype: Any, width: int, tmp_path: Path) -> None:
    values = np.random.default_rng(7).standard_normal((500, width)).astype(dtype)
    recorded, made = write(tmp_path / "s", values, "sketch"), write(tmp_path / "v", values, "values")
    assert recorded.level == "sketch"
    assert recorded.sketch("fc.out").shape == (500, min(64, width))
    rounding = 1e-9 if dtype is np.float32 else 2.0**-11
    np.testing.assert_allclose(recorded.sketch("fc.out"), made.sketch("fc.out"), rtol=rounding, atol=1e-4 * rounding)
    np.testing.assert_array_equal(recorded.statistics("fc.out").norm, made.statistics("fc.out").norm)
    frame = recorded.frame("fc.out")
    np.testing.assert_array_equal(np.stack(list(frame["sketch"])), recorded.sketch("fc.out"))
    assert "values" not in frame
    with pytest.raises(TraceError, match="--level values"):
        recorded.values("fc.out")


def test_below_its_level_there_is_no_sketch(tmp_path: Path) -> None:
    values = np.ones((4, 100), dtype=np.float32)
    trace = write(tmp_path / "stats", values, "stats")
    with pytest.raises(TraceError, match="--level sketch"):
        trace.sketch("fc.out")


def test_rows_may_come_reduced_and_mixed_with_others(tmp_path: Path) -> None:
    values = np.random.default_rng(8).standard_normal((100, 300)).astype(np.float16)
    plain, reduced = (write(tmp_path / f"r{on}", values, "sketch", reduced=on) for on in (False, True))
    np.testing.assert_array_equal(plain.sketch("fc.out"), reduced.sketch("fc.out"))
    with pytest.raises(ValueError, match="rows themselves"):
        write(tmp_path / "values", values, "values", reduced=True)
    prepare_output(tmp_path / "mixed")
    writer = TraceWriter(tmp_path / "mixed", Manifest("serve", "sketch", "test"))
    for start in range(0, 100, 10):
        part = values[start : start + 10].copy()
        given = part if start % 20 else reduce_rows(part, "float16", sketched=True)
        writer.put_values("fc.out", rows_of(10, start), given)
    mixed = open_trace(writer.seal())
    np.testing.assert_array_equal(mixed.sketch("fc.out"), plain.sketch("fc.out"))
    np.testing.assert_array_equal(mixed.keys("fc.out").root, np.arange(100))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sketch_is_at_most_2_percent_of_the_rows_at_real_widths(dtype: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(9).standard_normal((800, 4096)).astype(dtype)
    files = list((write(tmp_path / "t", values, "sketch").path / "values").rglob("*.parquet"))
    assert len(files) == 1
    assert files[0].stat().st_size <= 0.02 * values.nbytes


def test_many_rows_come_in_many_row_groups(tmp_path: Path) -> None:
    values = np.random.default_rng(10).standard_normal((9000, 128)).astype(np.float32)
    trace = write(tmp_path / "t", values, "sketch", batch=90)
    (data,) = trace.site_data("fc.out")
    assert len(data.groups) > 2
    np.testing.assert_array_equal(trace.sketch("fc.out"), of(values))
    assert max(group.rows for group in data.groups) < 4000


def test_the_byte_budget_counts_what_is_kept(tmp_path: Path) -> None:
    values = np.zeros((100, 4096), dtype=np.float32)
    for level, more in (("values", False), ("sketch", True)):
        prepare_output(tmp_path / level)
        writer = TraceWriter(tmp_path / level, Manifest("serve", level, "test"), max_bytes=100_000)
        writer.put_values("fc.out", rows_of(100), values.copy())
        assert writer.accepting == more
        writer.seal()


# ---- channels of layers


def test_the_channels_of_layers_are_our_own_choice() -> None:
    # written down: whatever NumPy does to its streams, and on every machine
    assert sample_channels(100, 8).tolist() == [2, 32, 33, 42, 43, 53, 94, 95]
    assert sample_channels(5).tolist() == [0, 1, 2, 3, 4]
    for width in (65, 4096):
        channels = sample_channels(width)
        assert len(set(channels.tolist())) == 64
        assert (np.diff(channels) > 0).all()


def test_a_trace_that_names_no_channels_holds_those_that_were_drawn(tmp_path: Path) -> None:
    for name, settings in (("old", {}), ("new", {"layer_channels": sample_channels(300).tolist()})):
        prepare_output(tmp_path / name)
        writer = TraceWriter(tmp_path / name, Manifest("train", "values", "test", settings=settings))
        trace = open_trace(writer.seal())
        expected = sample_channels(300) if settings else drawn_channels(300)
        np.testing.assert_array_equal(trace.layer_channels(300), expected)
    assert drawn_channels(300).tolist() != sample_channels(300).tolist()
