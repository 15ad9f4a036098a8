"""Every step of an eagle3-mla draft's forward, recomputed in numpy from recorded inputs.

What lies outside attention is eagle3's. Attention is computed over the latents that a server caches: kv_b_proj's part
for keys is multiplied to the queries, its part for values to what comes out (absorbed). A host that expands the latents
into keys and values of each head computes the same sums in another order, so one set of steps recomputes both.

Shapes: T rows, C channels of the output, h heads; P, R and V the unrotated, rotated and value width of a head, L the
width of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.replay.attention import attend
from eagle_trace_analysis.replay.families import eagle3
from eagle_trace_analysis.replay.form import Latent
from eagle_trace_analysis.replay.inputs import Inputs, NotReplayedError, rotate

Real = NDArray[Any]


def _weight(at: str, name: str) -> str:
    return f"layers.{at[6:]}.self_attn.{name}.weight"


def _latent(i: Inputs) -> Latent:
    if i.form.latent is None:
        raise NotReplayedError("the config of the draft describes no latent attention (kv_lora_rank)")
    return i.form.latent


def _parts(i: Inputs, at: str) -> tuple[Real, Real]:
    """The latent before its norm [T, L], and the key before rotation [T, R]."""
    both, rank = i.site(f"{at}.attn.kv_a"), _latent(i).rank
    if both.shape[1] != rank + i.form.head_dim:
        raise NotReplayedError(
            f"kv_a of width {both.shape[1]} is not a latent of {rank} and a key of {i.form.head_dim}"
        )
    return both[:, :rank], both[:, rank:]


def _queries(i: Inputs, at: str) -> tuple[Real, Real]:
    """Queries before rotation: what is not rotated of them [T, h, P], and what is [T, h, R]."""
    q, latent = i.site(f"{at}.attn.q"), _latent(i)
    width = latent.nope + i.form.head_dim
    if q.shape[1] != i.form.heads * width:
        raise NotReplayedError(f"queries of width {q.shape[1]} do not make {i.form.heads} heads of {width} as trained")
    heads = q.reshape(len(q), i.form.heads, width)
    return heads[..., : latent.nope], heads[..., latent.nope :]


def q_a(i: Inputs, at: str) -> Real:
    """Queries projected down."""
    return i.product(eagle3.entering(i, at), _weight(at, "q_a_proj"))


def kv_a(i: Inputs, at: str) -> Real:
    """The latent and the shared key, before norm and rotation."""
    return i.product(eagle3.entering(i, at), _weight(at, "kv_a_proj_with_mqa"))


def q_a_norm(i: Inputs, at: str) -> Real:
    """Queries projected down, normed."""
    return i.norm(i.site(f"{at}.attn.q_a"), _weight(at, "q_a_layernorm"))[:, i.channels]


def kv_a_norm(i: Inputs, at: str) -> Real:
    """The latent, normed."""
    return i.norm(_parts(i, at)[0], _weight(at, "kv_a_layernorm"))[:, i.channels]


def q(i: Inputs, at: str) -> Real:
    """Queries of all heads."""
    return i.product(i.site(f"{at}.attn.q_a_norm"), _weight(at, "q_b_proj"))


def q_rope(i: Inputs, at: str) -> Real:
    """The rotated part of the queries."""
    turned = _queries(i, at)[1]
    return _rotated(i, turned.reshape(len(turned), -1))


def k_rope(i: Inputs, at: str) -> Real:
    """The rotated key."""
    return _rotated(i, _parts(i, at)[1])


def _rotated(i: Inputs, x: Real) -> Real:
    return rotate(x, i.recorded.keys.position[i.at], i.form.head_dim, i.form.rope)[:, i.channels]


def context(i: Inputs, at: str) -> Real:
    """Attention over the cached latents and keys."""
    latent, heads = _latent(i), i.form.heads
    kept, _ = _queries(i, at)
    turned = i.site(f"{at}.attn.q_rope").reshape(len(kept), heads, -1)
    expand = i.weight(_weight(at, "kv_b_proj"))
    if expand.shape != (heads * (latent.nope + latent.value), latent.rank):
        raise NotReplayedError(f"kv_b_proj is {list(expand.shape)}, which does not make {heads} heads as trained")
    expand = expand.reshape(heads, latent.nope + latent.value, latent.rank)
    to_keys, to_values = expand[:, : latent.nope], expand[:, latent.nope :]
    queries = np.concatenate([np.einsum("thp,hpl->thl", kept, to_keys), turned], axis=2)
    i.view.layer = at
    out, done = attend(
        queries, i.recorded.keys.take(i.at), i.view, kv_heads=1, scale=i.form.on_scores, latent=True
    )  # fmt: skip
    i.present &= done
    summed = out[..., : latent.rank]
    found: Real = np.einsum("thl,hvl->thv", summed, to_values).reshape(len(out), -1)[:, i.channels]
    return found


#: steps by the last part of the site's name
STEPS: dict[str, Callable[[Inputs, str], Real]] = {
    name: step for name, step in eagle3.STEPS.items() if name not in ("attn.k", "attn.v")
} | {
    "attn.q_a": q_a,
    "attn.kv_a": kv_a,
    "attn.q_a_norm": q_a_norm,
    "attn.kv_a_norm": kv_a_norm,
    "attn.q": q,
    "attn.q_rope": q_rope,
    "attn.k_rope": k_rope,
    "attn.context": context,
}
