"""The demo pair run in numpy on both sides, with faults on request, as real traces.

Target and draft are those that ship with eagle-trace, so weights and text are real; the forward is written here a
second time, apart from the analysis (`eagle_trace_analysis.replay.families`), and rounds to the trace's dtype at every
site. The serve side works like a server: it drafts, verifies against the target's greedy continuation, and keeps one
cache slot a position, so that a fault of the cache can be planted where it would be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.capture import DTYPES, Rows
from eagle_trace.checkpoints import target_sample
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import prompts_digest
from eagle_trace.reader import Trace, open_trace
from eagle_trace.recording.best import best_ids
from eagle_trace.recording.params import parameter_row
from eagle_trace.sketch import sample_channels
from eagle_trace.writer import TraceWriter, prepare_output
from tests.support.numpy_target import (
    F64,
    TEXTS,
    Target,
    Tensors,
    answers,
    attend,
    demo_target,
    rms,
    turn,
)
from tests.support.pairs import DRAFT

SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"features": "compute", "routers": {"read": [], "unread": []}},
    "serve": {"algorithm": "EAGLE3", "sglang_args": [], "kv_cache_dtype": "auto"},
}
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
STEPS, TOPK = 3, 10
Path_ = tuple[int, ...]
Key = tuple[int, Path_]
Keep = Callable[[str, F64], F64]
Norm = Callable[[F64, str], F64]


@dataclass
class Doing:
    """What one side does, which may not be what its config says.

    Attributes:
        config: flat or speculators config of the draft, as its manifest holds it.
        tensors: the draft's tensors as used, by speculators' names.
        eps, theta, layout, share: of norms and rotation.
        offset: norms scale by 1 + w.
        rounded: what of the rotary tables is rounded to bfloat16 first (`Rope.rounded`).
        norm_residual, norm_output: the flags of the same name; head_norm: the head reads the normed stream.
        before_fc: norms the features on their way into fc: (features, tensors, eps) -> features.
        pick: makes the features out of all hidden states [L + 2, T, G]; width G instead of n G skips fc.
        summand: (hidden states, what was added last to each) -> what stands for the hidden states.
        window: tokens a row sees.
        cached: the dtype that keys and values are rounded to in their slots.
        stale: extends leave the slots of accepted tokens as the draft steps left them.
        prefix: (roots not computed, factor on their cached keys).
        limit: positions from here on are not rotated.
        shift: position added to the row (root, path) of a round, or the same of all; fed: place of the token fed
            beside feature i, i + `fed`.
        feeds: (tokens, root, path, round) -> token fed, in place of `fed` and of the path's last.
        feature: (root, round) -> the root whose feature the row is given.
        unmapped: behind the first one, draft steps go on from draft ids.
        carry: (root, path) -> the row whose carry a draft step starts from.
        slot: (root, path) -> places that the row's key is written to besides its own.
        chunk: tokens of a prompt that are computed at once; None for all.
        skipped: roots that the draft is not run for and whose slots stay empty, drafts below them included.
        behind: step -> empty slots behind its own that a row sees; below 0, keys at the end that it does not see.
        refuses: verification accepts no draft.
        d2t: offsets used.
        damage: (site, values) -> values, a fault of one site alone.
        scale: factor on the scores of attention; None for the usual one.
    """

    config: dict[str, Any]
    tensors: Tensors
    eps: float = 1e-5
    theta: float = 10000.0
    layout: str = "half"
    share: float = 1.0
    offset: bool = False
    norm_residual: bool = False
    norm_output: bool = False
    head_norm: bool = True
    rounded: str = ""
    before_fc: Callable[[F64, Tensors, float], F64] | None = None
    pick: Callable[[F64], F64] = lambda states: np.concatenate([states[2], states[4], states[5]], axis=1)
    summand: Callable[[F64, F64], F64] | None = None
    window: int | None = None
    stale: bool = False
    cached: type | None = None
    prefix: tuple[int, float] | None = None
    limit: int | None = None
    shift: int | Callable[[int, Path_, int], int] = 0
    fed: int = 1
    feeds: Callable[[Sequence[int], int, Path_, int], int] | None = None
    unmapped: bool = False
    feature: Callable[[int, int], int] = lambda root, _round: root
    carry: Callable[[int, Path_], Key] = lambda root, path: (root, path[:-1])
    slot: Callable[[int, Path_], Sequence[int]] = lambda _root, _path: ()
    chunk: int | None = None
    skipped: Sequence[int] = ()
    behind: Callable[[int], int] = lambda _step: 0
    refuses: bool = False
    d2t: Any = None
    damage: Callable[[str, F64], F64] | None = None
    target: Target = field(default_factory=lambda: demo_target())
    scale: float | None = None
    trainer = "speculators"

    def runner(self, *args: Any) -> Runner:
        """Runs it over one prompt."""
        return Runner(self, *args)


@dataclass
class Batch:
    """Rows of one forward: (root, path) of each, the token fed and the position, and the values of every site."""

    keys: list[Key]
    fed: list[int]
    positions: list[int]
    round: int
    values: dict[str, Any]


class Runner:
    """The draft over one prompt, as one side computes it."""

    #: what is cached beside the rotated keys
    VALUES = "layer.0.attn.v"

    def __init__(
        self, do: Doing, tokens: Sequence[int], states: F64, dtype: str, rng: np.random.Generator | None
    ) -> None:
        self.do, self.tokens, self.dtype, self.rng = do, list(tokens), dtype, rng
        layer = do.config.get("transformer_layer_config", do.config)
        self.heads, self.kv_heads, self.size = (
            layer.get(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.features = do.pick(states)
        self.slots: dict[int, tuple[F64, F64]] = {}
        self.done: dict[Key, dict[str, F64]] = {}
        self.batches: list[Batch] = []
        self.round = 0
        #: sites whose rows later rows are made of
        self.again = ("carry", "logits", "layer.0.attn.k_rope", self.VALUES)

    def run(self, keys: list[Key], *, server: bool, kept: frozenset[int] = frozenset()) -> None:
        """One forward over rows of one step; slots of `kept` positions are not overwritten."""
        do, out = self.do, {}
        if server:
            self.slots |= {root: self._empty() for root, _ in keys if root in do.skipped}
            keys = [key for key in keys if key[0] not in do.skipped]
        if not keys:
            return
        step = len(keys[0][1])

        def keep(site: str, values: F64) -> F64:
            if do.damage is not None:
                values = do.damage(site, values)
            if self.rng is not None:
                values = values * (1 + UNIT[self.dtype] * self.rng.uniform(-1, 1, values.shape))
            out[site] = values.astype(DTYPES[self.dtype])
            return out[site].astype(np.float64)

        def norm(x: F64, name: str) -> F64:
            weight = do.tensors[name]
            return rms(x, weight + 1 if do.offset else weight, do.eps)

        roots = [root for root, _ in keys]
        if step == 0:
            fused = keep("fused", self.features[[do.feature(root, self.round) for root in roots]])
            width = do.tensors["norm.weight"].shape[0]
            if fused.shape[1] != width:
                for n in range(fused.shape[1] // width):
                    out[f"target.hidden.{n}"] = np.ascontiguousarray(out["fused"][:, n * width : (n + 1) * width])
                entering = keep("fc.in", fused if do.before_fc is None else do.before_fc(fused, do.tensors, do.eps))
                fused = keep("fc.out", entering @ do.tensors["fc.weight"].T)
            hidden = keep("hidden", fused)
        else:
            hidden = keep("hidden", np.stack([self.done[do.carry(*key)]["carry"] for key in keys]))
        fed = [self._fed(root, path) for root, path in keys]
        embed = keep("embed", do.tensors["embed_tokens.weight"][fed])
        at, w = "layer.0", {k[9:]: t for k, t in do.tensors.items() if k.startswith("layers.0.")}
        one = keep(f"{at}.embed_norm", norm(embed, "layers.0.input_layernorm.weight"))
        two = keep(f"{at}.hidden_norm", norm(hidden, "layers.0.hidden_norm.weight"))
        both = np.concatenate([one, two], axis=1)
        places = [self._place(root, path) for root, path in keys]
        q, k, v = self.projected(both, places, keep, norm)
        context = keep(f"{at}.attn.context", self._context(keys, q, k, v, server=server, kept=kept))
        attention = keep(f"{at}.attn.out", context @ w["self_attn.o_proj.weight"].T)
        residual = keep(f"{at}.attn.residual", (two if do.norm_residual else hidden) + attention)
        h = keep(f"{at}.mlp.norm", norm(residual, "layers.0.post_attention_layernorm.weight"))
        gate, up = (keep(f"{at}.mlp.{n}", h @ w[f"mlp.{n}_proj.weight"].T) for n in ("gate", "up"))
        act = keep(f"{at}.mlp.act", gate / (1 + np.exp(-gate)) * up)
        stream = keep(f"{at}.out", residual + keep(f"{at}.mlp.out", act @ w["mlp.down_proj.weight"].T))
        final = keep("norm", norm(stream, "norm.weight") if do.head_norm else stream)
        # the carry is the very tensor, not rounded once more
        out["carry"] = out["norm"] if do.norm_output else out[f"{at}.out"]
        keep("logits", final @ do.tensors["lm_head.weight"].T)
        for row, key in enumerate(keys):
            self.done[key] = {site: out[site][row].astype(np.float64) for site in self.again}
        self.batches.append(Batch(keys, fed, places, self.round, out))

    def projected(self, both: F64, places: list[int], keep: Keep, _norm: Norm) -> tuple[F64, F64, F64]:
        """Queries, and what is cached of keys and values, of rows that enter attention."""
        at = "layer.0.attn"
        q, k, v = (keep(f"{at}.{n}", both @ self.do.tensors[f"layers.0.self_attn.{n}_proj.weight"].T) for n in "qkv")
        q, k = (keep(f"{at}.{n}_rope", self.rotate(x, places)) for n, x in (("q", q), ("k", k)))
        return q, k, v

    def attended(self, q: F64, keys: F64, values: F64) -> F64:
        """What one query row makes of what it sees."""
        usual = (len(q) // self.heads) ** -0.5
        scaled = q if self.do.scale is None else q * (self.do.scale / usual)
        return attend(scaled, keys, values, self.heads, self.kv_heads)

    def _fed(self, root: int, path: Path_) -> int:
        if self.do.feeds is not None:
            return self.do.feeds(self.tokens, root, path, self.round)
        return path[-1] if path else self.tokens[root + self.do.fed]

    def _place(self, root: int, path: Path_) -> int:
        shift = self.do.shift
        return root + len(path) + (shift if isinstance(shift, int) else shift(root, path, self.round))

    def rotate(self, x: F64, places: list[int]) -> F64:
        turned = turn(x, places, self.size, self.do.theta, self.do.layout, self.do.share, self.do.rounded)
        if self.do.limit is not None:
            past = np.array(places) >= self.do.limit
            turned[past] = x[past]
        return turned

    def _context(self, keys: Any, q: F64, k: F64, v: F64, *, server: bool, kept: frozenset[int]) -> F64:
        own = {root: (k[row], v[row]) for row, (root, path) in enumerate(keys) if not path}
        for row, (root, path) in enumerate(keys):
            if root + len(path) not in kept:
                for place in (root + len(path), *self.do.slot(root, path)):
                    self.slots[place] = self._cached(k[row]), self._cached(v[row])
        out = []
        for row, (root, path) in enumerate(keys):
            place = root + len(path)
            if server:
                # the rows of the call itself come from memory, those before it from the cache
                seen = [own.get(p, self.slots[p]) if not path else self.slots[p] for p in range(place + 1)]
                more = self.do.behind(len(path))
                seen = [*seen, *[self._empty()] * more] if more >= 0 else seen[: max(1, len(seen) + more)]
            else:
                seen = [self._of(root_, ()) if root_ not in own else own[root_] for root_ in range(root + 1)]
                seen += [self._of(root, path[:s]) for s in range(1, len(path))] + ([(k[row], v[row])] if path else [])
            seen = seen if self.do.window is None else seen[-self.do.window :]
            keys_seen, values_seen = (np.stack(part) for part in zip(*seen, strict=True))
            out.append(self.attended(q[row], keys_seen, values_seen))
        return np.stack(out)

    def _cached(self, x: F64) -> F64:
        return x if self.do.cached is None else x.astype(self.do.cached).astype(np.float64)

    def _empty(self) -> tuple[F64, F64]:
        width = self.kv_heads * self.size
        return np.zeros(width), np.zeros(width)

    def _of(self, root: int, path: tuple[int, ...]) -> tuple[F64, F64]:
        row = self.done[root, path]
        return row["layer.0.attn.k_rope"], row[self.VALUES]

    def best(self, root: int, path: tuple[int, ...]) -> int:
        """Target id of the best draft id of a row."""
        draft = int(self.done[root, path]["logits"].argmax())
        offsets = self.do.tensors["d2t"] if self.do.d2t is None else self.do.d2t
        return draft if path and self.do.unmapped else draft + int(offsets[draft])


def serve_prompt(runner: Runner, prompt_tokens: int) -> list[dict[str, Any]]:
    """Prefill and rounds, until the answer ends; returns the rounds."""
    tokens, do, rounds = runner.tokens, runner.do, []
    first = 0
    if do.prefix is not None:
        # somebody else's keys stand for the first rows
        first, factor = do.prefix
        runner.run([(root, ()) for root in range(first)], server=True)
        for root in range(first):
            k, v = runner.slots[root]
            runner.slots[root] = k * factor, v
            del runner.done[root, ()]
        runner.batches.clear()
    size = do.chunk or prompt_tokens
    for start in range(first, prompt_tokens, size):
        runner.run([(root, ()) for root in range(start, min(start + size, prompt_tokens))], server=True)
    root = prompt_tokens - 1
    while root + 2 + STEPS < len(tokens):
        if root in do.skipped:
            root += 1
            runner.run([(root, ())], server=True)
            continue
        path: Path_ = ()
        runner.round = len(rounds) + 1
        for _ in range(1, STEPS):
            path = (*path, runner.best(root, path))
            runner.run([(root, path)], server=True)
        proposed = (*path, runner.best(root, path))
        count = 0
        while not do.refuses and count < STEPS and proposed[count] == tokens[root + 2 + count]:
            count += 1
        accepted = tokens[root + 2 : root + 2 + count]
        rounds.append({
            "round": len(rounds) + 1, "root": root, "proposed": list(proposed), "parents": list(range(STEPS)),
            "target_argmax": tokens[root + 2 : root + 3 + STEPS], "accepted": accepted,
            "bonus": tokens[root + 2 + count],
        })  # fmt: skip
        after = list(range(root + 1, root + count + 2))
        guessed = frozenset(range(root + 1, min(root + count, root + STEPS - 1) + 1))
        runner.run([(one, ()) for one in after], server=True, kept=guessed if do.stale else frozenset())
        root += count + 1
    return rounds


def train_prompt(runner: Runner, wanted: Sequence[Key], prompt_tokens: int) -> None:
    """Every root, and the wanted chains below some; and the true tokens' rows, of which the best ids alone count."""
    count = len(runner.tokens) - 1
    runner.run([(root, ()) for root in range(count)], server=False)
    true = [
        (root, tuple(runner.tokens[root + 2 : root + 2 + s])) for s in range(1, STEPS)
        for root in range(prompt_tokens - 1, count - s)
    ]  # fmt: skip
    every = sorted({*wanted, *true})
    for step in range(1, STEPS):
        runner.run([key for key in every if len(key[1]) == step], server=False)


