"""A training of speculators' seen from outside: its `Trainer`, or a model that a loop of one's own trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from speculators.train.trainer import Trainer

from eagle_trace_speculators.live import LiveModel
from eagle_trace_speculators.trainer import TRAINER
from eagle_trace_training.host import Training

#: where speculators' handlers for TensorBoard, W&B, Trackio and MLflow hang
METRICS = logging.getLogger("speculators.metrics")


def training(trainer: Any) -> Training:
    """See `Training`.

    Args:
        trainer: a `Trainer`, or an `Eagle3DraftModel`, also inside DistributedDataParallel or torch.compile.

    Raises:
        UsageError: there is no EAGLE-3 draft in it.
    """
    if isinstance(trainer, Trainer):
        return Training(TRAINER, LiveModel(trainer.model), trainer.model, lambda: int(trainer.global_step), log)
    return Training(TRAINER, LiveModel(trainer), trainer, None, log)


def log(values: Mapping[str, float | str], step: int) -> None:
    """To speculators' metric logger, as its trainer does it: numbers become curves, words text."""
    METRICS.info(dict(values), extra={"step": step})
