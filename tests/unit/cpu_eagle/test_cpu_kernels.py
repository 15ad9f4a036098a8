"""Every CPU kernel against a plain, slow reference that loops where the kernel does not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from sglang_cpu_eagle import attention, cpu_environment, install, kernels, sampling  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- attention
# -------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Requests of given lengths whose slots are scattered over a cache; unused slots hold NaN."""

    lengths: list[int]
    heads: int = 4
    groups: int = 2
    width: int = 8
    value_width: int = 8
    dtype: torch.dtype = torch.float32
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    table: Tensor = field(init=False)
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        requests, longest = len(self.lengths), max(self.lengths, default=1)
        slots = sum(self.lengths) + 9
        self.k = torch.full((slots, self.groups, self.width), math.nan, dtype=self.dtype)
        self.v = torch.full((slots, self.groups, self.value_width), math.nan, dtype=self.dtype)
        self.rows = torch.randperm(requests + 2)[:requests]
        self.table = torch.full((requests + 2, longest + 4), slots - 1, dtype=torch.int32)
        free = torch.randperm(slots - 1)
        for row, length in zip(self.rows.tolist(), self.lengths, strict=True):
            used, free = free[:length], free[length:]
            self.table[row, :length] = used.to(torch.int32)
            self.k[used] = torch.randn(length, self.groups, self.width).to(self.dtype)
            self.v[used] = torch.randn(length, self.groups, self.value_width).to(self.dtype)

    def seq_lens(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int64)

    def query(self, rows: int) -> Tensor:
        return torch.randn(rows, self.heads, self.width).to(self.dtype)

    def slots_of(self, request: int) -> Tensor:
        return self.table[int(self.rows[request]), : self.lengths[request]].long()


def reference_row(batch: Batch, request: int, q_HD: Tensor, seen: list[int], **rule: Any) -> Tensor:
    """One query row over the positions ``seen`` of one request, in float64, head by head."""
    slots = batch.slots_of(request)[seen]
    out = torch.empty(batch.heads, batch.value_width, dtype=torch.float64)
    for head in range(batch.heads):
        group = head // (batch.heads // batch.groups)
        keys, values = batch.k[slots, group].double(), batch.v[slots, group].double()
        scores = keys @ q_HD[head].double() * 0.3
        if rule.get("cap", 0.0) > 0:
            scores = rule["cap"] * torch.tanh(scores / rule["cap"])
        weights = scores.exp()
        total = weights.sum()
        if rule.get("sinks") is not None:
            total = total + rule["sinks"][head].double().exp()
        out[head] = (weights / total) @ values
    return out


def decode(batch: Batch, q: Tensor, **rule: Any) -> Tensor:
    out = torch.empty(*q.shape[:2], batch.value_width, dtype=batch.dtype)
    new = rule.get("new", (None, None, torch.zeros(0, dtype=torch.int64)))
    kernels.decode_attention_cpu(
        q, batch.k, batch.v, rule.get("k_scale", 1.0), rule.get("v_scale", 1.0), out, *new, torch.empty(0),
        batch.table, batch.rows, batch.seq_lens(), 0.3, rule.get("cap", 0.0), rule.get("cross", False),
        rule.get("window", 0), rule.get("encoder_lens"), rule.get("sinks"),
    )  # fmt: skip
    return out


def extend(batch: Batch, q: Tensor, extends: list[int], **rule: Any) -> Tensor:
    """Runs the extend kernel over the last ``extends`` tokens of each request."""
    out = torch.empty(*q.shape[:2], batch.value_width, dtype=batch.dtype)
    starts = torch.tensor([sum(extends[:request]) for request in range(len(extends))], dtype=torch.int32)
    new = [batch.slots_of(request)[batch.lengths[request] - n :] for request, n in enumerate(extends)]
    flat = torch.cat(new) if new else torch.zeros(0, dtype=torch.int64)
    from_cache = rule.get("from_cache", False)
    k_buffer, v_buffer = batch.k.clone(), batch.v.clone()
    if not from_cache:
        # The kernel is given the new rows, so it need not find them in the cache.
        k_buffer[flat], v_buffer[flat] = math.nan, math.nan
    new_rows = (None, None) if from_cache else (batch.k[flat].flatten(1), batch.v[flat].flatten(1))
    kernels.extend_attention_cpu(
        q, *new_rows, out, k_buffer, v_buffer, rule.get("k_scale", 1.0), 1.0, batch.table, batch.rows,
        batch.seq_lens(),
        torch.tensor(extends, dtype=torch.int32), starts, max(extends, default=0), 0.3, rule.get("cap", 0.0),
        rule.get("cross", False), rule.get("window", 0), rule.get("encoder_lens"), rule.get("sinks"),
        rule.get("tree"), rule.get("causal", True),
    )  # fmt: skip
    return out