def write_side(
    path: Path, side: str, do: Doing, *, dtype: str = "float32", replay: Trace | None = None, layers: bool = True,
    prompts: Sequence[Sequence[int]] | None = None, settings: dict[str, Any] | None = None,
    dropped: Sequence[str] = (), shipped: Callable[[str], bool] = lambda _: True, params: Tensors | None = None,
    draft: Path = DRAFT, answer: Callable[[int], int] = lambda number: number,
) -> Trace:  # fmt: skip
    """Run one side over the prompts and write its trace.

    Args:
        path: the trace.
        side: ``train`` or ``serve``.
        do: what it does.
        dtype: of the trace.
        replay: serve trace whose chains the train side runs.
        layers: keep every layer of the target (train side).
        prompts: tokens with answers; by default `answers`.
        settings, dropped, draft: for the manifest.
        shipped: whether a parameter was found in the checkpoint.
        params: parameters as loaded, if not those used.
        answer: whose hidden states a prompt is given.
    """
    prepare_output(path)
    texts = prompts or answers()
    keys = [f"prompt-{number}" for number in range(len(texts))]
    target = do.target
    manifest = Manifest(
        side, "values", {"train": do.trainer, "serve": "sglang"}[side], dtype=dtype, device="cpu",  # type: ignore[arg-type]
        target={"path": str(target.folder), "config": target.config, "num_hidden_layers": target.layers}
        | target_sample(target.folder),
        draft={"path": str(draft), "config": do.config, "dropped_keys": list(dropped)},
        settings=SETTINGS[side] | (settings or {}),
        prompts_digest=prompts_digest(keys),
    )  # fmt: skip
    writer = TraceWriter(path, manifest, max_wait=None)
    rng = np.random.default_rng(5) if side == "serve" else None
    rounded = {
        n: t if t.dtype.kind in "iub" else t.astype(DTYPES[dtype]).astype(np.float64) for n, t in do.tensors.items()
    }
    do = replace(do, tensors=rounded)
    calls = 0
    for number, tokens in enumerate(texts):
        prompt_tokens = len(TEXTS[number % len(TEXTS)].encode())
        states, branches = target.hidden_states(texts[answer(number)]), target.branches(texts[answer(number)])
        if do.summand is not None:
            states = do.summand(states, branches)
        # another prompt may be shorter: its last rows stand for those it lacks
        there = np.minimum(np.arange(len(tokens)), states.shape[1] - 1)
        states, branches = states[:, there], branches[:, there]
        runner = do.runner(tokens, states, dtype, rng)
        wanted: set[Key] = set()
        if side == "serve":
            for record in serve_prompt(runner, prompt_tokens):
                writer.put_record("rounds", record | {"prompt_id": number})
        else:
            if replay is not None:
                rows = replay.rows
                here = np.flatnonzero((rows.prompt_id == number) & (rows.step > 0))
                paths = rows.paths()
                wanted = {(int(rows.root[row]), paths[row]) for row in here}
            train_prompt(runner, sorted(wanted), prompt_tokens)
            if layers:
                _put_layers(writer, number, states, branches, len(tokens) - 1)
        _put_rows(writer, runner, number, calls, wanted)
        calls += len(runner.batches)
        writer.put_record("prompts", {
            "prompt_id": number, "prompt_key": keys[number], "request_id": f"r{number}", "token_ids": list(tokens),
            "num_prompt_tokens": prompt_tokens, "text": "", "output_ids": list(tokens[prompt_tokens:]),
        })  # fmt: skip
    for name, tensor in (params or do.tensors).items():
        writer.put_record("params", _param(name, tensor, dtype, found=shipped(name)))
    return open_trace(writer.seal())


