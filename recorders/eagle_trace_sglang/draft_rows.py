"""Which rows of a draft call are data, and what their keys are.

Works on plain arrays, so that every batch shape can be tested without a server. SGLang's calls, row by row (n draft
tokens a request, B requests):

- EXTEND (prefill): the rows of every request one after another; row at position p pairs feature g_p with token x_{p+1}.
- DECODE (draft step): B x topk rows; root = seq_len - 1, step = position - root.
- DRAFT_EXTEND_V2 (after verify): B x n rows; the first `accept_len` of each request are the accepted path, the rest
  is leftover of rejected tokens and no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows

Ints = NDArray[np.integer]
Index = NDArray[np.intp]


@dataclass(frozen=True)
class DraftCall:
    """What one forward of the draft was given, as host arrays.

    Attributes:
        mode: name of SGLang's forward mode.
        rids: request ids [B].
        input_ids: tokens fed [T].
        positions: rotary positions [T].
        seq_lens: sequence lengths [B] (in DECODE: before the draft's own tokens).
        extend_lens: rows of each request [B] (EXTEND and DRAFT_EXTEND_V2).
        accept_lens: rows that are data of each request [B] (DRAFT_EXTEND_V2).
    """

    mode: str
    rids: Sequence[str]
    input_ids: Ints
    positions: Ints
    seq_lens: Ints
    extend_lens: Ints | None = None
    accept_lens: Ints | None = None

    @property
    def last_rows(self) -> Index:
        """Index of the last row of each request, the only ones that get logits in EXTEND [B]."""
        if self.extend_lens is None:
            raise ValueError(f"{self.mode} has no extend lengths")
        return np.cumsum(self.extend_lens).astype(np.intp) - 1


@dataclass
class _Branch:
    """One branch of a request's draft: tokens fed below the root, and which branch each of them was fed in."""

    path: tuple[int, ...]
    lineage: tuple[int, ...]


@dataclass
class _Request:
    prompt_id: int
    rounds: int = 0
    root: int = -1
    tokens: dict[int, int] = field(default_factory=dict)
    branches: list[_Branch] = field(default_factory=list)


class RowTracker:
    """Follows every admitted request over its calls and turns each call into `Rows`.

    Calls of other requests (warm-up, other users) are no data.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._left: dict[str, _Request] = {}
        self._parents: Ints | None = None

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
        """First position of a request that was computed; those before it came from a prefix cache. 0 before any was."""
        # a copy: the scheduler's thread may still add to it
        return min(list(self._any(rid).tokens), default=0)

    def committed(self, rid: str, prompt: Sequence[int]) -> list[int]:
        """`prompt` and every token the server committed behind it, also those past the end of its answer."""
        tokens = self._any(rid).tokens
        ids = list(prompt)
        while len(ids) - 1 in tokens:
            ids.append(tokens[len(ids) - 1])
        return ids

    def _any(self, rid: str) -> _Request:
        """What is known of a request, whether it goes on or has ended."""
        return self._requests[rid] if rid in self._requests else self._left[rid]

    def close_round(self, rid: str) -> int:
        """Count a verify round of a request and return its number, from 1."""
        request = self._requests[rid]
        request.rounds += 1
        return request.rounds

    def select_branches(self, parents: Ints | None) -> None:
        """Take note of which branch each row of the next DECODE call descends from: [B, topk], None at step 1."""
        self._parents = parents

    def rows(self, call: DraftCall, call_id: int) -> tuple[Rows, Index]:
        """Keys of the rows of `call` that are data, and their index into the call's T rows."""
        if call.mode == "DECODE":
            return self._decode(call, call_id)
        return self._extend(call, call_id)

    def _extend(self, call: DraftCall, call_id: int) -> tuple[Rows, Index]:
        if call.extend_lens is None:
            raise ValueError(f"{call.mode} has no extend lengths")
        kept, prompt_ids, rounds = [], [], []
        start = 0
        for b, rid in enumerate(call.rids):
            length = int(call.extend_lens[b])
            if rid in self._requests:
                request = self._requests[rid]
                data = length if call.accept_lens is None else int(call.accept_lens[b])
                # a request that had to give up its memory is computed again from its first token on
                at = np.array(
                    [row for row in range(start, start + data) if int(call.positions[row]) not in request.tokens],
                    dtype=np.intp,
                )
                kept.append(at)
                request.tokens |= zip(call.positions[at].tolist(), call.input_ids[at].tolist(), strict=True)
                prompt_ids += [request.prompt_id] * len(at)
                rounds += [request.rounds] * len(at)
            start += length
        index = np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)
        positions = call.positions[index].astype(np.int32)
        rows = Rows.build(
            prompt_id=np.asarray(prompt_ids, dtype=np.int32),
            root=positions,
            step=np.zeros(len(index), dtype=np.int32),
            round=np.asarray(rounds, dtype=np.int32),
            call_id=call_id,
            token_id=call.input_ids[index].astype(np.int32),
            position=positions,
        )
        return rows, index

    def _decode(self, call: DraftCall, call_id: int) -> tuple[Rows, Index]:
        topk = len(call.input_ids) // max(1, len(call.rids))
        index, prompt_ids, rounds, roots, steps, paths, own = [], [], [], [], [], [], []
        for b, rid in enumerate(call.rids):
            if rid not in self._requests:
                continue
            request = self._requests[rid]
            root = int(call.seq_lens[b]) - 1
            branches = range(b * topk, (b + 1) * topk)
            step = int(call.positions[branches[0]]) - root
            self._grow(request, root, step, [int(call.input_ids[row]) for row in branches], b)
            for k, row in enumerate(branches):
                branch = request.branches[k]
                index.append(row)
                paths.append(branch.path)
                # SGLang keeps one run of key slots a branch, so a row attends to what *its branch* fed at earlier
                # steps; that is its own ancestry only if every ancestor sat in the same branch
                own.append(all(ancestor == k for ancestor in branch.lineage))
            prompt_ids += [request.prompt_id] * topk
            rounds += [request.rounds + 1] * topk
            roots += [root] * topk
            steps += [step] * topk
        self._parents = None
        picked = np.asarray(index, dtype=np.intp)
        rows = Rows.build(
            prompt_id=prompt_ids,
            root=roots,
            step=steps,
            round=np.asarray(rounds, dtype=np.int32),
            call_id=call_id,
            token_id=call.input_ids[picked].astype(np.int32),
            position=call.positions[picked].astype(np.int32),
            path=paths,
            own_path=own,
        )
        return rows, picked

    def _grow(self, request: _Request, root: int, step: int, tokens: list[int], b: int) -> None:
        """Append one draft step to the request's branches."""
        if step == 1:
            request.root = root
            request.branches = [_Branch((token,), (k,)) for k, token in enumerate(tokens)]
            return
        known = bool(request.branches) and request.root == root and len(request.branches[0].path) == step - 1
        if not known or len(request.branches) != len(tokens):
            raise ValueError(f"draft step {step} at root {root} does not follow the step before it")
        if len(tokens) == 1:
            parents = [0]
        elif self._parents is None:
            raise ValueError(f"draft step {step} came without the choice of branches")
        else:
            parents = [int(parent) for parent in self._parents[b]]
        request.branches = [
            _Branch((*request.branches[parent].path, token), (*request.branches[parent].lineage, k))
            for k, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        ]


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
