"""CUDA graphs put aside while recording, and what is recorded where they are kept. No GPU: the graphs are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_trace import open_trace
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording
from eagle_trace_sglang.batches import SGLangRequest
from eagle_trace_sglang.graphs import has_graphs, hook_graph_boundaries, run_eagerly

torch = pytest.importorskip("torch")

WIDTH, VOCABULARY = 4, 6


class GraphRunner:
    """Stands in for SGLang's runner of the extend graph: outputs of the rows at `select_index` only."""

    def execute(self, forward_batch: Any, select_index: Any) -> Any:
        rows = forward_batch.spec_info.hidden_states[select_index]
        return SimpleNamespace(hidden_states=rows[:, :WIDTH] + 1, next_token_logits=rows[:, :VOCABULARY] * 2)


class EagerRunner:
    """The runner SGLang keeps where there is no graph."""


def worker() -> Any:
    return SimpleNamespace(
        cuda_graph_runner=GraphRunner(),
        cuda_graph_runner_for_draft_extend=GraphRunner(),
        draft_runner=SimpleNamespace(decode_cuda_graph_runner=EagerRunner(), prefill_cuda_graph_runner=GraphRunner()),
    )


def held(one: Any) -> list[Any]:
    runner = one.draft_runner
    return [
        one.cuda_graph_runner,
        one.cuda_graph_runner_for_draft_extend,
        runner.decode_cuda_graph_runner,
        runner.prefill_cuda_graph_runner,
    ]


def test_graphs_are_put_aside_and_handed_back() -> None:
    one = worker()
    before = held(one)
    assert has_graphs(one)
    with Hooks() as hooks:
        run_eagerly(hooks, one)
        assert held(one) == [None, None, before[2], None], "the eager runner stays"
        assert not has_graphs(one)
    assert held(one) == before


def extend_after_verify() -> Any:
    """Two requests of four rows each; of the first three are accepted, of the second one."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="DRAFT_EXTEND_V2"),
        rids=["a", "b"],
        input_ids=torch.tensor([11, 12, 13, 0, 21, 0, 0, 0]),
        positions=torch.tensor([5, 6, 7, 8, 9, 10, 11, 12]),
        seq_lens=torch.tensor([9, 13]),
        extend_seq_lens=torch.tensor([4, 4]),
        spec_info=SimpleNamespace(
            num_accept_tokens=torch.tensor([3, 1]), hidden_states=torch.arange(8 * 3 * WIDTH).reshape(8, -1).float()
        ),
    )


def test_what_enters_and_leaves_a_kept_graph_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "s.trace"
    prepare_output(out)
    order = Order(str(out), Admission(requests=2), keep_cuda_graphs=True)
    recording = Recording(order, TraceWriter(out, Manifest("serve", "values", "sglang")), WIDTH)
    for rid in "ab":
        one = SimpleNamespace(
            rid=rid, origin_input_ids=[1, 2], output_ids_through_stop=[], finished_reason=None, tokenizer=None
        )
        recording.arrived(SGLangRequest(one))
    one, batch = worker(), extend_after_verify()
    with Hooks() as hooks:
        hook_graph_boundaries(hooks, one, recording)
        output = one.cuda_graph_runner_for_draft_extend.execute(batch, torch.tensor([2, 4]))
    assert "execute" not in vars(one.cuda_graph_runner_for_draft_extend)
    recording.seal({})

    trace = open_trace(out)
    fused = batch.spec_info.hidden_states.numpy()
    np.testing.assert_array_equal(trace.values("fused"), fused[[0, 1, 2, 4]])
    np.testing.assert_array_equal(trace.values("target.hidden.1"), fused[[0, 1, 2, 4], WIDTH : 2 * WIDTH])
    np.testing.assert_array_equal(trace.values("carry"), output.hidden_states.numpy())
    np.testing.assert_array_equal(trace.values("logits"), output.next_token_logits.numpy())
    assert trace.keys("logits").root.tolist() == [7, 9], "the last accepted row of each request"
    assert trace.topk.groupby(["prompt_id", "root"]).size().to_dict() == {(0, 7): VOCABULARY, (1, 9): VOCABULARY}