def reference_extend(batch: Batch, q: Tensor, extends: list[int], **rule: Any) -> Tensor:
    rows, flat = [], 0
    for request, count in enumerate(extends):
        prefix = batch.lengths[request] - count
        for row in range(count):
            seen = [
                key
                for key in range(batch.lengths[request])
                if (key < prefix or _visible(rule, request, extends, row, key - prefix))
                and not (rule.get("window", 0) > 0 and prefix + row - key >= rule["window"])
            ]
            rows.append(reference_row(batch, request, q[flat], seen, **rule))
            flat += 1
    return torch.stack(rows)


def _visible(rule: dict[str, Any], request: int, extends: list[int], row: int, key: int) -> bool:
    if rule.get("tree") is not None:
        offset = sum(count * count for count in extends[:request])
        return bool(rule["tree"][offset + row * extends[request] + key])
    return key <= row or not rule.get("causal", True)


RULES: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"cap": 2.0},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"window": 3, "cap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[7], [1, 4, 9], [200, 3, 5, 90]])
def test_decode_attends_to_the_tokens_of_the_request(lengths: list[int], rule: dict[str, Any], dtype: Any) -> None:
    batch = Batch(lengths, dtype=dtype)
    q = batch.query(len(lengths))
    window = rule.get("window", 0)
    want = torch.stack(
        [
            reference_row(batch, r, q[r], list(range(max(0, n - window) if window else 0, n)), **rule)
            for r, n in enumerate(lengths)
        ]
    )
    torch.testing.assert_close(decode(batch, q, **rule).double(), want, rtol=0, atol=TOLERANCE[dtype])


def test_decode_writes_the_new_rows_into_the_cache_before_it_reads() -> None:
    batch = Batch([3, 6])
    q = batch.query(2)
    last = torch.tensor([int(batch.slots_of(r)[-1]) for r in range(2)])
    new_k, new_v = batch.k[last].flatten(1), batch.v[last].flatten(1)
    want = decode(batch, q)
    batch.k[last], batch.v[last] = math.nan, math.nan
    torch.testing.assert_close(decode(batch, q, new=(new_k, new_v, last)), want, rtol=0, atol=0)
    torch.testing.assert_close(batch.k[last].flatten(1), new_k, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "value_width"), [(1, 1, 4, 4), (6, 6, 8, 8), (9, 3, 8, 8), (8, 1, 12, 8)]
)
def test_heads_share_keys_in_groups_and_values_may_be_narrower(
    heads: int, groups: int, width: int, value_width: int
) -> None:
    batch = Batch([5, 8], heads, groups, width, value_width)
    q = batch.query(5)
    want = reference_extend(batch, q, [2, 3])
    torch.testing.assert_close(extend(batch, q, [2, 3]).double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [*RULES, {"from_cache": True}, {"causal": False}])
