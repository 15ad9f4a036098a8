"""Recording SGLang: what the entry points name."""

from __future__ import annotations

from eagle_trace_serving.record import attach, record

__all__ = ["attach", "record"]
