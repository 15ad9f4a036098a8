"""A small EAGLE-3 draft in numpy that writes real traces: every site, chains and trees, both sides, faults on
request.

The forward is a true one (a fault planted at a site runs on through everything behind it), so that what a
diff names as the first divergence can be held against where the fault was planted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, Array, Rows
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import prompts_digest
from eagle_trace.reader import Trace, open_trace
from eagle_trace.recording.best import best_ids
from eagle_trace.sites import draft_sites, fused_slices
from eagle_trace.writer import TraceWriter, prepare_output

HIDDEN, FEATURES, HEADS, INTERMEDIATE, DRAFT_VOCAB, TARGET_VOCAB = 32, 3, 2, 64, 48, 80
TOPK = 5
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}

F64 = NDArray[np.float64]
#: (site, step, keys, values [T, W]) -> values: what a faulty side computes instead
Fault = Callable[[str, int, Rows, F64], F64]
Chain = tuple[int, tuple[int, ...], bool]


@dataclass(frozen=True)
class Prompt:
    """A prompt with what was generated behind it, and what the server drafted from it.

    `chains` holds (root, path, own_path) of every row of a step >= 1, parents before children.
    """

    key: str
    tokens: tuple[int, ...]
    length: int
    chains: tuple[Chain, ...]


def make_prompts(count: int = 3, *, tree: bool = False, generated: int = 3, seed: int = 0) -> list[Prompt]:
    """Prompts of 9, 10, ... tokens with `generated` more behind them; two draft steps at the last prompt root
    and after.
    """
    rng = np.random.default_rng(seed)
    prompts = []
    for number in range(count):
        length = 9 + number
        tokens = tuple(int(token) for token in rng.integers(0, TARGET_VOCAB, length + generated + 1))
        chains: list[Chain] = []
        for root in range(length - 1, length + generated):
            a, b, c, d, e = (int(token) for token in rng.choice(TARGET_VOCAB, 5, replace=False))
            chains += [(root, (a,), True), (root, (a, c), True)]
            if tree:
                chains += [(root, (b,), True), (root, (b, d), True), (root, (a, e), False)]
        prompts.append(Prompt(f"prompt-{number}", tokens, length, tuple(chains)))
    return prompts


class Draft:
    """Weights of the draft, float64."""

    def __init__(self, seed: int = 1, features: int = FEATURES) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> F64:
            return rng.standard_normal((rows, columns)) / np.sqrt(rows)

        self.fc = matrix(features * HIDDEN, HIDDEN)
        self.embed = rng.standard_normal((TARGET_VOCAB, HIDDEN)) * 0.3
        self.q, self.k, self.v = (matrix(2 * HIDDEN, HIDDEN) for _ in range(3))
        self.o = matrix(HIDDEN, HIDDEN)
        self.gate, self.up = matrix(HIDDEN, INTERMEDIATE), matrix(HIDDEN, INTERMEDIATE)
        self.down = matrix(INTERMEDIATE, HIDDEN)
        self.head = matrix(HIDDEN, DRAFT_VOCAB)
        self.d2t = np.sort(rng.choice(TARGET_VOCAB, DRAFT_VOCAB, replace=False)) - np.arange(DRAFT_VOCAB)


@dataclass
class Side:
    """How one side runs and what it records.

    Attributes:
        side: ``train`` or ``serve``.
        dtype: dtype every site is rounded to and recorded in.
        level: level of the trace.
        fault: what it does wrong.
        position_shift: (root, step) -> added to the position.
        noise_seed: None, or the seed of one extra random rounding at every site (another implementation).
        single_layer: feed one target layer and skip fc (the server of the story).
        d2t: used instead of the draft's own.
        settings, draft, not_materialised: of the manifest.
        without: sites that are not recorded.
        repeat: record the rows of step 0 of this prompt twice.
    """

    side: str
    dtype: str = "float32"
    level: str = "values"
    fault: Fault | None = None
    position_shift: Callable[[int, int], int] = lambda *_: 0
    noise_seed: int | None = None
    single_layer: bool = False
    d2t: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    not_materialised: list[dict[str, str]] | None = None
    without: tuple[str, ...] = ()
    repeat: int | None = None


@dataclass
class Batch:
    """Rows of one forward with the values of every site."""

    rows: Rows
    values: dict[str, Array]
    root_prompt: int


class Forward:
    """The draft's forward over one prompt, as one side computes it."""

    def __init__(self, draft: Draft, side: Side, features: Callable[[Prompt], F64]) -> None:
        self.draft, self.side, self.features = draft, side, features
        self.rng = None if side.noise_seed is None else np.random.default_rng(side.noise_seed)

    def run(self, number: int, prompt: Prompt) -> list[Batch]:
        """Step 0 for all roots, then one batch a step."""
        chains = [chain for chain in prompt.chains if self.side.side == "serve" or chain[2]]
        count = len(prompt.tokens) - 1
        rows = self._rows(number, [(root, (), True) for root in range(count)], prompt)
        batches = [self._step(rows, prompt, {}, None)]
        state: dict[tuple[int, ...], Any] = {(root,): (batches[0], root) for root in range(count)}
        for step in (1, 2):
            here = [chain for chain in chains if len(chain[1]) == step]
            if not here:
                break
            rows = self._rows(number, here, prompt)
            parents = [state[(root, *path[:-1])] for root, path, _ in here]
            batches.append(self._step(rows, prompt, state, parents))
            state |= {(root, *path): (batches[-1], at) for at, (root, path, _) in enumerate(here)}
        return batches

    def _rows(self, number: int, chains: Sequence[Chain], prompt: Prompt) -> Rows:
        tokens = [path[-1] if path else prompt.tokens[root + 1] for root, path, _ in chains]
        positions = [root + len(path) + self.side.position_shift(root, len(path)) for root, path, _ in chains]
        return Rows.build(
            prompt_id=[number] * len(chains),
            root=[root for root, _, _ in chains],
            step=[len(path) for _, path, _ in chains],
            token_id=tokens,
            position=positions,
            call_id=0,
            path=[path for _, path, _ in chains],
            own_path=[own for _, _, own in chains],
        )

    def _step(self, rows: Rows, prompt: Prompt, state: dict[Any, Any], parents: list[Any] | None) -> Batch:
        step = int(rows.step[0])
        out: dict[str, Array] = {}

        def keep(site: str, values: F64) -> F64:
            if self.side.fault is not None:
                values = self.side.fault(site, step, rows, values)
            if self.rng is not None:
                values = values * (1 + UNIT[self.side.dtype] * self.rng.uniform(-1, 1, values.shape))
            stored = values.astype(DTYPES[self.side.dtype])
            out[site] = stored
            return stored.astype(np.float64)

        hidden = (
            self._first_hidden(prompt, keep) if parents is None else keep("hidden", _parent_values(parents, "carry"))
        )
        embed = keep("embed", self.draft.embed[rows.token_id])
        at = "layer.0"
        mixed = np.concatenate(
            [keep(f"{at}.embed_norm", _norm(embed)), keep(f"{at}.hidden_norm", _norm(hidden))], axis=1
        )
        q, k, v = (keep(f"{at}.attn.{name}", mixed @ getattr(self.draft, name)) for name in ("q", "k", "v"))
        q, k = (keep(f"{at}.attn.{name}_rope", _rope(x, rows.position)) for name, x in (("q", q), ("k", k)))
        context = keep(f"{at}.attn.context", _attention(rows, q, k, v, state))
        residual = keep(f"{at}.attn.residual", hidden + keep(f"{at}.attn.out", context @ self.draft.o))
        x = keep(f"{at}.mlp.norm", _norm(residual))
        gate, up = keep(f"{at}.mlp.gate", x @ self.draft.gate), keep(f"{at}.mlp.up", x @ self.draft.up)
        act = keep(f"{at}.mlp.act", gate / (1 + np.exp(-gate)) * up)
        stream = keep(f"{at}.out", residual + keep(f"{at}.mlp.out", act @ self.draft.down))
        keep("carry", stream)
        keep("logits", 3 * keep("norm", _norm(stream)) @ self.draft.head)
        return Batch(rows, out, int(rows.prompt_id[0]))

    def _first_hidden(self, prompt: Prompt, keep: Callable[[str, F64], F64]) -> F64:
        features = self.features(prompt)
        if self.side.single_layer:
            return keep("hidden", keep("fused", features[:, -HIDDEN:]))
        parts = [keep(name, features[:, columns]) for name, columns in fused_slices(features.shape[1], HIDDEN)]
        fused = keep("fused", np.concatenate(parts, axis=1))
        return keep("hidden", keep("fc.out", keep("fc.in", fused) @ self.draft.fc))


