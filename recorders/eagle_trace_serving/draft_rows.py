"""Which rows of a draft call are data, and what their keys are.

Works on plain arrays, so that every batch shape can be tested without a server. A server's calls, row by row (n draft
tokens per request, B requests):

- extend, of a prompt: the rows of every request one after another; the first has root seq_len - extend_len, and the row
  at root p pairs feature g_p with token x_{p+1}.
- step: B x topk rows; the s-th such call after an extend is step s, below the root of the request's last accepted row.
- extend, after a verify round: the rows of every request one after another, n of each where nothing was cut off; the
  first accepted ones of each are the accepted path and go on behind the root that was verified, the rest is leftover of
  rejected tokens and no data.

Keys come from the engine's bookkeeping alone: lengths, accepted counts, the number of calls, the choice of branches.
Positions and tokens are data. An engine may have them wrong, and that is for the comparison to find: no value of them
changes a key or ends a recording. Rows that the bookkeeping itself does not place are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Int32, Rows

#: what a forward of the draft is: see above
CallKind = Literal["extend", "step"]

Ints = NDArray[np.integer]
Index = NDArray[np.intp]

#: a root that a trace can hold, with room for the rows behind it
_FARTHEST = 1 << 30
#: why rows are left out: what the engine's own bookkeeping lacks or contradicts
NO_LENGTHS = "the lengths of a forward do not fit its rows"
NO_BRANCHES = "a draft step of a tree does not say which branches it goes on from"
#: what is noted of rows that are kept
OTHER_LENGTHS = "the forward's own sequence lengths or accepted counts are not those that the server committed"


@dataclass(frozen=True)
class DraftCall:
    """What one forward of the draft was given, as host arrays.

    Attributes:
        kind: which of the calls above it is.
        rids: request ids [B].
        input_ids: tokens fed [T].
        positions: rotary positions [T].
        seq_lens: sequence lengths [B]: with the rows of an extend, and before the draft's own tokens in a step.
        extend_lens: rows of each request [B], in an extend.
        accept_lens: rows that are data of each request [B], in an extend after a verify round.
    """

    kind: CallKind
    rids: Sequence[str]
    input_ids: Ints
    positions: Ints
    seq_lens: Ints
    extend_lens: Ints | None = None
    accept_lens: Ints | None = None

    @property
    def last_rows(self) -> Index:
        """Index of the last row of each request, the only ones that get logits when a prompt is extended [B]."""
        if self.extend_lens is None:
            raise ValueError(f"a call of kind {self.kind} has no extend lengths")
        return np.cumsum(self.extend_lens).astype(np.intp) - 1


@dataclass(frozen=True)
class _Branch:
    """One branch of a request's draft: tokens drafted below the root, and which branch each of them sat in."""

    path: tuple[int, ...] = ()
    lineage: tuple[int, ...] = ()


_ROOT = _Branch()


