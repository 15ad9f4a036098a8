"""What vLLM's model runner tells a recording: its requests, what was sampled for them, and each proposal's forwards.

One proposal is one call of the drafter: a first forward over the rows that the target has just computed, and then one
row per request for each further draft token. Rows behind those that were accepted are leftovers of rejected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_serving.draft_rows import DraftCall
from eagle_trace_serving.recording import Exchange, Recording
from eagle_trace_vllm.sites import BEFORE_FORWARD

Ints = NDArray[np.int64]


@dataclass
class Asked:
    """A request as vLLM announced it to its workers.

    Attributes:
        rid: what its client calls it.
        prompt: token ids.
        sampling: vLLM's `SamplingParams`.
        longest: tokens that prompt and answer may have together.
        answer: what was sampled while it was recorded; may go past the answer's end.
        computed: tokens of it that are computed when the step that goes on is done.
        ended: whether vLLM let go of it.
    """

    rid: str
    prompt: Sequence[int]
    sampling: Any
    longest: int
    answer: list[int] = field(default_factory=list)
    computed: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Proposal:
    """What the drafter is called for.

    Attributes:
        rids: the requests [B].
        ends: tokens of each request with those of this step, rejected ones among them [B].
        lengths: rows of each request in the first forward [B].
        kept: rows of each request that are data [B]: the first ones.
    """

    rids: Sequence[str]
    ends: Ints
    lengths: Ints
    kept: Ints

    @property
    def last_rows(self) -> NDArray[np.intp]:
        """The row of each request that its drafts start from [B]."""
        return (np.cumsum(self.lengths) - self.lengths + self.kept - 1).astype(np.intp)

    @property
    def roots(self) -> Ints:
        """The root of each request's drafts [B]."""
        return self.ends - self.lengths + self.kept - 1


class VLLMRecording(Recording):
    """A recording of vLLM's drafter."""

    #: tokens that prompt and answer may have together
    longest = 0
    _proposal: Proposal | None = None
    #: forwards of the proposal so far, and what was computed before the first
    _step = 0
    _early: dict[str, Any]

    # ---- requests ---------------------------------------------------------------------------------------------

    def arrived(self, request: Asked) -> None:
        """A request was announced."""
        self._take(request.rid, request, request.prompt)

    def ended(self, request: Asked) -> None:
        """vLLM let go of a request."""
        request.ended = True
        self._leave(request.rid)

    def exchange(self, request: Asked) -> Exchange:
        """What is known of a request by now. vLLM cuts an answer in another process, by the rules that are its own."""
        said, sampling = list(request.answer), request.sampling
        stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())}
        least = sampling.min_tokens or 0
        end = next((n + 1 for n, token in enumerate(said) if token in stops and n + 1 > least), None)
        most = min(sampling.max_tokens or request.longest, request.longest - len(request.prompt))
        if end is not None and end <= most:
            return Exchange(request.prompt, said[:end], "stop")
        if len(said) >= most:
            return Exchange(request.prompt, said[:most], "length")
        # by a text to stop at, which a worker does not see, or by whoever gave it up
        return Exchange(request.prompt, said, ("stop" if sampling.stop else "abort") if request.ended else None)

    def sampled(self, rid: str, kept: Sequence[int], proposed: Sequence[int], best: Sequence[int]) -> None:
        """The target has chosen tokens for a request.

        Args:
            rid: the request.
            kept: what it committed: accepted drafts, and a token of its own.
            proposed: the drafts that it verified, if any.
            best: the token it would choose behind each row, if that is known.
        """
        request = self._requests.get(rid)
        if request is None or not self._goes_on(rid):
            return
        known = [*request.prompt, *request.answer]
        if request.computed < len(known):
            return  # in the middle of its prefill: what is sampled there is dropped
        if proposed:
            tree = {"proposed": list(proposed), "parents": list(range(len(proposed))), "target_argmax": list(best)}
            self._note(lambda: self._close_round(rid, len(known) - 2, known[-1], kept, tree))
        else:
            self._note(lambda: self._tracker.commit(rid, len(known), kept))
        request.answer += kept

    # ---- the forwards of one proposal -------------------------------------------------------------------------

    def open_proposal(self, proposal: Proposal) -> None:
        """The drafter is called; its first forward's features come next."""
        self._call, self._step = None, 0
        self._early: dict[str, Any] = {}
        self._proposal = proposal if self._is_recorded(proposal.rids) else None

    def forward(self, input_ids: Any, positions: Any) -> None:
        """The draft runs: at first on all rows of the proposal, then on one row per request."""
        proposal = self._proposal
        if proposal is None:
            return
        if self._call is not None:
            self.close_call()  # the step before computed no logits
        first, count = self._step == 0, self._proposal_rows()
        # a draft that would run past the longest context is fed some place again, or none: no data
        fits = proposal.roots + self._step < self.longest
        rids = [rid if ok else "" for rid, ok in zip(proposal.rids, fits, strict=True)]
        mode, keep = "EXTEND" if first else "DECODE", self._stage.keep
        ids, places = keep(input_ids.reshape(-1)[:count]), keep(positions)

        def facts() -> DraftCall:
            return DraftCall(
                mode=mode,
                rids=rids,
                input_ids=ids.array,
                positions=places.array,
                seq_lens=proposal.ends if first else proposal.roots + 1,
                extend_lens=proposal.lengths if first else None,
                accept_lens=proposal.kept if first else None,
            )

        picked = proposal.last_rows if first else np.arange(count, dtype=np.intp)
        lengths = proposal.lengths.tolist() if first else [1] * count
        self._begin_call(mode, rids, count, facts, picked=lambda: picked, lengths=lengths)
        self._step += 1
        for site, tensor in self._early.items():
            if site == "fused" and self._call is not None:
                self._call.take_features(tensor[:count])
            else:
                self.capture(site, tensor)
        self._early = {}

    def _proposal_rows(self) -> int:
        """Rows of the forward that is next; vLLM may pad it with more."""
        proposal = self._proposal
        return 0 if proposal is None else int(proposal.lengths.sum()) if self._step == 0 else len(proposal.rids)

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site; with the logits, a forward is over."""
        if self._call is None:
            if self._proposal is not None and site in BEFORE_FORWARD and self._step == 0:
                self._early[site] = tensor.detach().clone()
            return
        super().capture(site, tensor[: self._call.tokens])
        if site == "logits":
            self.close_call()

    def close_proposal(self) -> None:
        """The drafter is done; where no draft was asked for, it has run its model all the same, for the keys."""
        if self._call is not None:
            self.close_call()
        self._proposal = None
