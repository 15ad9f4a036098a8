"""Where the sites of a decoder layer are that two servers have at one place, having vLLM's layers in common.

What is received is the host's own tensor, to be copied at once: fused kernels write in place (norms overwrite both
their inputs, rotation overwrites q and k).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eagle_trace.capture import Shard
from eagle_trace.recording.tap import Tap, after, before, find
from eagle_trace_serving.parallel import halves, split_over_ranks


def taps_of_model(inner: str, layers: Sequence[str]) -> Iterator[Tap]:
    """What is around the decoder layers at `layers` of the model at `inner`: each norm adds to the residual as well."""
    yield after(f"{inner}.embed_tokens", "embed")
    yield before(layers[0], "hidden", 2, "hidden_states")
    yield after(f"{inner}.norm", "norm", lambda output: output[0])
    yield after(f"{inner}.norm", f"layer.{len(layers) - 1}.out", lambda output: output[1])


def shards_of(taps: Iterable[Tap]) -> dict[str, Shard | None]:
    """Which part of each site's last axis this rank computes; None where every rank computes all of it."""
    return {tap.site: tap.shard for tap in taps}


def taps_of_entry(n: int, path: str, later: str) -> Iterator[Tap]:
    """What enters the attention of decoder layer `n`; `later` is the norm that a layer behind the first starts with."""
    at = f"layer.{n}"
    if n == 0:
        yield after(f"{path}.input_layernorm", f"{at}.embed_norm")
        yield after(f"{path}.hidden_norm", f"{at}.hidden_norm")
    else:
        # a later layer adds the layer before it to the residual inside its own norm
        yield after(f"{path}.{later}", f"{at}.hidden_norm", lambda output: output[0])
        yield after(f"{path}.{later}", f"layer.{n - 1}.out", lambda output: output[1])


def layer_taps(n: int, path: str, model: Any) -> Iterator[Tap]:
    """The sites of decoder layer `n` at `path` from rotation on.

    Each tensor-parallel rank computes a part of those with a shard. The embedding is summed over ranks, so are the
    output and down projections unless a later kernel does so, logits are gathered before they leave the model, and all
    else is the same on every rank.
    """
    at, attention = f"layer.{n}", f"{path}.self_attn"
    queries, keys = split_over_ranks(find(model, f"{attention}.qkv_proj"))
    # layers with equal settings share one rotary module
    rotary = f"{attention}.rotary_emb"
    yield after(rotary, f"{at}.attn.q_rope", lambda output: output[0], during=attention, shard=queries)
    yield after(rotary, f"{at}.attn.k_rope", lambda output: output[1], during=attention, shard=keys)
    yield from taps_behind_attention(n, path, model, queries)


def taps_behind_attention(n: int, path: str, model: Any, queries: Shard | None) -> Iterator[Tap]:
    """The same from the attention's output on; `queries` says which part of the heads this rank computes."""
    at, attention, mlp = f"layer.{n}", f"{path}.self_attn", f"{path}.mlp"
    inner, _ = split_over_ranks(find(model, f"{mlp}.gate_up_proj"))
    yield before(f"{attention}.o_proj", f"{at}.attn.context", 0, "input_", shard=queries)
    yield after(f"{attention}.o_proj", f"{at}.attn.out")
    yield after(f"{path}.post_attention_layernorm", f"{at}.mlp.norm", lambda output: output[0])
    yield after(f"{path}.post_attention_layernorm", f"{at}.attn.residual", lambda output: output[1])
    yield after(f"{mlp}.gate_up_proj", f"{at}.mlp.gate", lambda output: halves(output)[0], shard=inner)
    yield after(f"{mlp}.gate_up_proj", f"{at}.mlp.up", lambda output: halves(output)[1], shard=inner)
    yield after(f"{mlp}.act_fn", f"{at}.mlp.act", shard=inner)
    yield after(f"{mlp}.down_proj", f"{at}.mlp.out")
