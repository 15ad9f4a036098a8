"""Parameters of the draft as vLLM really holds them, under speculators' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import FUSED, canonical_name, fills
from eagle_trace.recording.params import parameter_row
from eagle_trace_serving.parallel import parts_held
from eagle_trace_serving.stored import checkpoint_names

#: what may become the target's own after loading
SHARED = ("embed_tokens.weight", "lm_head.weight")
#: vLLM's own name of d2t
MAP = "draft_id_to_target_id"


def watch(hooks: Hooks, read: Callable[[Any], None]) -> None:
    """Call `read(model)` between the loading of each model's weights and what vLLM makes of them for its kernels.

    On a CPU nothing is left of a linear layer's weight after that: it is packed, and `weight` is empty.
    """
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading

    def process(model: Any, *args: Any, **kwargs: Any) -> Any:
        read(model)
        return original(model, *args, **kwargs)

    hooks.replace(base_loader, "process_weights_after_loading", process)


def loaded_params(model: Any, draft: Path, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet: what this tensor-parallel rank holds of each parameter.

    Args:
        model: the draft model.
        draft: folder of its checkpoint.
        wanted: whether to read the parameter of a name.
    """
    stored = {parameter for name in checkpoint_names(draft).values() for parameter in fills(name)}
    # a head that is the target's tied embedding is listed with duplicates only
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # a later layer has a `hidden_norm` and never applies it
        unused = ".hidden_norm." in name and not name.startswith("model.layers.0.")
        if unused or not wanted(name):
            continue
        if name == MAP:
            yield parameter_row(name, "d2t", parameter, in_checkpoint="d2t" in stored)
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        attention = model.get_submodule(name.partition(".qkv_proj.")[0]) if ".qkv_proj." in name else None
        for held in parts_held(name, parameter, owner, attention):
            canonical = canonical_name(held.name)
            yield parameter_row(
                name,
                canonical,
                held.tensor,
                in_checkpoint=canonical in stored,
                shard=held.shard if held.shard.count > 1 else None,
                shard_axis=held.axis,
            )


def dropped(model: Any, draft: Path) -> list[str]:
    """Tensors of a checkpoint that no parameter of the loaded model comes from."""
    stored = checkpoint_names(draft)
    known = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} | {"d2t", "t2d"}
    for whole, parts in FUSED.items():
        known |= {name.replace(whole, part) for name in known if whole in name for part in parts}
    return sorted(stored[name] for name in set(stored) - known)
