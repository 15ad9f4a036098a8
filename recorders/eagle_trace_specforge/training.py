"""A training of SpecForge's seen from outside: its `TrainerController`, or a model that a loop of one's own trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specforge.training.controller import TrainerController
from specforge.training.tracking import TrackerLogger

from eagle_trace.recording.hooks import Hooks
from eagle_trace_specforge.live import LiveModel
from eagle_trace_specforge.trainer import SpecForge
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
        return Training(LiveModel(SpecForge(), trainer), called, None, _say)
    called = controller.core.strategy.trainable_module()
    live = LiveModel(SpecForge(), called)
    tracker = getattr(controller.logger, "tracker", None)
    if isinstance(controller.logger, TrackerLogger) and tracker is not None:
        beside = Beside(tracker)
        return Training(live, called, lambda: int(controller.global_step), beside.log, beside.close)
    return Training(live, called, lambda: int(controller.global_step), _say)


def _say(values: Mapping[str, float | str], step: int) -> None:
    """No tracker: a line, as SpecForge prints its own metrics then."""
    logger.info("step %d: %s", step, dict(values))


class Beside:
    """Logs to a tracker of SpecForge's under names of one's own, which its logger would put below ``train/``.

    W&B takes nothing for a step that it was given already, and the trainer logs its own metrics once per step. So what
    belongs to such a step goes along with what the trainer logs next. Numbers only: MLflow takes no words.

    Args:
        tracker: a `specforge.tracker.Tracker`.
    """

    def __init__(self, tracker: Any) -> None:
        self._hooks = Hooks()
        self._last: int | None = None
        self._waiting: dict[str, float] = {}
        self._log = tracker.log
        self._hooks.replace(tracker, "log", self._beside)

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Give the numbers among `values` to the tracker, now or with what it is given next."""
        self._waiting |= {name: value for name, value in values.items() if not isinstance(value, str)}
        if self._last is None or step > self._last:
            self._flush(step)

    def _beside(self, log_dict: dict[str, Any], step: int | None = None) -> None:
        waiting, self._waiting = self._waiting, {}
        self._last = step if step is not None else self._last
        self._log({**log_dict, **waiting}, step=step)

    def _flush(self, step: int) -> None:
        waiting, self._waiting = self._waiting, {}
        self._last = step
        self._log(waiting, step=step)

    def close(self) -> None:
        """Hand over what still waits, and leave the tracker as it was."""
        self._hooks.remove()
        if self._waiting:
            self._flush(self._last + 1 if self._last is not None else 0)
