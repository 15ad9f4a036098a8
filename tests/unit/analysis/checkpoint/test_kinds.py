"""The kind of difference between two tensors, on tensors of a model's proportions, and which numbers are on a grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_trace_analysis.checkpoint.files import StoredTensor, read_header
from eagle_trace_analysis.tensors.grids import grid_of
from eagle_trace_analysis.tensors.kinds import kind_of
from eagle_trace_analysis.tensors.places import match_channels, match_rows, order_words

HEAD, HEADS, WIDTH = 16, 12, 96
BF16 = ml_dtypes.bfloat16


def drawn(rows: int = HEAD * HEADS, columns: int = WIDTH, seed: int = 0) -> Any:
    return (0.02 * np.random.default_rng(seed).standard_normal((rows, columns))).astype(np.float32)


def stored(folder: Path, **arrays: Any) -> dict[str, StoredTensor]:
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(one) for name, one in arrays.items()}, folder / "t.safetensors")
    return {one.name: one for one in read_header(folder / "t.safetensors")}


def rounded_to(x: Any, levels: float, size: int) -> Any:
    """Blocks of `size` columns to `levels` steps of their largest element."""
    blocks = x.reshape(len(x), -1, size)
    step = np.abs(blocks).max(axis=2, keepdims=True) / levels
    return (np.round(blocks / step) * step).reshape(x.shape)


def heads_exchanged(x: Any) -> Any:
    y = x.reshape(HEADS, HEAD, -1).copy()
    y[[2, 9]] = y[[9, 2]]
    return y.reshape(x.shape)


def one_row(x: Any, factor: float) -> Any:
    y = x.copy()
    y[7] *= factor
    return y


def one_column(x: Any) -> Any:
    y = x.copy()
    y[:, 5] *= 1.5
    return y


def rotated_layout(x: Any) -> Any:
    order = np.arange(HEAD).reshape(2, -1).T.reshape(-1)
    return x.reshape(HEADS, HEAD, -1)[:, order].reshape(x.shape)


def low_rank(x: Any) -> Any:
    draw = np.random.default_rng(1)
    return x + 0.005 * draw.standard_normal((len(x), 3)) @ draw.standard_normal((3, x.shape[1]))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scaled": (lambda x: 1.01 * x, "is 1.01 x the trained one"),
    "negated": (lambda x: -x, "the other sign"),
    "shifted": (lambda x: x + 1, "is off by 1 in every element"),
    "bfloat16": (lambda x: x.astype(BF16), "rounded to bfloat16"),
    "float16": (lambda x: x.astype(np.float16), "rounded to float16"),
    "zeros": (lambda x: 0 * x, "is 0 in every element"),
    "heads": (heads_exchanged, "heads 2 and 9 exchanged"),
    "reversed": (lambda x: x[::-1], f"all {HEAD * HEADS} rows in reverse order"),
    "layout": (rotated_layout, "from two halves to neighbours"),
    "columns": (lambda x: x[:, np.r_[32:64, 0:32, 64:96]], "heads 0 and 1 exchanged"),
    "a column moved": (lambda x: x[:, np.r_[1, 0, 2:WIDTH]], "columns 0 and 1 exchanged"),
    "one row": (lambda x: one_row(x, 1.02), "1.02 x the trained one in row 7 alone"),
    "a row of zeros": (lambda x: one_row(x, 0.0), "is zero in row 7"),
    "one column": (one_column, "1.5 x the trained one in column 5 alone"),
    "column by column": (lambda x: x.T.reshape(x.shape), "is stored column by column"),
    "low rank": (low_rank, "a change of rank 3"),
    "int8": (lambda x: rounded_to(x, 127, WIDTH), "is the trained one rounded to int8 with one scale per row"),
    "another epoch": (lambda x: x + 0.1 * drawn(seed=3), "of another state of the training"),
    "something else": (lambda _: drawn(seed=4), "has nothing to do with the trained one"),
    "not finite": (lambda x: one_row(x, np.nan), "not finite"),
}


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_by_its_kind(name: str, dtype: Any, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    was = drawn().astype(dtype)
    if dtype is BF16 and name in ("bfloat16", "float16"):
        pytest.skip("it is so already")
    held = change(was.astype(np.float32))
    held = held.astype(dtype) if held.dtype.kind == "f" and held.dtype.itemsize > 2 else held
    tensors = stored(tmp_path, was=was, held=held)
    kind = kind_of(tensors["was"], tensors["held"], head=HEAD, parts=3 if name == "columns" else 1)
    assert kind is not None
    assert words in kind.words


def test_equal_tensors_differ_in_no_kind(tmp_path: Path) -> None:
    tensors = stored(tmp_path, was=drawn(), held=drawn())
    assert kind_of(tensors["was"], tensors["held"]) is None


@pytest.mark.parametrize("row", [slice(None), slice(70, 72)], ids=["in the sample", "behind it"])
@pytest.mark.parametrize("held", [np.float16, BF16])
def test_a_few_elements_that_a_storage_dtype_rounds_are_no_move(
    held: Any, row: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one number of an embedding is too small for float16: nothing stands at another place."""
    monkeypatch.setattr("eagle_trace_analysis.tensors.kinds.SAMPLE", 70 * WIDTH)
    was = drawn().astype(held).astype(np.float32)
    was[row, 5] *= 1 + 2.0**-14
    if row.start is not None:
        was[np.linspace(0, len(was) - 1, 70).astype(np.int64)] = 0.5
    tensors = stored(tmp_path, was=was, held=was.astype(held))
    kind = kind_of(tensors["was"], tensors["held"])
    assert kind is not None
    assert kind.name == f"rounded to {np.dtype(held).name}"


