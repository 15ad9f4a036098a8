"""Engines: what a server does to a checkpoint, one package per server."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_trace.errors import UsageError
from eagle_trace_analysis.engines import sglang, vllm
from eagle_trace_analysis.engines.base import Engine, Gap, Scheme

#: by the name the command line knows it by
ENGINES: Mapping[str, Engine] = {"sglang": sglang, "vllm": vllm}
SGLANG: Engine = sglang


def engine_named(name: str) -> Engine:
    """The engine of a name.

    Raises:
        UsageError: none is called so.
    """
    if name not in ENGINES:
        raise UsageError(f"no engine is called {name!r}: the engines known here are {', '.join(ENGINES)}")
    return ENGINES[name]


def engine_of_host(host: str) -> Engine:
    """The engine that a trace's host is; SGLang, whose flat configs trainers write, for any other."""
    return ENGINES.get(host, SGLANG)


__all__ = ["ENGINES", "SGLANG", "Engine", "Gap", "Scheme", "engine_named", "engine_of_host"]
