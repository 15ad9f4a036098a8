"""A recording of a drafter that a server calls once per round, and that then drafts a chain by itself.

One proposal is one call of the drafter: a first forward over the rows that the target has just computed, and then one
row per request for each further draft token. Rows behind those that were accepted are leftovers of rejected tokens. The
processes that run it are told of requests when they begin, and find out themselves what was sampled for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_serving.batches import Batch
from eagle_trace_serving.recording import Recording

Ints = NDArray[np.int64]
#: what was sampled for one request: its id, the tokens kept, the drafts verified, the target's choice behind each row
Sampled = tuple[str, Sequence[int], Sequence[int], Sequence[int]]


@dataclass
class AnnouncedRequest:
    """A request as a server announced it to the processes that run the draft (`batches.ServedRequest`).

    Attributes:
        rid: what its client calls it.
        prompt_ids: token ids.
        longest: tokens that prompt and answer may have together.
        sampled: what was sampled while it was recorded; may go past the answer's end.
        computed: tokens of it that are computed when the step that goes on is done.
        ended: whether the server let go of it.
    """

    rid: str
    prompt_ids: Sequence[int]
    longest: int
    sampled: list[int] = field(default_factory=list)
    computed: int = 0
    ended: bool = False
    has_media: bool = False

    @property
    def answer_ids(self) -> Sequence[int]:
        """Tokens of its answer so far."""
        return self.cut()[0]

    @property
    def finish_reason(self) -> str | None:
        """Why its answer ended; None as long as it goes on."""
        return self.cut()[1]

    def text(self, _prompt_ids: list[int], _answer_ids: list[int]) -> str:
        """Nothing: there is no tokenizer where the draft runs."""
        return ""

    def cut(self) -> tuple[list[int], str | None]:
        """Its answer, and why it ended; None as long as it goes on. A server has rules of its own for that."""
        raise NotImplementedError


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


class ChainRecording(Recording):
    """A recording of such a drafter.

    Args:
        given, named: those of `Recording`.
        longest: tokens that prompt and answer may have together.
        before: sites of the first forward that are computed before it begins.
    """

    def __init__(self, *given: Any, longest: int, before: Collection[str] = (), **named: Any) -> None:
        super().__init__(*given, **named)
        self._longest, self._before = longest, before
        self._proposal: Proposal | None = None
        #: forwards of the proposal so far, rows of the one that goes on, and what was computed before the first
        self._step, self._rows = 0, 0
        self._early: dict[str, Any] = {}

    def take_sampled(self, each: Iterable[Sampled]) -> None:
        """The target has chosen tokens for some requests."""
        for one in each:
            self.sampled(*one)

    def sampled(self, rid: str, kept: Sequence[int], proposed: Sequence[int], best: Sequence[int]) -> None:
        """The target has chosen tokens for a request.

        Args:
            rid: the request.
            kept: what it committed: accepted drafts, and a token of its own.
            proposed: the drafts that it verified, if any.
            best: the token it would choose behind each row, if that is known.
        """
        request = self.request(rid)
        if not isinstance(request, AnnouncedRequest):
            return
        known = [*request.prompt_ids, *request.sampled]
        if request.computed < len(known):
            return  # in the middle of its prefill: what is sampled there is dropped
        if proposed:
            tree = {"proposed": list(proposed), "parents": list(range(len(proposed))), "target_argmax": list(best)}
            self.close_round(rid, len(known) - 2, known[-1], kept, tree)
        else:
            self.commit(rid, len(known), kept)
        request.sampled += kept

    # ---- the forwards of one proposal -------------------------------------------------------------------------

    def open_proposal(self, proposal: Proposal) -> None:
        """The drafter is called; its first forward's features come next."""
        self.open_call(None)
        self._step, self._early = 0, {}
        self._proposal = proposal if self.is_recorded(proposal.rids) else None

    def forward(self, input_ids: Any, positions: Any) -> None:
        """The draft runs: at first on all rows of the proposal, then on one row per request."""
        proposal = self._proposal
        if proposal is None:
            return
        self.close_call()  # where the step before computed no logits
        first = self._step == 0
        # the server may pad it with more
        self._rows = int(proposal.lengths.sum()) if first else len(proposal.rids)
        # a draft that would run past the longest context is fed some place again, or none: no data
        fits = proposal.roots + self._step < self._longest
        tensors = {
            "input_ids": input_ids.reshape(-1)[: self._rows],
            "positions": positions,
            "seq_lens": proposal.ends if first else proposal.roots + 1,
            "extend_lens": proposal.lengths if first else None,
            "accept_lens": proposal.kept if first else None,
        }
        early, self._early = self._early, {}
        features = early.pop("fused", None)
        batch = Batch(
            kind="extend" if first else "step",
            mode="EXTEND" if first else "DECODE",
            rids=[rid if ok else "" for rid, ok in zip(proposal.rids, fits, strict=True)],
            rows=self._rows,
            tensors=tensors,
            features=None if features is None else features[: self._rows],
            lengths=proposal.lengths.tolist() if first else [1] * len(proposal.rids),
            picked=proposal.last_rows if first else None,
        )
        self.open_call(batch)
        self._step += 1
        for site, tensor in early.items():
            self.capture(site, tensor)

    def capture(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site; with the logits, a forward is over."""
        if self._proposal is not None and site in self._before and self._step == 0:
            self._early[site] = tensor.detach().clone()
            return
        super().capture(site, tensor[: self._rows])
        if site == "logits":
            self.close_call()

    def close_proposal(self) -> None:
        """The drafter is done; where no draft was asked for, it has run its model all the same, for the keys."""
        self.close_call()
        self._proposal = None