def _param(name: str, tensor: Any, dtype: str, *, found: bool) -> dict[str, Any]:
    held = tensor if tensor.dtype.kind in "iub" else tensor.astype(DTYPES[dtype])
    return parameter_row(name, name, np.ascontiguousarray(held), in_checkpoint=found)


def _put_layers(writer: TraceWriter, number: int, states: F64, branches: F64, count: int) -> None:
    channels = sample_channels(states.shape[2])
    writer.manifest.settings["layer_channels"] = channels.tolist()
    for root in range(count):
        for layer in range(len(states)):
            sample, branch = (held[layer, root, channels].astype(np.float32) for held in (states, branches))
            writer.put_record("layers", {
                "prompt_id": number, "root": root, "layer": layer, "sample": sample.tolist(),
                "branch": None if np.isnan(branch).any() else branch.tolist(),
            })  # fmt: skip


def _put_rows(writer: TraceWriter, runner: Runner, number: int, first_call: int, wanted: set[Any]) -> None:
    """The rows of all calls for a prompt, handed over together: site by site, in the order of the calls."""
    rows: list[Rows] = []
    calls_of = defaultdict[str, list[int]](list)
    kept: list[Any] = []
    for call, batch in enumerate(runner.batches):
        keys = batch.keys
        rows.append(
            Rows.build(
                prompt_id=[number] * len(keys), root=[root for root, _ in keys], step=[len(path) for _, path in keys],
                token_id=batch.fed, position=batch.positions, call_id=first_call + call, round=batch.round,
                path=[path for _, path in keys],
            )
        )  # fmt: skip
        kept.append(np.flatnonzero([not wanted or not path or (root, path) in wanted for root, path in keys]))
        shapes = [{"site": s, "shape": list(v.shape), "dtype": runner.dtype} for s, v in batch.values.items()]
        writer.put_record("calls", {
            "call_id": first_call + call, "role": "draft", "mode": "EXTEND", "batch_size": 1, "tokens": len(keys),
            "shapes": shapes,
        })  # fmt: skip
        for site in batch.values if kept[-1].size else ():
            calls_of[site].append(call)
    together: dict[tuple[int, ...], Rows] = {}
    for site, calls in calls_of.items():
        if tuple(calls) not in together:
            together[tuple(calls)] = Rows.concatenate([rows[call].take(kept[call]) for call in calls])
        of_site = together[tuple(calls)]
        if site == "logits":
            writer.put_rows(of_site)
        writer.put_values(
            site, of_site, np.concatenate([runner.batches[call].values[site][kept[call]] for call in calls])
        )
    ids, logits, logprobs = best_ids(np.concatenate([batch.values["logits"] for batch in runner.batches]), TOPK)
    offsets = runner.do.tensors["d2t"] if runner.do.d2t is None else runner.do.d2t
    writer.put_topk(Rows.concatenate(rows), ids, ids + offsets[ids], logits, logprobs)