@pytest.mark.parametrize("extends", [[7, 9, 4], [4, 4, 4], [1, 9, 1], [7, 1, 0]])
def test_extend_sees_the_prefix_and_the_new_rows_before_it(
    extends: list[int], rule: dict[str, Any], dtype: Any
) -> None:
    batch = Batch([7, 30, 4], dtype=dtype)
    q = batch.query(sum(extends))
    want = reference_extend(batch, q, extends, **rule)
    torch.testing.assert_close(extend(batch, q, extends, **rule).double(), want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rule", [{}, {"window": 4}])
def test_extend_under_a_tree_sees_ancestors_only(rule: dict[str, Any]) -> None:
    batch = Batch([12, 40, 5])
    blocks = [(torch.rand(4, 4) < 0.5).tril() | torch.eye(4, dtype=torch.bool) for _ in range(3)]
    rule = {**rule, "tree": torch.stack(blocks).flatten()}
    q = batch.query(12)
    want = reference_extend(batch, q, [4, 4, 4], **rule)
    torch.testing.assert_close(extend(batch, q, [4, 4, 4], **rule).double(), want, rtol=0, atol=2e-6)


def latent(lengths: list[int], extends: list[int]) -> tuple[Tensor, Tensor]:
    """A prefill of multi-head latent attention: its rows, computed and by plain products.

    The cache holds latents of width 12 for all heads together; the new keys are given for each of 4 heads, 8 wide, and
    the values 6 wide.
    """
    cache = Batch(lengths, heads=4, groups=1, width=12, value_width=10)
    rows = sum(extends)
    query, keys, values = torch.randn(rows, 4, 8), torch.randn(rows, 4, 8), torch.randn(rows, 4, 6)
    out = torch.empty(rows, 4, 6)
    starts = torch.tensor([sum(extends[:request]) for request in range(len(extends))], dtype=torch.int32)
    kernels.extend_attention_cpu(
        query, keys.flatten(1), values.flatten(1), out, cache.k, cache.v, 1.0, 1.0, cache.table, cache.rows,
        cache.seq_lens(), torch.tensor(extends, dtype=torch.int32), starts, max(extends), 0.3, 0.0, False, 0, None,
        None, None,
    )  # fmt: skip
    want = []
    for start, count in zip(starts.tolist(), extends, strict=True):
        own = slice(start, start + count)
        scores = torch.einsum("qhd,khd->hqk", query[own].double(), keys[own].double()) * 0.3
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        want.append(torch.einsum("hqk,khv->qhv", scores.softmax(-1), values[own].double()))
    return out, torch.cat(want)


def test_a_prefill_of_latent_attention_takes_the_keys_of_every_head_as_they_are_given() -> None:
    got, want = latent([5, 9, 2], [5, 9, 2])
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


def test_keys_of_every_head_are_joined_to_no_cached_prefix() -> None:
    with pytest.raises(NotImplementedError, match="disable-radix-cache"):
        latent([7, 9], [5, 9])


def test_names_that_sglang_looks_up_on_import_are_there_and_refuse_to_be_called() -> None:
    kernels.register_operators()
    for name in kernels.LOOKED_UP_ON_IMPORT:
        with pytest.raises(NotImplementedError, match=name):
            getattr(torch.ops.sgl_kernel, name)(1, key=2)
    # SGLang asks for these with hasattr, and has a way of its own where they are absent
    assert not hasattr(torch.ops.sgl_kernel, "fused_qk_norm_rope_cpu")
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_a_long_prefill_is_cut_in_blocks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([40, 33])
    q = batch.query(60)
    whole = extend(batch, q, [30, 30])
    monkeypatch.setattr(attention, "MAX_SCORE_ELEMENTS", 2 * 4 * 40 * 7)
    torch.testing.assert_close(extend(batch, q, [30, 30]), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gets_the_same_result_alone_and_among_eight(dtype: Any) -> None:
    batch = Batch([11, 60, 2, 35, 35, 8, 90, 17], dtype=dtype)
    q = batch.query(8)
    together = decode(batch, q)
    for request, length in enumerate(batch.lengths):
        alone = Batch([length], dtype=dtype)
        alone.k, alone.v, alone.table = batch.k, batch.v, batch.table
        alone.rows = batch.rows[request : request + 1]
        # Rounding of the result, and in float32 that of the sums as well.
        units = 1 if dtype == torch.bfloat16 else 4
        atol = units * torch.finfo(dtype).eps * together[request].abs().max().item()
        torch.testing.assert_close(decode(alone, q[request : request + 1])[0], together[request], rtol=0, atol=atol)


def test_an_empty_batch_is_no_work() -> None:
    batch = Batch([])
    assert decode(batch, batch.query(0)).shape == (0, 4, 8)
    assert extend(batch, batch.query(0), []).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"cross": True}, "no cross attention"),
        ({"encoder_lens": torch.tensor([3])}, "no cross attention"),
        ({"k_scale": 0.5}, "no cache scales"),
    ],
)
def test_attention_that_is_not_there_says_so(rule: dict[str, Any], sentence: str) -> None:
    batch = Batch([4])
    with pytest.raises(NotImplementedError, match=sentence):
        decode(batch, batch.query(1), **rule)
    with pytest.raises(NotImplementedError, match=sentence):
        extend(batch, batch.query(1), [1], **rule)