def test_a_row_that_no_sample_holds_is_found_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_trace_analysis.tensors.kinds.SAMPLE", 70 * WIDTH)
    tensors = stored(tmp_path, was=drawn(), held=one_row(drawn(), 3.0))
    kind = kind_of(tensors["was"], tensors["held"])
    assert kind is not None
    assert "3 x the trained one in row 7 alone" in kind.words


@pytest.mark.parametrize("sample", [70, 1 << 16])
def test_two_heads_are_found_in_a_matrix_of_which_a_sample_is_read(
    sample: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_trace_analysis.tensors.kinds.SAMPLE", sample * WIDTH)
    tensors = stored(tmp_path, was=drawn(), held=heads_exchanged(drawn()))
    kind = kind_of(tensors["was"], tensors["held"], head=HEAD)
    assert kind is not None
    assert "heads 2 and 9 exchanged" in kind.words


GRIDS = {
    "int8 per tensor": (lambda x: np.round(x / (np.abs(x).max() / 127)) * (np.abs(x).max() / 127), "int8", "tensor"),
    "int8 per row": (lambda x: rounded_to(x, 127, 256), "int8", "row"),
    "int4 per block": (lambda x: rounded_to(x, 7, 32), "int4", "block of 32"),
    "fp8 cast": (lambda x: x.astype(ml_dtypes.float8_e4m3fn), "fp8 (e4m3)", "tensor"),
    "fp8 e5m2 cast": (lambda x: x.astype(ml_dtypes.float8_e5m2), "fp8 (e5m2)", "tensor"),
    "fp8 per tensor": (lambda x: _fp8(x, np.abs(x).max() / 448), "fp8 (e4m3)", "tensor"),
    "fp8 per row": (lambda x: _fp8(x, np.abs(x).max(axis=1, keepdims=True) / 448), "fp8 (e4m3)", "row"),
    "int4 with a zero point": (lambda x: _zero_point(x, 32, 15), "int4 with a zero point", "block of 32"),
}


def _fp8(x: Any, step: Any) -> Any:
    return (x / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * step


def _zero_point(x: Any, size: int, most: int) -> Any:
    blocks = x.reshape(len(x), -1, size)
    low, high = (f(blocks, axis=2, keepdims=True) for f in (np.min, np.max))
    step = (high - low) / most
    zero = np.round(-low / step)
    return ((np.clip(np.round(blocks / step) + zero, 0, most) - zero) * step).reshape(x.shape)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GRIDS)
def test_quantised_weights_lie_on_the_grid_of_their_format(name: str, dtype: Any) -> None:
    how, form, per = GRIDS[name]
    was = drawn(128, 256)
    held = how(was).astype(np.float32).astype(dtype).astype(np.float32)
    found = grid_of(held, was, 2.0**-8 if dtype is BF16 else 2.0**-24)
    assert found is not None
    assert (found.format, found.per, found.rounds_to) == (form, per, True)


@pytest.mark.parametrize(
    ("size", "per"), [(128, "block of 128 x 128"), (None, "tensor")], ids=["by squares", "by the tensor"]
)
def test_a_grid_is_found_in_a_matrix_of_which_a_sample_is_read(
    size: int | None, per: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_trace_analysis.tensors.kinds.SAMPLE", 70 * 256)
    was = drawn(256, 256)
    was[1, 3] = 0.3
    step = np.abs(was).max() / 448 if size is None else _of_squares(was, size) / 448
    tensors = stored(tmp_path, was=was.astype(BF16), held=_fp8(was, step).astype(BF16))
    kind = kind_of(tensors["was"], tensors["held"])
    assert kind is not None
    assert f"rounded to fp8 (e4m3) with one scale per {per}" in kind.words


def _of_squares(x: Any, size: int) -> Any:
    squares = np.abs(x).reshape(len(x) // size, size, -1, size).max(axis=(1, 3))
    return np.repeat(np.repeat(squares, size, axis=0), size, axis=1)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(128, 256), (1, 2048), (192, 96)])
def test_weights_that_were_not_quantised_lie_on_no_grid(shape: tuple[int, int], dtype: Any) -> None:
    held = drawn(*shape, seed=8).astype(dtype).astype(np.float32)
    assert grid_of(held, drawn(*shape), 2.0**-8 if dtype is BF16 else 2.0**-24) is None


def test_channels_that_are_equal_or_zero_stay_at_their_places() -> None:
    x = drawn(64, 40, seed=5).astype(np.float64)
    x[:, 3], x[:, 4], x[:, 9] = 0.0, 0.0, x[:, 20]
    place, error = match_channels(x, x)
    assert (place == np.arange(40)).all()
    assert not error.any()
    assert (match_rows(np.ascontiguousarray(x.T), np.ascontiguousarray(x.T)) == np.arange(40)).all()


def test_channels_are_matched_over_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(48, 700, seed=6).astype(np.float64)
    order = np.random.default_rng(1).permutation(700)
    monkeypatch.setattr("eagle_trace_analysis.tensors.places.AT_ONCE", 64)
    place, error = match_channels(x[:, order] * (1 + 1e-6), x)
    assert (place == order).all()
    assert error.max() < 1e-5


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([3, 1, 2, 0], "heads 0 and 3 exchanged"),
        ([1, 2, 3, 0], "heads in the order 1, 2, 3, 0"),
        ([0, 0, 2, 3], "trained head 1 is nowhere"),
    ],
)
def test_an_order_of_heads_is_said_by_heads(order: list[int], words: str) -> None:
    place = (np.array(order)[:, None] * 8 + np.arange(8)).reshape(-1)
    assert words in order_words(place, 8)
