"""What the `eagle_trace_train.pth` of an earlier install calls."""

from eagle_trace_training.arm import install

__all__ = ["install"]