def test_a_quantised_cache_is_refused() -> None:
    batch = Batch([4])
    batch.k = torch.zeros(batch.k.shape).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="leave kv_cache_dtype at 'auto'"):
        decode(batch, batch.query(1))


def test_a_tree_mask_over_the_whole_sequence_is_refused() -> None:
    batch = Batch([6])
    with pytest.raises(NotImplementedError, match="QLEN_ONLY, 4 elements here"):
        extend(batch, batch.query(2), [2], tree=torch.ones(12, dtype=torch.bool))


def test_a_window_without_causal_order_is_refused() -> None:
    batch = Batch([6])
    with pytest.raises(NotImplementedError, match="not causal"):
        extend(batch, batch.query(2), [2], window=3, causal=False)


def test_the_attention_kernels_are_torch_operators_with_the_order_of_arguments_sglang_uses() -> None:
    kernels.register_operators()
    kernels.register_operators()
    batch = Batch([3, 5])
    q = batch.query(2)
    out = torch.empty_like(q)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, batch.k, batch.v, 1.0, 1.0, out, None, None, torch.zeros(0, dtype=torch.int64), torch.empty(0),
        batch.table, batch.rows, batch.seq_lens(), 0.3, 0.0, False, 0, None, None,
    )  # fmt: skip
    torch.testing.assert_close(out, decode(batch, q), rtol=0, atol=0)
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, out, batch.k, batch.v, 1.0, 1.0, batch.table, batch.rows, batch.seq_lens(),
        torch.ones(2, dtype=torch.int64), torch.arange(2), 1, 0.3, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip
    torch.testing.assert_close(out, decode(batch, q), rtol=0, atol=1e-6)


def test_releases_whose_caches_have_no_scales_call_the_same_operators_without_them() -> None:
    kernels.register_operators()
    batch = Batch([3, 5])
    q = batch.query(2)
    out = torch.empty_like(q)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, batch.k, batch.v, out, None, None, torch.zeros(0, dtype=torch.int64), torch.empty(0),
        batch.table, batch.rows, batch.seq_lens(), 0.3, 0.0, False, 0, None, None,
    )  # fmt: skip
    torch.testing.assert_close(out, decode(batch, q), rtol=0, atol=0)
    for causal in ((True,), ()):  # before 0.5.19 not even that was said
        out.zero_()
        torch.ops.sgl_kernel.extend_attention_cpu(
            q, None, None, out, batch.k, batch.v, batch.table, batch.rows, batch.seq_lens(),
            torch.ones(2, dtype=torch.int64), torch.arange(2), 1, 0.3, 0.0, False, 0, None, None, None, *causal,
        )  # fmt: skip
        torch.testing.assert_close(out, decode(batch, q), rtol=0, atol=1e-6)


# --- slots
# -----------------------------------------------------------------------------------------------------


def table(requests: int = 4, width: int = 20) -> Tensor:
    """Distinct slots everywhere, so that a misplaced copy cannot go unseen."""
    return torch.randperm(requests * width).to(torch.int32).view(requests, width)


@pytest.mark.parametrize("spans", [[(3, 7), (0, 0), (5, 20)], [(2, 2)], []])
def test_slots_of_spans_are_packed_and_put_back(spans: list[tuple[int, int]]) -> None:
    pool = table()
    rows = torch.tensor([2, 0, 3][: len(spans)], dtype=torch.int64)
    start = torch.tensor([span[0] for span in spans], dtype=torch.int32)
    end = torch.tensor([span[1] for span in spans], dtype=torch.int32)
    want = [int(pool[row, column]) for row, span in zip(rows, spans, strict=True) for column in range(*span)]
    out = torch.full((len(want) + 2,), -1, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, pool, start, end, out, pool.shape[1])
    assert out.tolist() == [*want, -1, -1]
    emptied = torch.full_like(pool, -1)
    kernels.assign_req_to_token_pool_cpu(rows, emptied, start, end, out, pool.shape[1])
    for row, span in zip(rows, spans, strict=True):
        assert emptied[row, slice(*span)].tolist() == pool[row, slice(*span)].tolist()
    assert int((emptied >= 0).sum()) == len(want)


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (4, 2)])
def test_draft_slots_follow_the_last_token_and_branches_read_their_own(topk: int, steps: int) -> None:
    pool = table()
    rows, lengths = torch.tensor([3, 1]), torch.tensor([5, 11])
    out = torch.empty(2 * topk * steps, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, pool, lengths, out, pool.shape[1], topk, steps)
    drafts = [pool[row, n : n + topk * steps].tolist() for row, n in zip(rows, lengths.tolist(), strict=True)]
    assert out.tolist() == drafts[0] + drafts[1]
    branches = kernels.build_draft_decode_metadata_cpu(pool, rows, lengths, topk, steps, pool.shape[1])
    assert branches.shape == (2 * topk, pool.shape[1])
    assert branches.dtype == pool.dtype
    for request, length in enumerate(lengths.tolist()):
        for branch in range(topk):
            want = pool[rows[request], :length].tolist() + drafts[request][branch * steps : (branch + 1) * steps]
            got = branches[request * topk + branch]
            assert got[: length + steps].tolist() == want
            assert not got[length + steps :].any()


