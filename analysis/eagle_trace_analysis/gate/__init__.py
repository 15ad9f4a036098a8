"""What a continuous build asks of a comparison: no accept length lost, and nothing worse than before."""

from eagle_trace_analysis.gate.gate import gated, worse_than

__all__ = ["gated", "worse_than"]
