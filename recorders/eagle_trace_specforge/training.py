"""A training of SpecForge's seen from outside: its `TrainerController`, or a model that a loop of one's own trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specforge.training.controller import TrainerController
from specforge.training.tracking import TrackerLogger

from eagle_trace_specforge.live import LiveModel
from eagle_trace_specforge.trainer import TRAINER
from eagle_trace_training.beside import Beside
from eagle_trace_training.host import Training

logger = logging.getLogger("eagle_trace")


def training(trainer: Any) -> Training:
    """See `Training`.

    Args:
        trainer: a `TrainerController` or the `Trainer` that holds one; or an `Eagle3TrainStrategy` or
            `OnlineEagle3Model`, also inside DistributedDataParallel.

    Raises:
        UsageError: there is no EAGLE-3 draft in it.
    """
    controller = getattr(trainer, "_controller", trainer)
    if not isinstance(controller, TrainerController):
        called = getattr(trainer, "eagle3_model", trainer)
        return Training(TRAINER, LiveModel(trainer), called, None, _say)
    called = controller.core.strategy.trainable_module()
    live = LiveModel(called)
    tracker = getattr(controller.logger, "tracker", None)
    if isinstance(controller.logger, TrackerLogger) and tracker is not None:
        beside = Beside(tracker)
        return Training(TRAINER, live, called, lambda: int(controller.global_step), beside.log, beside.close)
    return Training(TRAINER, live, called, lambda: int(controller.global_step), _say)


def _say(values: Mapping[str, float | str], step: int) -> None:
    """No tracker: a line, as SpecForge prints its own metrics then."""
    logger.info("step %d: %s", step, dict(values))