def test_the_bonus_token_is_the_last_accepted() -> None:
    accepted = torch.arange(12, dtype=torch.int32).view(3, 4)
    bonus = torch.empty(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(accepted, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_slots_of_accepted_tokens_are_packed() -> None:
    accept_index = torch.tensor([[0, 2, -1], [-1, -1, -1], [5, -1, -1]], dtype=torch.int32)
    out = torch.full((9,), -7, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(100, 109), out)
    assert out.tolist() == [100, 102, 105, *[-7] * 6]


@pytest.mark.parametrize("select", [None, [1, 2, 4]])
def test_ids_move_one_to_the_left(select: list[int] | None) -> None:
    ids = torch.tensor([10, 11, 12, 20, 30, 31])
    start, lengths = torch.tensor([0, 3, 4]), torch.tensor([3, 0, 2])
    kernels.rotate_input_ids_cpu(
        ids, start, lengths, torch.tensor([[7], [8], [9]]), None if select is None else torch.tensor(select)
    )
    assert ids.tolist() == ([11, 12, 7, 20, 31, 9] if select is None else [11, 7, 12, 20, 9, 31])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_rows_move_in_every_layer_and_may_overlap(dtype: Any) -> None:
    buffers = [torch.randn(10, 2, 4).to(dtype), torch.randn(10, 3).to(dtype)]
    want = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9])
    for buffer in want:
        buffer[target] = buffer[source].clone()
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    kernels.copy_all_layer_kv_cache_cpu(addresses, strides, target[:0], source[:0])
    assert all(torch.equal(got, wanted) for got, wanted in zip(buffers, want, strict=True))


# --- trees
# -----------------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """A tree by the parent of each node; node 0 is the root."""

    parents: list[int]
    tokens: list[int]

    def ancestors(self, node: int) -> list[int]:
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return path

    def children(self, node: int) -> list[int]:
        return [child for child in range(1, len(self.parents)) if self.parents[child] == node]


def random_candidates(topk: int, steps: int, kept: int) -> tuple[Tensor, Tensor, list[int]]:
    """What SGLang's draft loop hands over: parents of branches, candidates kept; and parents of nodes.

    Candidates are numbered step by step: ``topk`` in the first, then ``topk`` children of each of the
    ``topk`` branches.
    """
    branch_of, parent_of = [-1], dict.fromkeys(range(topk), -1)
    alive = list(range(topk))
    for step in range(1, steps):
        branch_of += alive
        first = topk + topk * topk * (step - 1)
        for branch, candidate in enumerate(alive):
            parent_of |= {first + branch * topk + child: candidate for child in range(topk)}
        alive = [first + int(i) for i in torch.randperm(topk * topk)[:topk]]
    chosen: set[int] = set()
    while len(chosen) < kept:
        candidate = int(torch.randint(len(parent_of), ()))
        if parent_of[candidate] == -1 or parent_of[candidate] in chosen:
            chosen.add(candidate)
    selected = sorted(chosen)
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)} | {-1: 0}
    return torch.tensor(branch_of), torch.tensor(selected), [-1] + [node_of[parent_of[c]] for c in selected]


