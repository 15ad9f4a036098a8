"""An EAGLE-3 draft with latent attention in plain torch, as it is trained: several steps over whole documents.

One decoder layer of DeepSeek-V2's kind (arXiv:2405.04434, section 2.1) that takes the normed embedding and the normed
hidden state side by side, behind fc on the features of several target layers. Keys and values are expanded from their
latents; a server that absorbs kv_b_proj into queries and context instead computes the same sums in another order.

Shapes: T rows, H width of the stream, h heads, N, R and V the unrotated, rotated and value width of a head, S keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eagle_trace_reference.shape import Shape

#: torch is not typed here
Tensor = Any


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w, rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Rows [..., width], normed."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Rotation(nn.Module):
    """The rotary embedding of queries and of the key that all heads share.

    Rotated in place: a pair's two elements stay where they are, whether they are neighbours or lie half a head apart.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies(shape), persistent=False)
        self.factor = shape.yarn.on_rotation if shape.yarn is not None else 1.0
        self.interleaved = shape.interleaved

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, h, R] and keys [T, 1, R] turned by their positions [T]."""
        angles = positions.float()[:, None, None] * self.frequencies.float()
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return self._turned(q, cos, sin), self._turned(k, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        half = x.shape[-1] // 2
        shape = (half, 2) if self.interleaved else (2, half)
        pair = -1 if self.interleaved else -2
        a, b = wide.unflatten(-1, shape).unbind(pair)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=pair).flatten(-2).to(x.dtype)


def frequencies(shape: Shape) -> Tensor:
    """Angles per position [R / 2], float32, on the CPU.

    With YaRN a pair that turns more than `fast` times within the original length keeps its frequency, one that turns
    less than `slow` times has it divided by the factor, and in between both are mixed.
    """
    size = shape.rope
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    plain = 1.0 / shape.theta**exponents
    if shape.yarn is None:
        return plain
    yarn = shape.yarn

    def pair(rotations: float) -> float:
        return size * math.log(yarn.original / (rotations * 2 * math.pi)) / (2 * math.log(shape.theta))

    low, high = max(math.floor(pair(yarn.fast)), 0), min(math.ceil(pair(yarn.slow)), size - 1)
    ramp = torch.arange(size // 2, dtype=torch.float32, device="cpu") - low
    divided = (ramp / ((high - low) or 1e-3)).clamp(0, 1)
    return plain / yarn.factor * divided + plain * (1 - divided)


@dataclass
class Memory:
    """Keys and values of the steps so far: of the first for all rows, of later ones each row's own.

    Attributes:
        seen: keys of the first step that a row sees, bool [T, T].
        k: [T, h, N + R] per step.
        v: [T, h, V] per step.
    """

    seen: Tensor
    k: list[Tensor]
    v: list[Tensor]


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one latent per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, entering = shape.heads, 2 * shape.hidden
        self.q_a_proj = nn.Linear(entering, shape.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_rank, shape.eps)
        self.q_b_proj = nn.Linear(shape.q_rank, heads * (shape.nope + shape.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(entering, shape.kv_rank + shape.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, shape.eps)
        self.kv_b_proj = nn.Linear(shape.kv_rank, heads * (shape.nope + shape.value), bias=False)
        self.o_proj = nn.Linear(heads * shape.value, shape.hidden, bias=False)
        self.rotary = Rotation(shape)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Attention [T, H] of rows [T, 2 H]; their keys and values are added to the memory."""
        shape = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (shape.heads, -1))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.heads, -1))
        k_nope, v = expanded.split([shape.nope, shape.value], dim=-1)
        q_nope, q_rope = q.split([shape.nope, shape.rope], dim=-1)
        q_rope, k_rope = self.rotary(q_rope, k_rope[:, None], positions)
        memory.k.append(torch.cat([k_nope, k_rope.expand(-1, shape.heads, -1)], dim=-1))
        memory.v.append(v)
        return self.o_proj(self._attend(torch.cat([q_nope, q_rope], dim=-1), memory).flatten(1))

    def _attend(self, q: Tensor, memory: Memory) -> Tensor:
        """softmax(scale q k) v over the first step's keys that a row sees and its own of later steps: [T, h, V]."""
        first = torch.einsum("thd,shd->hts", q, memory.k[0]) * self.shape.scale
        first = first.masked_fill(~memory.seen, -torch.inf)
        own = [torch.einsum("thd,thd->ht", q, k)[..., None] * self.shape.scale for k in memory.k[1:]]
        weights = torch.cat([first, *own], dim=-1).float().softmax(-1).to(q.dtype)
        out = torch.einsum("hts,shv->thv", weights[..., : len(q)], memory.v[0])
        for number, v in enumerate(memory.v[1:], start=len(q)):
            out = out + weights[..., number].T[..., None] * v
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [T, H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer: embedding and hidden state are normed apart, and enter attention side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """The stream [T, H] behind the layer; it starts from the hidden state as it was before its norm."""
        entering = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        stream = hidden + self.self_attn(entering, positions, memory)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class LatentDraft(nn.Module):
    """The draft. Its parameters have the names that a checkpoint stores them under.

    Attributes:
        d2t: offsets from draft ids to target ids, int64 [draft vocabulary]; None where they are the same.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.fc = nn.Linear(shape.features * shape.target, shape.hidden, bias=shape.fc_bias)
        norms = [RMSNorm(shape.target, shape.eps) for _ in range(shape.features if shape.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocabulary, bias=False)
        self.register_buffer("d2t", None)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor, features: Tensor, steps: int) -> None:
        """All steps over documents side by side; what it computes is seen by the taps alone.

        At step s row i is fed the token s places further on, turned by its position + s, and starts from what step
        s - 1 left in row i.

        Args:
            tokens: ids fed at the first step, int64 [T].
            documents: number of each row's document, int64 [T].
            positions: positions at the first step, int64 [T].
            features: [T, n * G].
            steps: number of steps.
        """
        order = torch.arange(len(tokens), device=tokens.device)
        seen = (documents[:, None] == documents) & (order <= order[:, None])
        memory = Memory(seen, [], [])
        hidden = self._projected(features)
        for step in range(steps):
            # what comes around from the front is a row beyond its document's end, which nobody reads
            embeds = self.embed_tokens(tokens.roll(-step))
            stream = self.layers[0](embeds=embeds, hidden=hidden, positions=positions + step, memory=memory)
            normed = self.norm(stream)
            self.lm_head(normed)
            hidden = normed if self.shape.norm_output else stream

    def _projected(self, features: Tensor) -> Tensor:
        if not self.shape.fc_norm:
            return self.fc(features)
        parts: list[Any] = [
            norm(part) for norm, part in zip(self.fc_norm, features.split(self.shape.target, dim=-1), strict=True)
        ]
        return self.fc(torch.cat(parts, dim=-1))
