"""What is recorded on a device leaves it in one copy per forward, for which the host's thread does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle_trace import open_trace
from eagle_trace.manifest import Manifest
from eagle_trace.reader import Trace
from eagle_trace.recording import forward, stage
from eagle_trace.recording.best import best_ids, best_on_device
from eagle_trace.recording.stage import Stage
from eagle_trace.selection import Selection
from eagle_trace.sketch import reduce_on_device
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.chains import ChainRecording, Proposal
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording
from eagle_trace_sglang.batches import SGLangRequest, batch_of, parents_of, verified_of
from eagle_trace_vllm.requests import Asked
from eagle_trace_vllm.sites import BEFORE_FORWARD
from tests.support.stand_in import Device, moved

WIDTH, VOCABULARY, TOPK, NODES = 4, 24, 2, 3
Place = Callable[[Any], Any]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device().installed(monkeypatch) as one:
        yield one


class Server:
    """Draft forwards as SGLang makes them of two requests that are recorded and one that is not.

    Args:
        out: folder of the trace.
        place: brings a tensor to where the server computes.
    """

    def __init__(self, out: Path, place: Place, level: str = "values", **selection: str) -> None:
        torch.manual_seed(0)
        prepare_output(out)
        order = Order(str(out), Admission(match="r*", requests=2), level=level, selection=Selection.parse(**selection))
        hot = torch.arange(VOCABULARY) * 3
        self.out, self._place = out, place
        self.writer = TraceWriter(out, Manifest("serve", level, "sglang"))
        self.recording = Recording(order, self.writer, WIDTH, hot.numpy())
        self.lengths = {"r1": 3, "other": 2, "r2": 4}
        self.forwards = 0
        for rid in self.lengths:
            self.recording.arrived(SGLangRequest(request(rid)))

    def _run(self, mode: str, tokens: torch.Tensor, seq_lens: list[int], **more: Any) -> None:
        place, count = self._place, len(tokens)
        lens = more.pop("lens", None)
        picked = more.pop("picked", count)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name=mode),
            rids=list(self.lengths),
            input_ids=place(tokens),
            positions=place(torch.arange(count)),
            seq_lens=place(torch.tensor(seq_lens)),
            extend_seq_lens=None if lens is None else place(torch.tensor(lens)),
            extend_seq_lens_cpu=lens if mode == "EXTEND" else None,
            spec_info=SimpleNamespace(hidden_states=place(torch.randn(count, 3 * WIDTH)), **more),
        )
        self.recording.open_call(batch_of(batch))
        for site, width in (("fc.out", WIDTH), ("layer.0.attn.q", 2 * WIDTH)):
            tensor = place(torch.randn(count, width).bfloat16())
            self.recording.capture(site, tensor)
            tensor.zero_()  # as fused kernels do
        # few different scores, so that many are equal
        self.recording.capture("logits", place(torch.randint(0, 5, (picked, VOCABULARY)).float()))
        self.recording.close_call()
        self.forwards += 1

    def round(self) -> None:
        """A prefill, two draft steps in a tree, a verify round and the extend behind it."""
        lens, place = list(self.lengths.values()), self._place
        self._run("EXTEND", torch.arange(sum(lens)), lens, lens=lens, picked=len(lens))
        for step in range(2):
            drafted = torch.randint(0, VOCABULARY, (len(lens) * TOPK,))
            parents = TOPK * TOPK * max(0, step - 1) + TOPK + TOPK * torch.randint(0, TOPK, (len(lens), TOPK))
            self.recording.chosen(place(drafted), *parents_of([None, None, place(parents)], step, TOPK))
            self._run("DECODE", drafted, lens)
        verify = SimpleNamespace(
            draft_token_num=NODES,
            draft_token=place(torch.randint(0, VOCABULARY, (len(lens) * NODES,))),
            retrieve_next_token=place(torch.tensor([[1, 2, -1]] * len(lens))),
            retrieve_next_sibling=place(torch.full((len(lens), NODES), -1)),
        )
        result = SimpleNamespace(
            next_token_ids=place(torch.randint(0, VOCABULARY, (len(lens) * NODES,))),
            accept_lens=place(torch.tensor([1, 3, 2])),
            logits_output=SimpleNamespace(next_token_logits=place(torch.randn(len(lens) * NODES, VOCABULARY))),
        )
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            spec_info=verify,
            seq_lens=place(torch.tensor(lens)),
            reqs=[request(rid) for rid in self.lengths],
        )
        self.recording.verified(verified_of(result, batch))
        self._run(
            "DRAFT_EXTEND_V2",
            torch.arange(len(lens) * NODES),
            [one + NODES for one in lens],
            lens=[NODES] * len(lens),
            num_accept_tokens=place(torch.tensor([1, 3, 2])),
        )

    def seal(self) -> Trace:
        for rid in self.lengths:
            self.recording.ended(rid)
        self.recording.seal({})
        return open_trace(self.out)


def request(rid: str) -> Any:
    return SimpleNamespace(
        rid=rid, origin_input_ids=[1, 2, 3], output_ids_through_stop=[], finished_reason=None, tokenizer=None
    )


def served(out: Path, place: Place, level: str = "values", **selection: str) -> Trace:
    server = Server(out, place, level, **selection)
    server.round()
    return server.seal()


def assert_same(one: Trace, other: Trace) -> None:
    """Every table and every byte of the values are the same."""
    for name in ("rows", "rounds", "topk", "calls", "prompts"):
        assert one.table(name).equals(other.table(name)), name
    assert one.sites == other.sites
    for site in one.sites:
        np.testing.assert_array_equal(one.values(site), other.values(site))
        assert one.keys(site).root.tolist() == other.keys(site).root.tolist()


def test_a_forward_costs_a_server_one_transfer_and_no_wait(device: Device, tmp_path: Path) -> None:
    server = Server(tmp_path / "s.trace", moved)
    server.round()
    assert device.blocking == []
    assert len(device.transfers) == server.forwards == 4
    trace = server.seal()
    assert device.blocking == []
    assert len(trace.table("rounds")) == 2


@pytest.mark.parametrize(
    "selection",
    [{}, {"roots": "1:3"}, {"steps": "1"}, {"sites": "fc.out,topk.*"}, {"sites": "target.hidden.1,logits"}],
)
def test_what_comes_from_a_device_is_what_comes_from_the_hosts_memory(
    device: Device, tmp_path: Path, selection: dict[str, str]
) -> None:
    here = served(tmp_path / "here.trace", lambda tensor: tensor, **selection)
    there = served(tmp_path / "there.trace", moved, **selection)
    assert device.transfers
    assert_same(here, there)


@pytest.mark.parametrize("level", ["shapes", "stats", "sketch"])
def test_below_values_rows_are_reduced_on_the_device(device: Device, tmp_path: Path, level: str) -> None:
    here = served(tmp_path / "here.trace", lambda tensor: tensor, level)
    there = served(tmp_path / "there.trace", moved, level)
    assert device.blocking == []
    assert len(device.transfers) == 4
    for name in ("rows", "rounds", "calls"):
        assert here.table(name).equals(there.table(name)), name
    best = [trace.table("topk").to_pandas() for trace in (here, there)]
    assert best[0].drop(columns="logprob").equals(best[1].drop(columns="logprob"))
    np.testing.assert_allclose(best[0].logprob, best[1].logprob, rtol=1e-5)
    assert here.sites == there.sites
    for site in () if level == "shapes" else here.sites:
        one, other = here.statistics(site), there.statistics(site)
        np.testing.assert_allclose(one.norm, other.norm, rtol=1e-6)
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [stage.TRANSFER_BYTES, 1])
def test_sites_of_one_shape_are_reduced_together(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    shapes: list[tuple[int, ...]] = []

    def reduce(rows: Any, **options: Any) -> Any:
        shapes.append(tuple(rows.shape))
        return reduce_on_device(rows, **options)

    monkeypatch.setattr(forward, "reduce_on_device", reduce)
    monkeypatch.setattr(forward, "TRANSFER_BYTES", most)
    server = Server(tmp_path / "s.trace", moved, "sketch")
    server._run("EXTEND", torch.arange(9), [3, 2, 4], lens=[3, 2, 4], picked=3)
    trace, rows = server.seal(), 7
    # three target layers' features of one width and dtype; a forward too large to wait is reduced as it comes
    together = {(3 * rows, WIDTH)} if most > 1 else set()
    apart = {(rows, 3 * WIDTH), (rows, WIDTH), (rows, 2 * WIDTH), (3, VOCABULARY)}
    assert set(shapes) == together | apart
    assert len(shapes) == (5 if most > 1 else 7)
    here = Server(tmp_path / "h.trace", lambda tensor: tensor, "sketch")
    here._run("EXTEND", torch.arange(9), [3, 2, 4], lens=[3, 2, 4], picked=3)
    other = here.seal()
    assert trace.sites == other.sites
    for site in trace.sites:
        np.testing.assert_allclose(trace.sketch(site), other.sketch(site), rtol=2e-3, atol=1e-4)


def test_rows_of_others_stay_on_the_device(device: Device, tmp_path: Path) -> None:
    alone = Server(tmp_path / "s.trace", moved)
    alone._run("EXTEND", torch.arange(9), [3, 2, 4], lens=[3, 2, 4], picked=3)
    rows = 7
    row_bytes = 4 * 3 * WIDTH + 2 * WIDTH + 2 * 2 * WIDTH
    of_logits, of_ids = 3 * VOCABULARY * 4, (9 + 9 + 3 + 3) * 8
    assert device.transfers == [rows * row_bytes + of_logits + of_ids]
    assert len(alone.seal().rows) == rows


def test_a_forward_that_is_larger_than_a_transfer_leaves_in_several(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "TRANSFER_BYTES", 100)
    there = served(tmp_path / "there.trace", moved)
    assert len(device.transfers) > 4
    assert device.blocking == []
    assert_same(served(tmp_path / "here.trace", lambda tensor: tensor), there)


def test_the_budgets_count_what_is_staged_on_the_device(device: Device, tmp_path: Path) -> None:
    server = Server(tmp_path / "s.trace", moved)
    before = server.writer._taken
    server._run("EXTEND", torch.arange(9), [3, 2, 4], lens=[3, 2, 4], picked=3)
    counted = server.writer._taken - before
    assert counted >= device.transfers[0]


def test_nothing_is_read_before_it_has_arrived(device: Device) -> None:
    one = Stage()
    tensor = moved(torch.arange(6).reshape(2, 3))
    held, seen = one.keep(tensor), []
    one.then(lambda: seen.append(held.array.copy()))
    tensor.zero_()
    load = one.send()
    assert (seen, len(device.under_way)) == ([], 1)
    with pytest.raises(RuntimeError, match="before it was sent"):
        _ = held.array
    assert list(load.parts()) == []
    assert device.under_way == []
    np.testing.assert_array_equal(seen[0], [[0, 1, 2], [3, 4, 5]])


def test_kinds_of_every_size_share_a_transfer(device: Device) -> None:
    one = Stage()
    given = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5).bfloat16(),
        torch.tensor(7),
        torch.randn(1, 3, dtype=torch.float64),
        torch.empty(0, 4),
        torch.arange(3, dtype=torch.int32),
        torch.randn(4, 6).t()[1:, :2],
    ]
    held = [one.keep(moved(tensor)) for tensor in given]
    list(one.send().parts())
    assert len(device.transfers) == 1
    for tensor, kept in zip(given, held, strict=True):
        assert kept.array.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(kept.array.astype(np.float64), tensor.double().numpy())


def test_in_the_hosts_memory_everything_is_known_at_once() -> None:
    one = Stage()
    seen: list[int] = []
    held = one.keep(torch.arange(3))
    one.then(lambda: seen.append(int(held.array.sum())))
    assert seen == [3]
    assert not one.late


@pytest.mark.parametrize("width", [3, 10, 50])
def test_best_ids_are_the_same_on_a_device(width: int) -> None:
    torch.manual_seed(width)
    logits = torch.randint(-3, 3, (40, width)).float() * torch.tensor([1.0, -0.0])[torch.randint(0, 2, (40, width))]
    logits[0, 1], logits[1, 0], logits[2, 2] = float("nan"), float("inf"), float("-inf")
    for kind in (torch.float32, torch.bfloat16):
        given = logits.to(kind)
        ids, scores, logprobs = (one.numpy() for one in best_on_device(given, 10))
        expected = best_ids(given.float().numpy(), 10)
        np.testing.assert_array_equal(ids[1:], expected[0][1:])
        np.testing.assert_array_equal(scores[1:], expected[1][1:])
        finite = np.isfinite(expected[2])
        np.testing.assert_allclose(logprobs[finite], expected[2][finite], rtol=1e-5, atol=1e-6)


def proposed(out: Path, place: Place) -> Trace:
    """What vLLM's drafter does for two requests: a first forward over their rows, then one more step."""
    torch.manual_seed(1)
    prepare_output(out)
    writer = TraceWriter(out, Manifest("serve", "values", "vllm"))
    recording = ChainRecording(
        Order(str(out), Admission(requests=2)), writer, WIDTH, longest=100, before=BEFORE_FORWARD
    )
    sampling = SimpleNamespace(eos_token_id=0, stop_token_ids=(), min_tokens=0, max_tokens=9, stop=())
    asked = [Asked(rid, [1, 2, 3, 4], 100, computed=4, sampling=sampling) for rid in ("a", "b")]
    for one in asked:
        recording.arrived(one)
    recording.sampled("a", [7], [], [])
    recording.sampled("b", [8], [], [])
    lengths = np.array([4, 4])
    recording.open_proposal(Proposal(["a", "b"], ends=np.array([4, 4]), lengths=lengths, kept=lengths))
    for rows in (8, 2):
        features = place(torch.randn(rows, 3 * WIDTH))
        if rows == 8:
            recording.capture("fused", features)
        recording.forward(place(torch.arange(rows)), place(torch.arange(rows)))
        recording.capture("layer.0.out", place(torch.randn(rows, WIDTH)))
        recording.capture("logits", place(torch.randn(2, VOCABULARY)))
    recording.close_proposal()
    for one in asked:
        one.computed = 5
    recording.sampled("a", [5, 6], [9], [5, 6])
    for one in asked:
        recording.ended(one.rid)
    recording.seal({})
    return open_trace(out)


def test_a_drafter_of_vllm_goes_the_same_road(device: Device, tmp_path: Path) -> None:
    here = proposed(tmp_path / "here.trace", lambda tensor: tensor)
    there = proposed(tmp_path / "there.trace", moved)
    assert device.blocking == []
    assert len(device.transfers) == 2
    assert len(here.rows) == 10
    assert len(here.table("rounds")) == 1
    assert_same(here, there)
