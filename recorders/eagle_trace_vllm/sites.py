"""Where the sites of the draft forward are found in vLLM's `Eagle3LlamaForCausalLM` and `Eagle3Qwen3ForCausalLM`.

Nothing is hung into `model.model`: `support_torch_compile` gives its class a `__call__` that goes past all hooks. The
embedding, the head and the rotary module may be the target's own modules, so what they compute outside of a draft's
forward is to be ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle_trace.recording.tap import Tap, after, before, find, first
from eagle_trace_serving.parallel import split_over_ranks
from eagle_trace_serving.taps import layer_taps, taps_of_entry, taps_of_model

CLASSES = ("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
#: what `combine_hidden_states` computes, before the model's own forward
BEFORE_FORWARD = ("fused", "fc.in", "fc.out")


def taps(model: Any) -> list[Tap]:
    """Every site of a loaded draft, without `fused`, token and position: those come with the call itself."""
    layers = [f"model.layers.{n}" for n in range(len(model.model.layers))]
    # a draft that is fed one layer has no projection
    fed = [before("model.fc", "fc.in", 0, "input"), after("model.fc", "fc.out")]
    return [
        *(fed if getattr(model.model, "use_aux_hidden_state", True) else ()),
        *taps_of_model("model", layers),
        *(tap for n, path in enumerate(layers) for tap in _layer(n, path, model)),
        # (normed, what the next step receives)
        after("", "carry", lambda output: output[1]),
        # over the draft's vocabulary; `compute_logits` spreads them over the target's afterwards
        after("logits_processor", "logits"),
    ]


def _layer(n: int, path: str, model: Any) -> Iterator[Tap]:
    at, attention = f"layer.{n}", f"{path}.self_attn"
    yield from taps_of_entry(n, path, "input_layernorm")
    queries, keys = split_over_ranks(find(model, f"{attention}.qkv_proj"))
    # what enters the rotation: behind the norms of queries and keys, where a draft has them
    rotary = f"{attention}.rotary_emb"
    yield before(rotary, f"{at}.attn.q", 1, "query", during=attention, shard=queries)
    yield before(rotary, f"{at}.attn.k", 2, "key", during=attention, shard=keys)
    start = find(model, f"{attention}.q_size") + find(model, f"{attention}.kv_size")
    yield after(f"{attention}.qkv_proj", f"{at}.attn.v", lambda output: first(output)[..., start:], shard=keys)
    yield from layer_taps(n, path, model)