def _norm(x: F64) -> F64:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)


def _rope(x: F64, position: NDArray[np.int32]) -> F64:
    half = HIDDEN // HEADS // 2
    angle = position[:, None] / 100.0 ** (np.arange(half) / half)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = np.split(x.reshape(len(x), HEADS, 2 * half), 2, axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(x.shape)


def _parent_values(parents: list[Any], site: str) -> F64:
    return np.stack([batch.values[site][at].astype(np.float64) for batch, at in parents])


def _attention(rows: Rows, q: F64, k: F64, v: F64, state: dict[Any, Any]) -> F64:
    """Each row sees the step-0 keys up to its root and those of its own path."""
    out = np.empty_like(q)
    first = state[(0,)][0].values if state else None
    for t, (root, path) in enumerate(zip(rows.root.tolist(), rows.paths(), strict=True)):
        if first is None:
            keys, values = k[: root + 1], v[: root + 1]
        else:
            nodes = [state[(root, *path[:s])] for s in range(1, len(path))]
            k_path, v_path = (
                [batch.values[f"layer.0.attn.{name}"][at][None] for batch, at in nodes] for name in ("k_rope", "v")
            )
            keys = np.concatenate([first["layer.0.attn.k_rope"][: root + 1], *k_path, k[t : t + 1]]).astype(np.float64)
            values = np.concatenate([first["layer.0.attn.v"][: root + 1], *v_path, v[t : t + 1]]).astype(np.float64)
        size = HIDDEN // HEADS
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            score = keys[:, part] @ q[t, part] / np.sqrt(size)
            weight = np.exp(score - score.max())
            out[t, part] = (weight / weight.sum()) @ values[:, part]
    return out


def default_features(prompt: Prompt) -> F64:
    """Target features of a prompt; a row depends on the tokens up to its own, as a target's does."""
    rows = [np.random.default_rng(prompt.tokens[: root + 1]) for root in range(len(prompt.tokens) - 1)]
    return np.stack([rng.standard_normal(FEATURES * HIDDEN) for rng in rows])


def write_trace(
    path: Path,
    side: Side,
    prompts: Sequence[Prompt],
    *,
    draft: Draft | None = None,
    features: Callable[[Prompt], F64] = default_features,
    floors: Sequence[dict[str, Any]] = (),
    rounds: Sequence[dict[str, Any]] = (),
    routing: Sequence[dict[str, Any]] = (),
) -> Trace:
    """Run one side over `prompts` and write its trace."""
    prepare_output(path)
    # a test's trace need not survive a power cut, and waiting for the disk is most of the time it takes
    with mock.patch("os.fsync"):
        return _write(path, side, prompts, draft or Draft(), features, floors, rounds, routing)


def _write(
    path: Path,
    side: Side,
    prompts: Sequence[Prompt],
    draft: Draft,
    features: Callable[[Prompt], F64],
    floors: Sequence[dict[str, Any]],
    rounds: Sequence[dict[str, Any]],
    routing: Sequence[dict[str, Any]],
) -> Trace:
    excused = side.not_materialised
    if excused is None:
        sites = ("logits", "topk.draft_id", "topk.target_id") if side.side == "serve" else ()
        excused = [
            {"site": site, "rows": "prefill", "why": "computed for the last row of a prefill only"} for site in sites
        ]
    settings = {"features": "serve"} if side.side == "train" else {}
    manifest = Manifest(
        side.side,  # type: ignore[arg-type]
        side.level,
        "synthetic",
        draft=side.draft,
        dtype=side.dtype,
        device="cpu",
        settings=settings | side.settings,
        not_materialised=excused,
        prompts_digest=prompts_digest([prompt.key for prompt in prompts]),
    )
    writer = TraceWriter(path, manifest, max_wait=None)
    forward = Forward(draft, side, features)
    calls = 0
    # serve numbers its prompts in another order than train: only the key names them
    numbers = list(range(len(prompts)))
    if side.side == "serve":
        numbers.reverse()
    for number, prompt in zip(numbers, prompts, strict=True):
        writer.put_record("prompts", _prompt_record(number, prompt))
        batches = forward.run(number, prompt)
        if side.repeat == number:
            batches.append(batches[0])
        for batch in batches:
            _write_batch(writer, side, draft, prompt, batch, calls)
            calls += 1
    for record in floors:
        writer.put_record("floors", record)
    for record in rounds:
        writer.put_record("rounds", record)
    for record in routing:
        writer.put_record("routing", record)
    return open_trace(writer.seal())


def _prompt_record(number: int, prompt: Prompt) -> dict[str, Any]:
    tokens = list(prompt.tokens)
    return {
        "prompt_id": number,
        "prompt_key": prompt.key,
        "request_id": f"r{number}",
        "token_ids": tokens,
        "num_prompt_tokens": prompt.length,
        "text": "",
        "output_ids": tokens[prompt.length :],
    }


def _write_batch(writer: TraceWriter, side: Side, draft: Draft, prompt: Prompt, batch: Batch, call: int) -> None:
    rows = replace(batch.rows, call_id=np.full(len(batch.rows), call, dtype=np.int32))
    writer.put_rows(rows)
    shapes = []
    for site, values in batch.values.items():
        if site in side.without:
            continue
        shapes.append({"site": site, "shape": list(values.shape), "dtype": side.dtype})
        kept, at = rows, np.arange(len(rows))
        if site == "logits" and side.side == "serve" and not rows.step.any():
            # a prefill computes them for its last row; rows behind it come from later calls, which compute
            # all
            at = np.flatnonzero(rows.root >= prompt.length - 1)
            kept = rows.take(at)
        writer.put_values(site, kept, values[at].copy())
        if site == "logits" and "topk.draft_id" not in side.without:
            ids, logits, logprobs = best_ids(values[at], TOPK)
            d2t = draft.d2t if side.d2t is None else side.d2t
            writer.put_topk(kept, ids, ids + d2t[ids], logits, logprobs)
    record = {
        "call_id": call,
        "role": "draft",
        "mode": "EXTEND",
        "batch_size": 1,
        "tokens": len(rows),
        "shapes": shapes,
    }
    writer.put_record("calls", record)


def value_sites() -> list[str]:
    """Names of all value sites of the synthetic draft, in forward order."""
    return [site.name for site in draft_sites(FEATURES, 1) if site.kind == "value"]


def only(at_site: str, at_step: int, change: Callable[[Rows, F64], F64]) -> Fault:
    """A fault at one site and step."""

    def fault(site: str, step: int, rows: Rows, values: F64) -> F64:
        return change(rows, values) if (site, step) == (at_site, at_step) else values

    return fault


def nan(rows: Rows, values: F64) -> F64:
    """A fault: the first number is none."""
    values = values.copy()
    values[0, 0] = np.nan
    return values


#: a verify round of the first prompt: two drafts, one of which is accepted
ROUND = {
    "prompt_id": 0, "round": 1, "root": 9, "proposed": [1, 2], "parents": [0, 1], "target_argmax": [],
    "accepted": [1], "bonus": 5,
}  # fmt: skip