def build(
    parent_list: Tensor, selected: Tensor, lengths: list[int], topk: int, steps: int, mode: int = 1
) -> dict[str, Tensor]:
    batch, nodes = len(lengths), selected.shape[1] + 1
    links = torch.full((3, batch, nodes), -1)
    built = {
        "mask": torch.ones(batch * nodes * nodes, dtype=torch.bool),
        "positions": torch.empty(batch * nodes, dtype=torch.int64),
        "index": links[0],
        "child": links[1],
        "sibling": links[2],
    }
    kernels.build_tree_kernel_efficient_cpu(
        parent_list,
        selected,
        torch.tensor(lengths, dtype=torch.int64),
        *built.values(),
        topk,
        steps,
        nodes,
        mode,
    )
    return built


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (4, 3, 8), (4, 1, 3), (2, 5, 12), (8, 2, 20)])
def test_a_tree_is_linked_as_its_parents_say(topk: int, steps: int, nodes: int) -> None:
    lengths = [3, 50, 11]
    drawn = [random_candidates(topk, steps, nodes - 1) for _ in lengths]
    built = build(
        torch.stack([d[0] for d in drawn]) if steps > 1 else torch.empty(3, 0, dtype=torch.int64),
        torch.stack([d[1] for d in drawn]),
        lengths,
        topk,
        steps,
    )
    mask = built["mask"].view(3, nodes, nodes)
    positions = built["positions"].view(3, nodes)
    for request, (_, _, parents) in enumerate(drawn):
        tree = Tree(parents, [])
        assert built["index"][request].tolist() == list(range(request * nodes, (request + 1) * nodes))
        for node in range(nodes):
            path = tree.ancestors(node)
            assert mask[request, node].nonzero().flatten().tolist() == sorted(path)
            assert int(positions[request, node]) == lengths[request] + len(path) - 1
            linked, child = [], int(built["child"][request, node])
            while child != -1:
                linked.append(child)
                child = int(built["sibling"][request, child])
            assert linked == tree.children(node)


def test_a_node_without_its_parent_is_linked_to_nothing() -> None:
    # Candidate 4 grew on branch 1, from candidate 1, which was not kept.
    built = build(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), [9], topk=2, steps=2)
    assert built["child"].tolist() == [[1, -1, -1]]
    assert built["sibling"].tolist() == [[-1, -1, -1]]
    assert built["mask"].view(3, 3)[1].tolist() == [True, True, False]


@pytest.mark.parametrize("mode", [0, 2])
def test_other_tree_masks_are_refused(mode: int) -> None:
    with pytest.raises(NotImplementedError, match=f"not mode {mode}"):
        build(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1]]), [9], topk=2, steps=2, mode=mode)


# --- verification
# ----------------------------------------------------------------------------------------------


def links(trees: list[Tree]) -> dict[str, Tensor]:
    nodes = len(trees[0].parents)
    child, sibling = torch.full((len(trees), nodes), -1), torch.full((len(trees), nodes), -1)
    for request, tree in enumerate(trees):
        for node in range(nodes):
            children = tree.children(node)
            if children:
                child[request, node] = children[0]
            for left, right in pairwise(children):
                sibling[request, left] = right
    return {
        "candidates": torch.tensor([tree.tokens for tree in trees]),
        "retrive_index": torch.arange(len(trees) * nodes).view(len(trees), nodes),
        "retrive_next_token": child,
        "retrive_next_sibling": sibling,
    }


def outputs(requests: int, nodes: int, longest: int) -> dict[str, Tensor]:
    return {
        "predicts": torch.full((requests * nodes,), -1, dtype=torch.int32),
        "accept_index": torch.full((requests, longest), -1, dtype=torch.int32),
        "accept_token_num": torch.empty(requests, dtype=torch.int32),
    }


#: Two children of the root share token 5's parent; node 4 hangs on node 2.
FORKED = Tree(parents=[-1, 0, 0, 1, 2], tokens=[9, 5, 6, 7, 8])


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([1, 1, 1, 1, 1], [0]),  # nothing accepted
        ([5, 1, 1, 1, 1], [0, 1]),
        ([6, 7, 8, 1, 2], [0, 2, 4]),  # by way of a sibling, to the end
        ([5, 7, 8, 3, 2], [0, 1, 3]),
    ],
)
def test_greedy_verification_follows_the_targets_choices(choices: list[int], path: list[int]) -> None:
    # A second request in front, so that flat numbers and node numbers differ.
    trees = [Tree(FORKED.parents, [0] * 5), FORKED]
    target = torch.tensor([[1] * 5, choices])
    out = outputs(2, 5, 3)
    kernels.verify_tree_greedy_cpu(**out, **links(trees), target_predict=target)
    assert out["accept_token_num"].tolist() == [0, len(path) - 1]
    assert out["accept_index"].tolist() == [[0, -1, -1], [5 + n for n in path] + [-1] * (3 - len(path))]
    want = [1, -1, -1, -1, -1] + [choices[node] if node in path else -1 for node in range(5)]
    assert out["predicts"].tolist() == want


