"""Which of the engine's classes serves a draft: each has its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.engines.base import Engine
from eagle_trace_analysis.engines.sglang.kinds import loads_kind


def other_class(config: Mapping[str, Any]) -> Engine | None:
    """The tables of another class than the llama one, if a draft's flat config names it."""
    from eagle_trace_analysis.engines.sglang import latent

    return latent if loads_kind("latent", config) else None
