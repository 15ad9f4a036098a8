"""A trainer as a subject of `eagle_trace.testing.conformance`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.recording.hosts import Host


class Trained:
    """A trainer's forward of one draft.

    Args:
        host: the trainer.
        options: what each recording is asked, beside what the kit varies (`eagle_trace_training.record.TrainOptions`).
    """

    side = "train"

    def __init__(self, host: Host, **options: Any) -> None:
        self.name = host.name
        self._host = host
        self._options = options

    def answer(self) -> None:
        """Recording runs a forward of its own: there is no other to compare with."""

    def record(self, out: Path, **options: Any) -> None:
        """A forward, recorded."""
        self._host.record(out=out, **self._options, **options)

    def hooks(self) -> None:
        """They hang in a draft that is loaded for each recording."""