def test_a_path_is_no_longer_than_the_room_for_it() -> None:
    chain = Tree(parents=[-1, 0, 1, 2], tokens=[9, 4, 4, 4])
    out = outputs(1, 4, 3)
    kernels.verify_tree_greedy_cpu(**out, **links([chain]), target_predict=torch.full((1, 4), 4))
    assert out["accept_token_num"].tolist() == [2]
    assert out["accept_index"].tolist() == [[0, 1, 2]]


def test_verifying_nothing_is_no_work() -> None:
    empty = torch.empty(0, 4, dtype=torch.int64)
    out = outputs(0, 4, 4)
    kernels.verify_tree_greedy_cpu(**out, candidates=empty, retrive_index=empty, retrive_next_token=empty,
                                   retrive_next_sibling=empty, target_predict=empty)  # fmt: skip


# --- sampling
# --------------------------------------------------------------------------------------------------


def test_the_greatest_score_is_found_and_the_smaller_id_of_equals() -> None:
    assert sampling.row_argmax(torch.tensor([[0.1, 0.9, 0.9], [2.0, 1.0, 0.0]])).tolist() == [1, 0]


def test_top_k_keeps_the_likeliest_words() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.3, 0.2]])
    got = sampling.top_k_renorm_prob(probs, torch.tensor([2, 1, 1 << 30], dtype=torch.int32))
    want = torch.tensor([[0, 4 / 7, 3 / 7, 0], [1, 0, 0, 0], [0.1, 0.4, 0.3, 0.2]])
    torch.testing.assert_close(got, want)


def test_top_p_keeps_the_fewest_words_that_reach_it() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 3)
    got = sampling.top_p_renorm_prob(probs, torch.tensor([0.5, 1e-6, 1.0]))
    torch.testing.assert_close(got, torch.tensor([[0, 4 / 7, 3 / 7, 0], [0, 1, 0, 0], [0.1, 0.4, 0.3, 0.2]]))


