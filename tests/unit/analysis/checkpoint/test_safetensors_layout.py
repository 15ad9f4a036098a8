"""What the safetensors library opens, `check` reads, and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from eagle_trace.errors import CheckpointError
from eagle_trace_analysis.checkpoint.files import read_header
from tests.support import checkpoints as make

Header = dict[str, Any]
Altered = tuple[Header, bytes]


def _last(header: Header) -> str:
    return max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])


def behind(header: Header, data: bytes) -> Altered:
    return header, data + bytes(64)


def gap(header: Header, data: bytes) -> Altered:
    begin, end = header[_last(header)]["data_offsets"]
    header[_last(header)]["data_offsets"] = [begin + 64, end + 64]
    return header, data[:begin] + bytes(64) + data[begin:]


def gap_in_front(header: Header, data: bytes) -> Altered:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [at + 8 for at in entry["data_offsets"]]
    return header, bytes(8) + data


def overlap(header: Header, data: bytes) -> Altered:
    header["norm.weight"]["data_offsets"] = header["layers.0.input_layernorm.weight"]["data_offsets"]
    return header, data


def number_in_metadata(header: Header, data: bytes) -> Altered:
    return header | {"__metadata__": {"format": "pt", "step": 3}}, data


def list_for_metadata(header: Header, data: bytes) -> Altered:
    return header | {"__metadata__": ["pt"]}, data


def cut(header: Header, data: bytes) -> Altered:
    return header, data[:-1]


def other_order(header: Header, data: bytes) -> Altered:
    return dict(reversed(header.items())), data


def empty_tensor(header: Header, data: bytes) -> Altered:
    at = header["norm.weight"]["data_offsets"][0]
    return header | {"none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [at, at]}}, data


def no_metadata(header: Header, data: bytes) -> Altered:
    del header["__metadata__"]
    return header, data


def null_metadata(header: Header, data: bytes) -> Altered:
    return header | {"__metadata__": None}, data


@pytest.mark.parametrize(
    "alter",
    [
        behind, gap, gap_in_front, overlap, number_in_metadata, list_for_metadata, cut, other_order, empty_tensor,
        no_metadata, null_metadata,
    ],
)  # fmt: skip
def test_a_file_is_read_if_and_only_if_the_library_opens_it(
    alter: Callable[[Header, bytes], Altered], tmp_path: Path
) -> None:
    make.write_safetensors(tmp_path / "whole.safetensors", make.draft_tensors())
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = alter(json.loads(whole[8 : 8 + length]), whole[8 + length :])
    text = json.dumps(header).encode()
    place = tmp_path / "altered.safetensors"
    place.write_bytes(struct.pack("<Q", len(text)) + text + data)
    try:
        with safe_open(place, framework="numpy") as opened:
            names = set(opened.keys())
    except SafetensorError:
        with pytest.raises(CheckpointError, match=r"is (damaged|truncated)"):
            read_header(place)
    else:
        assert {one.name for one in read_header(place)} == names
