"""Logging beside a trainer, to the tracker that it logs its own metrics to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.recording.hooks import Hooks


class Beside:
    """Logs to a trainer's tracker under names of one's own.

    W&B takes nothing for a step that it was given already, and the trainer logs its own metrics once per step. So what
    belongs to such a step goes along with what the trainer logs next. Numbers only: MLflow takes no words.

    Args:
        tracker: what the trainer logs to, by ``log(values, step=...)``.
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