def texts(sample: Any, tree: Tree, target: Tensor, draft: Tensor | None, longest: int, draws: int = 10_000) -> Tensor:
    """Verifies ``draws`` copies of one tree at once; returns the first token committed by each."""
    nodes, words = target.shape
    out = outputs(draws, nodes, longest)
    one = links([tree])
    many = {name: tensor.expand(draws, -1).contiguous() for name, tensor in one.items()}
    many["retrive_index"] = torch.arange(draws * nodes).view(draws, nodes)
    if draft is not None:
        first = torch.multinomial(draft[0], draws, replacement=True)
        many["candidates"] = torch.stack([torch.zeros_like(first), first], dim=1)
    sample(
        **out,
        **many,
        uniform_samples=torch.rand(draws, nodes),
        uniform_samples_for_final_sampling=torch.rand(draws),
        target_probs=target.expand(draws, nodes, words),
        draft_probs=torch.zeros(1) if draft is None else draft.expand(draws, nodes - 1, words),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    assert (out["accept_index"][:, 0] == many["retrive_index"][:, 0]).all()
    assert bool((out["accept_token_num"] > 0).any())
    return out["predicts"].view(draws, nodes)[:, 0].long()


def assert_distributed(drawn: Tensor, probs: Tensor) -> None:
    """Frequencies within five standard errors of the probabilities."""
    seen = torch.bincount(drawn, minlength=probs.numel()) / drawn.numel()
    error = (probs * (1 - probs) / drawn.numel()).sqrt()
    assert ((seen - probs).abs() <= 5 * error + 1e-9).all()


def test_tree_sampling_draws_from_the_target() -> None:
    target = torch.tensor([[0.05, 0.35, 0.2, 0.0, 0.4], [0.2] * 5, [0.2] * 5, [0.2] * 5])
    # Token 3 is drafted though the target never says it.
    tree = Tree(parents=[-1, 0, 0, 0], tokens=[0, 3, 1, 2])
    assert_distributed(texts(sampling.tree_speculative_sampling_target_only, tree, target, None, 2), target[0])


def test_rejection_sampling_draws_from_the_target_whatever_the_draft() -> None:
    target = torch.tensor([[0.05, 0.35, 0.2, 0.0, 0.4], [0.2] * 5])
    draft = torch.tensor([[0.3, 0.1, 0.2, 0.3, 0.1]])
    chain = Tree(parents=[-1, 0], tokens=[0, 0])
    assert_distributed(texts(sampling.chain_speculative_sampling, chain, target, draft, 2), target[0])


@pytest.mark.parametrize(
    "sample", [sampling.tree_speculative_sampling_target_only, sampling.chain_speculative_sampling]
)
@pytest.mark.parametrize(("said", "accepted"), [([1, 2, 3, 4], 3), ([1, 2, 4, 4], 2), ([4, 2, 3, 4], 0)])
def test_sampling_from_a_certain_target_is_greedy(sample: Any, said: list[int], accepted: int) -> None:
    chain = Tree(parents=[-1, 0, 1, 2], tokens=[0, 1, 2, 3])
    out = outputs(1, 4, 4)
    certain = torch.nn.functional.one_hot(torch.tensor([said]), 5).float()
    sample(
        **out,
        **links([chain]),
        uniform_samples=torch.full((1, 4), 0.999),
        uniform_samples_for_final_sampling=torch.tensor([1 - 2**-24]),
        target_probs=certain,
        draft_probs=torch.full((1, 4, 5), 0.2),
    )
    assert out["accept_token_num"].tolist() == [accepted]
    assert out["predicts"][: accepted + 1].tolist() == said[: accepted + 1]


def test_verification_in_blocks_is_refused() -> None:
    chain = Tree(parents=[-1, 0], tokens=[0, 1])
    rest = {
        "uniform_samples": torch.zeros(1, 2),
        "uniform_samples_for_final_sampling": torch.zeros(1),
        "target_probs": torch.full((1, 2, 4), 0.25),
        "draft_probs": torch.full((1, 1, 4), 0.25),
    }
    with pytest.raises(NotImplementedError, match="no block verification"):
        sampling.chain_speculative_sampling(**outputs(1, 2, 2), **links([chain]), **rest, block_verification=True)
    with pytest.raises(NotImplementedError, match="leave both at 1"):
        sampling.chain_speculative_sampling(**outputs(1, 2, 2), **links([chain]), **rest, threshold_acc=0.5)


# --- the process
# -----------------------------------------------------------------------------------------------


def python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_support_imports_no_torch_and_no_sglang() -> None:
    code = "import sys, sglang_cpu_eagle; print([m for m in ('torch', 'sglang') if m in sys.modules])"
    assert python(code, cpu_environment(os.environ)) == "[]"


def test_the_environment_puts_the_shim_first_and_keeps_the_rest() -> None:
    before = {"PYTHONPATH": os.pathsep.join(["/one", "/two"]), "HOME": "/home"}
    after = cpu_environment(before)
    paths = after["PYTHONPATH"].split(os.pathsep)
    assert paths[0].endswith("shim")
    assert paths[-2:] == ["/one", "/two"]
    assert after["HOME"] == "/home"
    assert after["SGLANG_USE_CPU_ENGINE"] == "1"
    assert before["PYTHONPATH"] == os.pathsep.join(["/one", "/two"])
    assert cpu_environment(after) == after
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in after


def test_each_rank_is_given_a_core_unless_the_user_gave_it_one() -> None:
    bound = cpu_environment({}, ranks=3)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(bound) == 3
    assert {int(core) for core in bound} <= set(range(os.cpu_count() or 1))
    given = {"SGLANG_CPU_OMP_THREADS_BIND": "4|5"}
    assert cpu_environment(given, ranks=2)["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5"


def test_a_kernel_that_is_not_there_says_so_when_called() -> None:
    code = (
        "import sgl_kernel\n"
        "from sgl_kernel import moe_sum\n"
        "print(hasattr(sgl_kernel, '__wrapped__'))\n"
        "try:\n    moe_sum(1)\nexcept NotImplementedError as error:\n    print(error)\n"
    )
    first, second = python(code, cpu_environment(os.environ)).splitlines()
    assert first == "False"
    assert second.startswith("SGLang called sgl_kernel.moe_sum, which eagle-trace does not provide on a CPU")


def test_nothing_is_installed_into_a_process_that_does_not_run_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert not install()
