"""A model that trains, once more, over the same numbers: to be run beside the training without touching it.

The twin has modules of its own (their mode, their hooks, their buffers' places) and the training's tensors, converted
where they are of another dtype. Running it without gradients changes nothing that training sees.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from eagle_trace.errors import HostError, UsageError

#: what a module's `forward` would be, if it were replaced on the object: it would run the training's own module
_OWN_FORWARD = "forward"


def twin(model: Any, dtype: Any, instead: Mapping[int, Any] | None = None) -> Any:
    """`model` over the same numbers, in evaluation mode.

    Args:
        model: the module in training, not sharded.
        dtype: torch dtype of the twin's parameters. One that the training holds is shared, any other converted. Buffers
            stay as they are: what training computed of them (rotary tables) is what it trains with.
        instead: what attributes of its modules shall be in the twin, by the `id` of what they are.

    Raises:
        HostError: a module's forward was replaced on the object, so that a twin would run the training's own.
    """
    known: dict[int, Any] = dict(instead or {})
    made: Any = _twin(model, dtype, known, outermost=True)
    return made.eval()


def _twin(module: Any, dtype: Any, known: dict[int, Any], *, outermost: bool = False) -> Any:
    if id(module) in known:
        return known[id(module)]
    own = vars(module)
    if _OWN_FORWARD in own and not outermost:
        raise HostError(
            f"the forward of a {type(module).__name__} was replaced on the object itself, so it cannot be run beside "
            "the training: replace it in its class"
        )
    made = known[id(module)] = object.__new__(type(module))
    kept = {name: known.get(id(value), value) for name, value in own.items() if name != _OWN_FORWARD}
    # hooks are the training's
    vars(made).update({name: type(kept[name])() if _is_hooks(name, kept[name]) else kept[name] for name in kept})
    vars(made).update(
        _compiled_call_impl=None,
        _parameters={name: _parameter(one, dtype, known) for name, one in module._parameters.items()},
        _buffers=dict(module._buffers),
        _modules={name: None if one is None else _twin(one, dtype, known) for name, one in module._modules.items()},
        _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
    )
    return made


def _is_hooks(name: str, value: Any) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _parameter(parameter: Any, dtype: Any, known: dict[int, Any]) -> Any:
    if parameter is None:
        return None
    if id(parameter) not in known:
        held = parameter.detach()
        held = held.to(dtype) if held.is_floating_point() else held
        known[id(parameter)] = torch.nn.Parameter(held, requires_grad=False)
    return known[id(parameter)]


def eager(model: Any) -> dict[int, Any]:
    """Configs of a model's modules with eager attention, by the `id` of what they are in the training.

    transformers' modules look their attention up in their config when they run.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is None or id(config) in found:
            continue
        found[id(config)] = other = copy.deepcopy(config)
        for one in (other, getattr(other, "transformer_layer_config", None)):
            if one is not None:
                one._attn_implementation = "eager"
    return found


def unwrapped(model: Any, kind: type, called: str) -> tuple[Any, bool]:
    """The module of a kind inside DistributedDataParallel, FSDP, torch.compile or nothing, and whether it was compiled.

    Args:
        model: what trains.
        kind: the trainer's class.
        called: what `recording()` takes, for the sentence that refuses another.

    Raises:
        UsageError: there is none.
    """
    inner, compiled = model, False
    while not isinstance(inner, kind):
        original = getattr(inner, "_orig_mod", None)
        compiled = compiled or original is not None
        inner = original or getattr(inner, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise UsageError(f"recording() takes {called}, or a wrapper around one, not {type(model).__name__}")
    return inner, compiled


def whole(draft: Any) -> bool:
    """Whether this process holds the draft's parameters as they are, not parts of them (FSDP)."""
    parts = any(hasattr(one, "full_tensor") or not one.numel() for one in draft.parameters())
    return not parts and draft.fc.weight.ndim == 2
