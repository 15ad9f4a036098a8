"""Parameters of a draft as a server with vLLM's layers really holds them, under speculators' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from eagle_trace.recording.names import FUSED, FUSED_ON_LOAD, MAPS, canonical_name
from eagle_trace.recording.params import parameter_row
from eagle_trace_serving.parallel import parts_held

#: fused parameters whose parts are as wide as their attention says
_SIZED_BY_ATTENTION = (".qkv_proj.", ".fused_qkv_a_proj_with_mqa.")


def held_params(
    model: Any,
    stored: Set[str],
    trained_as: Callable[[str], str | None],
    wanted: Callable[[str], bool] = lambda _name: True,
    *,
    duplicates: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded draft: what this tensor-parallel rank holds of each parameter.

    Args:
        model: the draft model.
        stored: canonical names of the parameters that the checkpoint's tensors fill (`names.fills`).
        trained_as: the trained parameter that one is used as, both by canonical name; None if it is never used.
        wanted: whether to read the parameter of a name of the model's.
        duplicates: also under its second name what is there under two.
    """
    for name, parameter in model.named_parameters(remove_duplicate=not duplicates):
        if not wanted(name):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        fused = next((one for one in _SIZED_BY_ATTENTION if one in name), None)
        attention = model.get_submodule(name.partition(fused)[0]) if fused else None
        for held in parts_held(name, parameter, owner, attention):
            canonical = canonical_name(held.name)
            if (trained := trained_as(canonical)) is None:
                continue
            yield parameter_row(
                name,
                trained,
                held.tensor,
                in_checkpoint=canonical in stored,
                shard=held.shard if held.shard.count > 1 else None,
                shard_axis=held.axis,
            )


def dropped(model: Any, filled: Mapping[str, tuple[str, ...]], *, duplicates: bool = False) -> list[str]:
    """Tensors of a checkpoint that no parameter of the loaded model comes from.

    Args:
        model: the draft model.
        filled: by stored name, the trained names of the parameters it is loaded into, should the model have them.
        duplicates: see `held_params`.
    """
    known = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=not duplicates)}
    for whole, parts in (FUSED | FUSED_ON_LOAD).items():
        known |= {name.replace(whole, part) for name in known if f".{whole}." in name for part in parts}
    known |= {*MAPS}
    return sorted(name for name, into in filled.items() if not known.intersection(into))
