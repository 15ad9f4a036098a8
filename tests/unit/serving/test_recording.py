"""A recording in a server's process, on batches as SGLang forms them: rows of others beside those that are recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_trace import open_trace
from eagle_trace.manifest import Manifest
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording
from eagle_trace_sglang.batches import SGLangRequest, batch_of

torch = pytest.importorskip("torch")

WIDTH, VOCABULARY = 4, 6


def request(rid: str) -> Any:
    return SimpleNamespace(
        rid=rid, origin_input_ids=[1, 2, 3], output_ids_through_stop=[], finished_reason=None, tokenizer=None
    )


def prefill(lengths: dict[str, int], first: int = 0) -> Any:
    """A prefill of so many rows of each request, the last one at the same position of all."""
    counts, longest = list(lengths.values()), max(lengths.values())
    positions = [first + position for count in counts for position in range(longest - count, longest)]
    total = sum(counts)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND"),
        rids=list(lengths),
        input_ids=torch.arange(total) + 10,
        positions=torch.tensor(positions),
        seq_lens=torch.full((len(counts),), first + longest),
        extend_seq_lens=torch.tensor(counts),
        spec_info=SimpleNamespace(hidden_states=torch.arange(total * 3 * WIDTH).reshape(total, -1).float()),
    )


def record(out: Path, level: str = "values", **admission: Any) -> Recording:
    prepare_output(out)
    order = Order(str(out), Admission(**admission), level=level)
    return Recording(order, TraceWriter(out, Manifest("serve", level, "sglang")), WIDTH)


def test_logits_of_a_prefill_belong_to_last_rows_also_where_there_are_as_many_as_recorded_rows(tmp_path: Path) -> None:
    recording = record(tmp_path / "s.trace", requests=2)
    for rid in ("a", "b", "other"):
        recording.arrived(SGLangRequest(request(rid)))
    batch = prefill({"a": 2, "other": 1, "b": 1})
    recording.open_call(batch_of(batch))
    logits = torch.arange(3 * VOCABULARY).reshape(3, -1).float()
    recording.capture("logits", logits)
    recording.close_call()
    recording.seal({})

    trace = open_trace(tmp_path / "s.trace")
    keys = trace.keys("logits")
    assert list(zip(keys.prompt_id.tolist(), keys.root.tolist(), strict=True)) == [(0, 1), (1, 1)]
    np.testing.assert_array_equal(trace.values("logits"), logits[[0, 2]].numpy())
    np.testing.assert_array_equal(trace.values("fused"), batch.spec_info.hidden_states[[0, 1, 3]].numpy())


def test_a_request_under_the_id_of_one_that_ended_is_another_one(tmp_path: Path) -> None:
    recording = record(tmp_path / "s.trace", requests=2)
    recording.arrived(SGLangRequest(request("a")))
    recording.open_call(batch_of(prefill({"a": 3})))
    recording.close_call()
    recording.ended("a")

    recording.arrived(SGLangRequest(request("a")))
    recording.open_call(batch_of(prefill({"a": 2}, first=3)))
    recording.close_call()
    recording.seal({})

    trace = open_trace(tmp_path / "s.trace")
    assert trace.rows.root.tolist() == [0, 1, 2]
    assert [list(ids) for ids in trace.prompts.token_ids] == [[1, 2, 3, 12]]
