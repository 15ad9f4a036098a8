"""Attention of recorded rows over recorded keys and values, with what a row is said to see as a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.replay.recorded import Recorded

Int = NDArray[np.int64]
Real = NDArray[Any]
#: keys and values a row sees [N, heads x size] each; None if one of them was not recorded
Seen = tuple[Real, Real] | None


@dataclass
class _Prompt:
    """Keys and values of one prompt: of step 0 by root, of later steps by (root, path)."""

    k: Real
    v: Real
    first: Int
    calls: NDArray[np.int32]
    later: dict[tuple[int, tuple[int, ...]], int]


@dataclass
class View:
    """What each row sees: step-0 keys up to its root, and those of its own path.

    Attributes:
        recorded: where keys and values are from.
        window: tokens a query sees, itself included; None for all.
        by_root: the window is counted from the root at every step (training masks so) and not from the row.
        stale: step-0 keys of a position are those of the draft step that guessed its token (a cache that was
            not refreshed after the verify round), by (prompt, root): the row that left them there.
        fresh_in_call: rows of one forward see each other's own keys all the same, as where attention takes the
            rows of the call itself from memory and only those before it from the cache.
        missing: keys and values of roots that this trace does not hold (a cached prefix), by prompt:
            (keys, values, roots).
        slots: whose key lies in the slot of a draft step, by step: that of another step of the same path, or None
            where the slot is not seen at all. A row sees its own step's place in the path it was written in.
        rounded: keys and values are seen as the host's cache keeps them (`Recorded.cache`).
        miscount: how many slots more than there are a row of each step sees, by step: behind its own there are zeros,
            since no row was written to them; below 0, how many of the last ones it does not see.
    """

    recorded: Recorded
    layer: str = "layer.0"
    window: int | None = None
    by_root: bool = True
    stale: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    fresh_in_call: bool = True
    missing: dict[int, tuple[Real, Real, Int]] = field(default_factory=dict)
    slots: dict[int, int | None] = field(default_factory=dict)
    rounded: bool = True
    miscount: dict[int, int] = field(default_factory=dict)
    _prompts: dict[int, _Prompt | None] = field(default_factory=dict)

    def prompt(self, number: int) -> _Prompt | None:
        """Keys and values of one prompt."""
        if number not in self._prompts:
            self._prompts[number] = self._read(number)
        return self._prompts[number]

    def _read(self, number: int) -> _Prompt | None:
        found = [self.recorded.of_prompt(name, number) for name in cached_sites(self.recorded, self.layer)]
        if found[0] is None or found[1] is None:
            return None
        (k, keys), (v, others) = found[0], found[1]
        if len(keys) != len(others) or not np.array_equal(keys.root, others.root):
            return None
        first = np.full(int(keys.root.max(initial=0)) + 1, -1, dtype=np.int64)
        # written backwards, so that of rows computed twice the first one counts
        at = np.flatnonzero(keys.step == 0)[::-1]
        first[keys.root[at]] = at
        later: dict[tuple[int, tuple[int, ...]], int] = {}
        paths = keys.paths()
        for row in np.flatnonzero(keys.step > 0):
            later.setdefault((int(keys.root[row]), paths[row]), int(row))
        return _Prompt(k, v, first, keys.call_id, later)

    def seen(self, prompt: int, root: int, path: tuple[int, ...], call: int) -> Seen:
        """Keys and values that the row (prompt, root, path), computed in a call, sees."""
        held = self.prompt(prompt)
        if held is None or root >= len(held.first):
            return None
        low = 0
        if self.window is not None:
            low = max(0, root + (0 if self.by_root else len(path)) - self.window + 1)
        index = held.first[low : root + 1].copy()
        for at in range(low, root):
            source = self.stale.get((prompt, at))
            together = self.fresh_in_call and index[at - low] >= 0 and held.calls[index[at - low]] == call
            if source is not None and source in held.later and not together:
                index[at - low] = held.later[source]
        own = [
            held.later.get((root, path[:holds]), -1)
            # a window shorter than the path leaves out the path's own first tokens too
            for step in range(max(1, low - root), len(path) + 1)
            if (holds := self._holds(step, len(path))) is not None
        ]
        index = np.concatenate([index, np.array(own, dtype=np.int64)])
        k, v = held.k[index], held.v[index]
        if (index < 0).any():
            lost = np.flatnonzero(index < 0)
            given = self.missing.get(prompt)
            if given is None or lost[-1] > root - low:
                return None
            place = np.searchsorted(given[2], lost + low)
            if (place >= len(given[2])).any() or (given[2][place] != lost + low).any():
                return None
            k[lost], v[lost] = given[0][place], given[1][place]
        if self.rounded and (cache := self.recorded.cache) is not None:
            # a draft step reads its own path's keys, too, from where they were just written
            here = (index >= 0) & (held.calls[index] == call) & (not path)
            k, v = cache.read(k, here), cache.read(v, here)
        more = self.miscount.get(len(path), 0)
        if more > 0:
            k, v = (np.concatenate([part, np.zeros((more, part.shape[1]), part.dtype)]) for part in (k, v))
        elif more < 0:
            # a row that sees nothing has no attention to recompute
            k, v = (part[: max(1, len(part) + more)] for part in (k, v))
        return k, v

    def _holds(self, step: int, deepest: int) -> int | None:
        """Which step's key a row at step `deepest` finds in the slot of `step`; what comes later is not there yet."""
        holds = self.slots.get(step, step)
        return step if holds is not None and holds > deepest else holds


def cached_sites(recorded: Recorded, layer: str) -> tuple[str, str]:
    """The two sites of a decoder layer that attention finds in its cache: keys, and values or what both come from."""
    number = int(layer.removeprefix("layer.")) + 1
    name = f"{layer}.attn.context"
    k, v = next(site.carried for site in recorded.trace.family.sites(1, number) if site.name == name)
    return k, v


def attend(
    q_THD: Real, rows: Rows, view: View, *, kv_heads: int, scale: float, latent: bool = False
) -> tuple[Real, NDArray[np.bool_]]:
    """Attention output of rows [T, H, E], and which of them could be computed [T].

    softmax(scale q k) v, each group of H / `kv_heads` query heads reading one key head.

    Args:
        q_THD: queries.
        rows: their keys.
        view: what each sees.
        kv_heads: heads of keys and values.
        scale: factor on the scores.
        latent: what is cached as values, put before the keys, are the keys.
    """
    count, heads, width = q_THD.shape
    out: list[Real] = []
    done = np.zeros(count, dtype=np.bool_)
    paths = rows.paths()
    for t in range(count):
        found = view.seen(int(rows.prompt_id[t]), int(rows.root[t]), paths[t], int(rows.call_id[t]))
        if found is None:
            continue
        k, v = found
        if latent:
            k = np.concatenate([v, k], axis=1)
        k_NGD, v_NGE = (part.reshape(len(part), kv_heads, -1) for part in (k, v))
        q_GRD = q_THD[t].reshape(kv_heads, heads // kv_heads, width)
        score_GRN = np.matmul(q_GRD, k_NGD.transpose(1, 2, 0)) * scale
        weight_GRN = np.exp(score_GRN - score_GRN.max(axis=-1, keepdims=True))
        weight_GRN /= weight_GRN.sum(axis=-1, keepdims=True)
        out.append(np.matmul(weight_GRN, v_NGE.transpose(1, 0, 2)).reshape(heads, -1))
        done[t] = True
    whole = np.zeros((count, *(out[0].shape if out else (heads, width))), dtype=q_THD.dtype)
    if out:
        whole[done] = np.stack(out)
    return whole, done
