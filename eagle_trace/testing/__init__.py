"""For whoever writes a recorder of another host: `conformance` runs it through the promises of the trace format."""

from __future__ import annotations

from eagle_trace.testing.conformance import Subject, conformance

__all__ = ["Subject", "conformance"]
