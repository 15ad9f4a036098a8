"""Where the sites of the draft forward are found in SGLang's `LlamaForCausalLMEagle3` and
`Eagle3DeepseekV2ForCausalLM`.

What is received is the host's own tensor, to be copied at once: SGLang's fused kernels write in place (norms overwrite
both their inputs, rotation overwrites q and k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from eagle_trace.families import EAGLE3_MLA
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import Receive, Tap, after, before, find, first, hang, is_module
from eagle_trace_serving.parallel import columns_held, place, split_over_ranks
from eagle_trace_serving.taps import layer_taps, taps_behind_attention, taps_of_entry, taps_of_model
from eagle_trace_sglang.layers import draft_layers, family_of


def taps(model: Any) -> list[Tap]:
    """Every site of a loaded draft, without `fused`, token and position: those come with the call itself.

    Raises:
        HostError: see `draft_layers`.
    """
    layers = [path for path, _ in draft_layers(model)]
    return [
        before("model.fc", "fc.in"),
        after("model.fc", "fc.out", shard=columns_held(find(model, "model.fc"))),
        *taps_of_model("model", layers),
        *(tap for n, path in enumerate(layers) for tap in _layer(n, path, model)),
        # the inner model returns (normed, [what the next step receives])
        after("model", "carry", lambda output: output[1][0]),
        after("logits_processor", "logits", lambda output: output.next_token_logits),
    ]


def _layer(n: int, path: str, model: Any) -> Iterator[Tap]:
    at, attention = f"layer.{n}", f"{path}.self_attn"
    yield from taps_of_entry(n, path, "hidden_norm")
    if family_of(model) is EAGLE3_MLA:
        yield from _latent_attention(n, path, model)
        return
    queries, keys = split_over_ranks(find(model, f"{attention}.qkv_proj"))
    # without the sizes, a fused projection cannot be told apart into its parts
    sizes = [f"{attention}.q_size", f"{attention}.kv_size"]
    fused = next((size for size in sizes if find(model, size) is None), f"{attention}.qkv_proj")
    q, kv = (find(model, size) or 0 for size in sizes)
    for part, start, end in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
        shard = queries if part == "q" else keys
        yield after(fused, f"{at}.attn.{part}", _columns(start, end), shard=shard)
    yield from layer_taps(n, path, model)


def _latent_attention(n: int, path: str, model: Any) -> Iterator[Tap]:
    """Multi-head latent attention: what both ways to compute it go through.

    In a prefill without a prefix keys and values of all heads are made of the latent, by `kv_b_proj`; elsewhere halves
    of that matrix are multiplied into queries and sums (absorbed), and the module is never called.
    """
    at, attention = f"layer.{n}.attn", f"{path}.self_attn"
    queries = columns_held(find(model, f"{attention}.q_b_proj"))
    # without the rank, the fused projection cannot be told apart into its parts
    rank = find(model, f"{attention}.q_lora_rank")
    fused = f"{attention}.q_lora_rank" if rank is None else f"{attention}.fused_qkv_a_proj_with_mqa"
    yield after(fused, f"{at}.q_a", _columns(0, rank))
    yield after(fused, f"{at}.kv_a", _columns(rank, None))
    yield after(f"{attention}.q_a_layernorm", f"{at}.q_a_norm")
    yield after(f"{attention}.kv_a_layernorm", f"{at}.kv_a_norm")
    yield after(f"{attention}.q_b_proj", f"{at}.q", shard=queries)
    rotary = f"{attention}.rotary_emb"
    for index, (site, shard) in enumerate((("q_rope", queries), ("k_rope", None))):
        # [T, heads, size], of the key one head
        yield after(rotary, f"{at}.{site}", _heads(index), during=attention, shard=shard)
    yield from taps_behind_attention(n, path, model, queries)


def _heads(index: int) -> Callable[[Any], Any]:
    return lambda output: output[index].flatten(1)


def _columns(start: int | None, end: int | None) -> Callable[[Any], Any]:
    return lambda output: first(output)[..., start:end]


def hook_draft(hooks: Hooks, model: Any, receive: Receive) -> dict[str, str]:
    """Hang `receive` into every site of a loaded draft but those of `partial_sums`.

    Returns:
        The sites this model has no place for, and what it lacks.

    Raises:
        HostError: see `draft_layers`.
    """
    unsummed = partial_sums(model)
    return hang(hooks, model, [tap for tap in taps(model) if tap.site not in unsummed], receive)


def partial_sums(model: Any) -> list[str]:
    """Sites that this model leaves unsummed on each rank, for a later kernel to add up over the ranks.

    What their modules return is a term of the site and not the site, so they cannot be recorded.
    """
    found = []
    for n, (path, _) in enumerate(draft_layers(model)):
        for site, name in (("attn.out", "self_attn.o_proj"), ("mlp.out", "mlp.down_proj")):
            linear = find(model, f"{path}.{name}")
            if is_module(linear) and place(linear)[1] > 1 and not linear.reduce_results:
                found.append(f"layer.{n}.{site}")
    return found
