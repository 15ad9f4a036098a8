"""Every cause known, one checkable hypothesis each (docs/causes.md lists them in words)."""

from __future__ import annotations

from eagle_trace_analysis.causes import (
    attention,
    benign,
    carried,
    d2t,
    embedding,
    fed,
    fed_tokens,
    head,
    layer_ids,
    nonfinite,
    norms,
    parallel,
    parameters,
    positions,
    qkv,
    residual,
    rope,
    router_tipped,
    slots,
    target,
    tokens,
    weights,
)
from eagle_trace_analysis.causes.base import Cause, Outcome

_MODULES = (tokens, fed_tokens, positions, fed, residual, layer_ids, router_tipped, target, parameters, weights, head, embedding, d2t,
            norms, rope, qkv, carried, attention, slots, parallel, nonfinite, benign)  # fmt: skip

#: by name
REGISTRY: dict[str, Cause] = {cause.name: cause for module in _MODULES for cause in module.CAUSES}

__all__ = ["REGISTRY", "Cause", "Outcome"]
