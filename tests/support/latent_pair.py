"""A draft with latent attention for the demo's target, run in numpy on both sides with faults on request.

Its attention is written here a second time, apart from the analysis, in two forms: the train side expands keys and
values of each head from the latents, the server attends over the latents themselves (absorbed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support.latent import ATTENTION, YARN, write_draft
from tests.support.numpy_pair import Doing, Keep, Norm, Runner, write_side
from tests.support.numpy_target import F64, Tensors, demo_target, read_tensors, rms
from tests.support.planted import Planted, copy_checkpoint

EMBEDDING = "embed_tokens.weight"


@dataclass
class LatentDoing(Doing):
    """What one side does, which may not be what its config says.

    Attributes:
        absorbed: attends over latents; else over keys and values of each head.
        yarn: parameters of the rotation's scaling, None for none.
        latent_eps: added to the mean square in the norms of the latents; None for `eps`.
    """

    theta: float = 50000.0
    layout: str = "pairs"
    absorbed: bool = False
    yarn: dict[str, Any] | None = field(default_factory=lambda: dict(YARN))
    latent_eps: float | None = None
    trainer = "reference"

    def runner(self, *args: Any) -> Runner:
        """Runs it over one prompt."""
        return LatentRunner(self, *args)


class LatentRunner(Runner):
    """The draft over one prompt."""

    VALUES = "layer.0.attn.kv_a_norm"
    do: LatentDoing

    def projected(self, both: F64, places: list[int], keep: Keep, _norm: Norm) -> tuple[F64, F64, F64]:
        """Queries [T, heads x (P + R)] with their rotated part turned, keys [T, R] and latents [T, L]."""
        do, at = self.do, "layer.0.attn"
        w = {name: do.tensors[f"{ATTENTION}.{name}.weight"] for name in (
            "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")}  # fmt: skip
        rank, eps = do.config["kv_lora_rank"], do.eps if do.latent_eps is None else do.latent_eps
        q_a = keep(f"{at}.q_a", both @ w["q_a_proj"].T)
        kv_a = keep(f"{at}.kv_a", both @ w["kv_a_proj_with_mqa"].T)
        low = keep(f"{at}.q_a_norm", rms(q_a, w["q_a_layernorm"], eps))
        latent = keep(f"{at}.kv_a_norm", rms(kv_a[:, :rank], w["kv_a_layernorm"], eps))
        q = keep(f"{at}.q", low @ w["q_b_proj"].T).reshape(len(both), self.heads, -1)
        nope = do.config["qk_nope_head_dim"]
        turned = keep(f"{at}.q_rope", self.rotate(q[..., nope:].reshape(len(q), -1), places))
        k = keep(f"{at}.k_rope", self.rotate(kv_a[:, rank:], places))
        whole = np.concatenate([q[..., :nope], turned.reshape(len(q), self.heads, -1)], axis=2)
        return whole.reshape(len(q), -1), k, latent

    def rotate(self, x: F64, places: list[int]) -> F64:
        """Heads of width R turned by their positions."""
        size = self.do.config["qk_rope_head_dim"]
        frequencies, factor = rotation(self.do.theta, size, self.do.yarn)
        heads = x.reshape(len(x), -1, size // 2, 2) if self.do.layout == "pairs" else (
            x.reshape(len(x), -1, 2, size // 2).swapaxes(2, 3))  # fmt: skip
        angle = np.asarray(places, dtype=np.float64)[:, None, None] * frequencies
        both = (heads[..., 0] + 1j * heads[..., 1]) * np.exp(1j * angle) * factor
        turned = np.stack([both.real, both.imag], axis=-1)
        return (turned if self.do.layout == "pairs" else turned.swapaxes(2, 3)).reshape(x.shape)

    def _empty(self) -> tuple[F64, F64]:
        return np.zeros(self.do.config["qk_rope_head_dim"]), np.zeros(self.do.config["kv_lora_rank"])

    def attended(self, q: F64, keys: F64, values: F64) -> F64:
        """One query row over keys [N, R] and latents [N, L]."""
        do = self.do
        nope, value = do.config["qk_nope_head_dim"], do.config["v_head_dim"]
        heads = q.reshape(self.heads, -1)
        expand = do.tensors[f"{ATTENTION}.kv_b_proj.weight"].reshape(self.heads, nope + value, -1)
        scale = heads.shape[1] ** -0.5 * mscale(do.yarn, "mscale_all_dim") ** 2 if do.scale is None else do.scale
        out = []
        for head, of_head in zip(heads, expand, strict=True):
            rotated = keys @ head[nope:]
            if do.absorbed:
                score = values @ (of_head[:nope].T @ head[:nope]) + rotated
            else:
                score = values @ of_head[:nope].T @ head[:nope] + rotated
            weight = np.exp(scale * (score - score.max()))
            weight /= weight.sum()
            latent = weight @ values
            out.append(of_head[nope:] @ latent if do.absorbed else weight @ (values @ of_head[nope:].T))
        return np.concatenate(out)


def mscale(yarn: dict[str, Any] | None, name: str) -> float:
    """0.1 m ln(factor) + 1."""
    return 1.0 if yarn is None else 0.1 * float(yarn.get(name, 0.0)) * math.log(yarn["factor"]) + 1.0


def rotation(theta: float, size: int, yarn: dict[str, Any] | None) -> tuple[F64, float]:
    """Angles per position [size / 2], one after the other, and the factor on cosines and sines."""
    found = []
    for pair in range(size // 2):
        plain = theta ** (-2 * pair / size)
        share = 0.0
        if yarn is not None:
            ends = [
                size
                * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(theta))
                for turns in (yarn["beta_fast"], yarn["beta_slow"])
            ]
            first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), size - 1)
            share = min(max((pair - first) / (last - first), 0.0), 1.0)
        found.append(plain * (1 - share) + (plain / yarn["factor"] * share if yarn is not None else 0.0))
    return np.array(found), mscale(yarn, "mscale") / mscale(yarn, "mscale_all_dim")


def held_tensors(folder: Path) -> Tensors:
    """A draft's tensors as a host holds them: the embedding is the target's."""
    held = read_tensors(folder)
    held.setdefault(EMBEDDING, demo_target().tensors["model.embed_tokens.weight"])
    return held


def run(
    planted: Planted, folder: Path, dtype: str = "float32", prompts: Sequence[Sequence[int]] | None = None
) -> tuple[Diff, Trace, Trace]:
    """Record both sides with the fault, compare them and look for the cause."""
    trained = write_draft(folder / "made")
    trained, nested = copy_checkpoint(trained, folder / "trained", planted.trained, planted.trained_stored)
    deployed, flat = copy_checkpoint(trained, folder / "deployed", planted.config, planted.stored)
    sides = []
    for side, config, edit, change, path in (
        ("serve", flat, planted.serve_tensors, planted.serve, deployed),
        ("train", nested, planted.train_tensors, planted.train, trained),
    ):
        tensors = held_tensors(trained)
        if edit is not None:
            edit(tensors)
        do = LatentDoing(config, tensors, **({"absorbed": side == "serve"} | change))
        more = planted.serve_write if side == "serve" else {"replay": sides[0], **planted.train_write}
        if planted.loaded and side == "serve":
            more = {"params": held_tensors(trained), **more}
        sides.append(write_side(folder / f"{side}.trace", side, do, dtype=dtype, draft=path, prompts=prompts, **more))
    serve, train = sides
    return diagnosed(diff(train, serve), train, serve), train, serve
