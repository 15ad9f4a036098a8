"""What differs between vLLM's two model runners: how a proposal is told, and what was sampled.

V1 (`v1/worker/gpu_model_runner.py`) has a `drafter` that proposes by keyword; V2 (`v1/worker/gpu/model_runner.py`, the
default on GPUs) a `speculator` that proposes by position. Both verify all drafts of a request in one forward, whose
rows the first draft forward runs over as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.hooks import Hooks
from eagle_trace_serving.chains import ChainRecording, Proposal, Sampled
from eagle_trace_vllm.asking import request_id


def drafter_of(runner: Any) -> Any:
    """The part of a model runner that drafts, None if there is none."""
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def generation(runner: Any) -> str:
    """Which model runner it is."""
    return "V1" if hasattr(runner, "drafter") else "V2"


def hook_runner(hooks: Hooks, runner: Any, recording: ChainRecording) -> None:
    """Tell a recording what was sampled, and when a proposal begins and ends."""
    drafter, first = drafter_of(runner), generation(runner) == "V1"
    if first:
        _hook_sampling(hooks, runner, recording)

    def opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if first:
            recording.open_proposal(proposal_v1(runner, kwargs))
        elif not kwargs.get("dummy_run"):
            recording.take_sampled(sampled_v2(args, kwargs))
            recording.open_proposal(proposal_v2(args, kwargs))

    hooks.precede(drafter, "propose", opened)
    hooks.wrap(drafter, "propose", lambda *_: recording.close_proposal())


def proposal_v1(runner: Any, kwargs: Mapping[str, Any]) -> Proposal:
    """What V1's drafter is called for; vLLM changes these tensors later."""
    metadata = kwargs["common_attn_metadata"]
    edges = to_array(metadata.query_start_loc).astype(np.int64)[: metadata.num_reqs + 1]
    last = kwargs.get("token_indices_to_sample")
    # without it, rows of rejected tokens were cut out before
    last = edges[1:] - 1 if last is None else to_array(last).astype(np.int64)
    rids = [request_id(one) for one in runner.input_batch.req_ids[: metadata.num_reqs]]
    ends = to_array(metadata.seq_lens).astype(np.int64)[: len(rids)]
    return Proposal(rids, ends, np.diff(edges), last - edges[:-1] + 1)


def _hook_sampling(hooks: Hooks, runner: Any, recording: ChainRecording) -> None:
    # penalties change the logits in place: the target's choice is asked for before
    best: list[Any] = []

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        best[:] = [_best(args[0] if args else kwargs["logits"])]

    def after(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not best:  # the recording began while this was sampled
            return
        verified = args[1] if len(args) > 1 else kwargs.get("spec_decode_metadata")
        recording.take_sampled(sampled_v1(runner, result, verified, best.pop()))

    hooks.precede(runner, "_sample", before)
    hooks.wrap(runner, "_sample", after)


def _best(logits: Any) -> Any:
    return to_array(logits.argmax(dim=-1))


def sampled_v1(runner: Any, result: Any, verified: Any, best: Any) -> Iterator[Sampled]:
    """What V1 sampled; a rejected place holds -1."""
    rids = list(runner.input_batch.req_ids)
    tokens = to_array(result.sampled_token_ids)
    counts = [0] * len(rids) if verified is None else list(verified.num_draft_tokens)
    drafts = [] if verified is None else to_array(verified.draft_token_ids).tolist()
    at = 0
    for b, rid in enumerate(rids):
        n = int(counts[b])
        row = at + b  # one row for each draft and one more per request
        yield (
            request_id(rid),
            [int(token) for token in tokens[b] if token >= 0],
            drafts[at : at + n],
            best[row : row + n + 1].tolist(),
        )
        at += n


def _batch_v2(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """The batch, the counts of sampled and rejected tokens, and the token sampled last, of V2's `propose`."""
    names = ("input_batch", "num_sampled", "num_rejected", "last_sampled")
    places = (0, 5, 6, 7)
    batch, sampled, rejected, last = (
        kwargs[name] if name in kwargs else args[place] for name, place in zip(names, places, strict=True)
    )
    return batch, sampled, rejected, last


def _edges(batch: Any) -> Any:
    return np.asarray(batch.query_start_loc_np[: batch.num_reqs + 1]).astype(np.int64)


def proposal_v2(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Proposal:
    """What V2's speculator is called for."""
    batch, _, rejected, _ = _batch_v2(args, kwargs)
    lengths = np.diff(_edges(batch))
    ends = to_array(batch.seq_lens).astype(np.int64)[: batch.num_reqs]
    kept = lengths - to_array(rejected).astype(np.int64)[: batch.num_reqs]
    return Proposal([request_id(one) for one in batch.req_ids[: batch.num_reqs]], ends, lengths, kept)


def sampled_v2(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sampled]:
    """What V2 sampled: the first drafts of each request, and the token behind them."""
    batch, sampled, _, last = _batch_v2(args, kwargs)
    edges, ids = _edges(batch), to_array(batch.input_ids)
    counts = to_array(sampled).astype(np.int64)
    own = to_array(last).reshape(-1)[to_array(batch.idx_mapping)[: batch.num_reqs]]
    drafts = batch.num_draft_tokens_per_req
    for b, rid in enumerate(batch.req_ids[: batch.num_reqs]):
        n = 0 if drafts is None else int(drafts[b])
        proposed = ids[edges[b] + 1 : edges[b] + 1 + n].tolist()
        if counts[b] > 0:
            yield request_id(rid), [*proposed[: int(counts[b]) - 1], int(own[b])], proposed, []