@dataclass
class _Request:
    """What is known of a request.

    Attributes:
        prompt_id: its number.
        rounds: verify rounds so far.
        end: first root that has no step-0 row yet; None before its first forward.
        verified: root of a verify round and how many rows the extend behind it holds; None once that has run.
        fed: token fed to the step-0 row of each root.
        committed: token that the target committed at each place behind the prompt, as far as rounds tell.
        step: draft steps since the last extend.
        branches: the draft's branches; [] where nothing says what a further step goes on from.
    """

    prompt_id: int
    rounds: int = 0
    end: int | None = None
    verified: tuple[int, int] | None = None
    fed: dict[int, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    step: int = 0
    branches: list[_Branch] = field(default_factory=list)


@dataclass
class _Keys:
    """Keys of the rows of a call, column by column, as they are found."""

    index: list[int] = field(default_factory=list)
    prompt_id: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    path: list[tuple[int, ...]] = field(default_factory=list)
    own_path: list[bool] = field(default_factory=list)

    def add(
        self, row: int, request: _Request, root: int, round_: int, branch: _Branch = _ROOT, own: bool = True
    ) -> None:
        """One row of the call."""
        self.index.append(row)
        self.prompt_id.append(request.prompt_id)
        self.root.append(root)
        self.step.append(len(branch.path))
        self.round.append(round_)
        self.path.append(branch.path)
        self.own_path.append(own)

    def rows(self, call: DraftCall, call_id: int) -> tuple[Rows, Index]:
        """The rows, and their index into the call's."""
        index = np.asarray(self.index, dtype=np.intp)
        rows = Rows.build(
            prompt_id=self.prompt_id,
            root=self.root,
            step=self.step,
            round=np.asarray(self.round, dtype=np.int32),
            call_id=call_id,
            token_id=_int32(call.input_ids)[index],
            position=_int32(_one_each(call.positions, len(call.input_ids)))[index],
            path=self.path,
            own_path=self.own_path,
        )
        return rows, index


class RowTracker:
    """Follows every admitted request over its calls and turns each call into `Rows`.

    Calls of other requests (warm-up, other users) are no data.

    Attributes:
        left_out: rows that could not be placed, by reason.
        noted: forwards of a request that were placed although something about them is odd, by what it is.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self._requests: dict[str, _Request] = {}
        self._left: dict[str, _Request] = {}
        self._parents: Ints | None = None
        self._drafted: Ints | None = None

    def admit(self, rid: str, prompt_id: int) -> None:
        """Follow request `rid` from its first call on, as prompt `prompt_id`."""
        self._requests[rid] = _Request(prompt_id)

    def leave(self, rid: str) -> None:
        """Request `rid` has ended: calls under its id are those of another request from now on."""
        if rid in self._requests:
            self._left[rid] = self._requests.pop(rid)

    def __contains__(self, rid: str) -> bool:
        """Whether a request is recorded and has not ended."""
        return rid in self._requests

    def prompt_id(self, rid: str) -> int:
        """Prompt id of a request that goes on."""
        return self._requests[rid].prompt_id

    def first_root(self, rid: str) -> int:
        """First root of a request that was computed; those before it came from a prefix cache. 0 before any was."""
        # a copy: the scheduler's thread may still add to it
        return min(list(self._any(rid).fed), default=0)

    @property
    def warnings(self) -> list[str]:
        """What a reader of the trace must know of rows left out and of odd ones kept, one sentence each."""
        lost = [f"{count} draft rows were left out: {why}" for why, count in self.left_out.items() if count]
        return lost + [f"{why} ({count} times)" for why, count in self.noted.items() if count]

    def committed(self, rid: str, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """`prompt`, `answer` and every token that the target committed behind it, also past the end of the answer.

        What the draft was fed is no evidence of it, but for the one token that the target chose behind the prompt if
        the answer does not have it yet.
        """
        request = self._any(rid)
        ids = [*prompt, *answer]
        if not answer and len(ids) not in request.committed and len(ids) - 1 in request.fed:
            ids.append(request.fed[len(ids) - 1])
        while len(ids) in request.committed:
            ids.append(request.committed[len(ids)])
        return ids

    def _any(self, rid: str) -> _Request:
        """What is known of a request, whether it goes on or has ended."""
        return self._requests[rid] if rid in self._requests else self._left[rid]

    def close_round(self, rid: str, root: int, tokens: Sequence[int]) -> int:
        """Take note of a verify round of a request and return its number, from 1.

        Args:
            rid: the request.
            root: root that the round drafted from.
            tokens: the token at place root + 1, which the round started from, and those it committed behind it.
        """
        request = self._requests[rid]
        request.rounds += 1
        request.verified = root, len(tokens) - 1
        request.committed |= enumerate(tokens, start=root + 1)
        return request.rounds

    def commit(self, rid: str, place: int, tokens: Sequence[int]) -> None:
        """Take note of tokens that the target committed from `place` on without a round."""
        request = self._requests[rid]
        request.verified = None
        request.committed |= enumerate(tokens, start=place)

    def select_branches(self, parents: Ints | None, drafted: Ints | None = None) -> None:
        """Take note of what the draft chose for the next step.

        Args:
            parents: which branch each row descends from [B, topk]; None at step 1, and for a chain.
            drafted: the tokens chosen, row by row [T]; None if that is not known.
        """
        self._parents, self._drafted = parents, drafted

    def rows(self, call: DraftCall, call_id: int) -> tuple[Rows, Index]:
        """Keys of the rows of `call` that are data, and their index into the call's T rows."""
        keys = self._step(call) if call.kind == "step" else self._extend(call)
        return keys.rows(call, call_id)

    def _extend(self, call: DraftCall) -> _Keys:
        keys, row = _Keys(), 0
        if call.extend_lens is None:
            self.left_out[NO_LENGTHS] += len(call.input_ids)
            return keys
        for b, rid in enumerate(call.rids):
            length = max(0, int(call.extend_lens[b]))
            if rid in self._requests:
                self._extend_one(call, b, row, length, keys)
            row += length
        return keys

    def _extend_one(self, call: DraftCall, b: int, row: int, length: int, keys: _Keys) -> None:
        """The rows `row` .. `row + length` of a call, which are those of its b-th request."""
        request = self._requests[call.rids[b]]
        start = int(call.seq_lens[b]) - length
        data = length if call.accept_lens is None else int(call.accept_lens[b])
        if call.accept_lens is not None and request.verified is not None:
            # what was verified is known from the round itself: the forward's copy of it is data like any other
            root, count = request.verified
            self.noted[OTHER_LENGTHS] += (start, data) != (root + 1, count)
            start, data = root + 1, count
        placed = max(0, min(data, length, len(call.input_ids) - row)) if 0 <= start < _FARTHEST else 0
        self.left_out[NO_LENGTHS] += max(0, data - placed)
        for at in range(placed):
            # a request that had to give up its memory is computed again from its first token on
            if start + at not in request.fed:
                request.fed[start + at] = int(call.input_ids[row + at])
                keys.add(row + at, request, start + at, request.rounds)
        request.end, request.verified = (start + data if placed else None), None
        request.step, request.branches = 0, [_ROOT]

    def _step(self, call: DraftCall) -> _Keys:
        keys, count = _Keys(), len(call.input_ids)
        topk, rest = divmod(count, max(1, len(call.rids)))
        drafted = call.input_ids if self._drafted is None or len(self._drafted) != count else self._drafted
        drafted = _int32(drafted)
        for b, rid in enumerate(call.rids):
            if rid not in self._requests:
                continue
            request = self._requests[rid]
            request.step += 1
            root = int(call.seq_lens[b]) - 1
            if request.end is not None:
                self.noted[OTHER_LENGTHS] += root != request.end - 1
                root = request.end - 1
            rows = range(b * topk, (b + 1) * topk)
            fits = not rest and 0 <= root < _FARTHEST
            grown = self._grow(request, b, drafted[rows.start : rows.stop].tolist()) if fits else []
            self.left_out[NO_BRANCHES if fits else NO_LENGTHS] += topk - len(grown)
            request.branches = grown
            for k, branch in enumerate(grown):
                # a server keeps one run of key slots per branch, so a row attends to what *its branch* fed at earlier
                # steps; that is its own ancestry only if every ancestor sat in the same branch
                own = all(ancestor == k for ancestor in branch.lineage)
                keys.add(rows[k], request, root, request.rounds + 1, branch, own)
        self._parents = self._drafted = None
        return keys

    def _grow(self, request: _Request, b: int, tokens: list[int]) -> list[_Branch]:
        """The branches of a request after one more draft step; [] if nothing says what it goes on from."""
        if request.step == 1:
            return [_Branch((token,), (k,)) for k, token in enumerate(tokens)]
        known = len(request.branches)
        if known != len(tokens):
            return []
        if known == 1:
            parents = [0]
        elif self._parents is None or self._parents.ndim != 2 or len(self._parents) <= b:
            return []
        else:
            parents = [int(parent) for parent in self._parents[b]]
        if len(parents) != known or not all(0 <= parent < known for parent in parents):
            return []
        return [
            _Branch((*request.branches[parent].path, token), (*request.branches[parent].lineage, k))
            for k, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        ]


def _int32(values: Ints) -> Int32:
    """Values as a trace keeps them; what does not fit becomes the nearest that does."""
    limits = np.iinfo(np.int32)
    return np.clip(values, limits.min, limits.max).astype(np.int32)


def _one_each(positions: Ints, count: int) -> Ints:
    """One position a row, -1 where the call has none."""
    found = np.full(count, -1, dtype=np.int64)
    given = np.asarray(positions).reshape(-1)[:count]
    found[: len(given)] = given
    return found


def tree_parents(next_token: Ints, next_sibling: Ints) -> list[int]:
    """Parent node of every node of a draft tree given as first-child and next-sibling links; -1 for the root.

    Args:
        next_token: first child of each node, -1 for none [N].
        next_sibling: next sibling of each node, -1 for none [N].
    """
    parents = [-1] * len(next_token)
    for node in range(len(next_token)):
        child = int(next_token[node])
        while child != -1:
            parents[child] = node
            child = int(next_sibling[child])
    return parents
