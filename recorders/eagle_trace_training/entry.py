"""A trainer as the entry-point group `eagle_trace.hosts` names it; imports nothing of any trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.errors import HostError
from eagle_trace.recording.hosts import Kind, is_installed
from eagle_trace.store import Place

if TYPE_CHECKING:
    from eagle_trace_training.host import TrainingHost
    from eagle_trace_training.live import Recording


@dataclass(kw_only=True)
class Trainer:
    """A trainer, as the command line sees it (`eagle_trace.recording.hosts.Host`).

    Its package has a module `trainer` with the table `TRAINER` (`TrainingHost`), a module `releases` with a function
    `check_release`, which is asked before that one is imported, and a module `training` if it trains.

    Attributes:
        name, title, module, install: see `Host`.
        package: the one that records it.
        takes: whether a draft's folder is in its own format, as far as its config says.
        form: what a folder that it takes is, as a sentence.
        stands_in: whether it is a forward of our own, which trains nothing.
    """

    name: str
    title: str
    module: str
    install: str
    package: str
    takes: Callable[[Path], bool]
    form: str
    stands_in: bool = False
    kind: Kind = "trainer"

    def table(self) -> TrainingHost:
        """The trainer itself.

        Raises:
            HostError: it is not installed, or its installed release cannot be recorded.
        """
        if not is_installed(self):
            raise HostError(f"{self.title} is not installed here: {self.install}")
        import_module(f"{self.package}.releases").check_release()
        host: TrainingHost = import_module(f"{self.package}.trainer").TRAINER
        return host

    def record(self, **options: Any) -> Place:
        """Feed a draft and leave a sealed trace; the options are those of `eagle_trace_training.record.TrainOptions`.

        Raises:
            HostError: it cannot be recorded; and what `eagle_trace_training.record.record` raises.
        """
        from eagle_trace_training.record import record

        return record(self.table, **options)

    def recording(self, model: Any, **options: Any) -> Recording:
        """Record the next forwards of a model that trains; see `eagle_trace_training.live.recording`."""
        from eagle_trace_training.live import recording

        return recording(self.table(), model, **options)

    def training(self, trainer: Any) -> Any:
        """What goes on in `trainer` (`eagle_trace_training.host.Training`); raises UsageError if it is not its own."""
        return import_module(f"{self.package}.training").training(trainer)
