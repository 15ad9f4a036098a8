"""Trainers: what each writes into a checkpoint, and what it means by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace.errors import UsageError
from eagle_trace_analysis.trainers import angelslim, eagle, modelopt, specforge, speculators, torchspec
from eagle_trace_analysis.trainers.base import Doubt, Folder, Marks, Trainer, Training

#: by the name a user knows it by
TRAINERS: Mapping[str, Trainer] = {
    "speculators": speculators, "specforge": specforge, "modelopt": modelopt, "torchspec": torchspec,
    "angelslim": angelslim, "eagle": eagle,
}  # fmt: skip


def trainer_of(config: Mapping[str, Any]) -> Trainer | None:
    """The trainer whose own format a draft's config is in; None for the flat config of a server."""
    return next((trainer for trainer in TRAINERS.values() if trainer.recognises(config)), None)


def told_by(folder: Folder) -> tuple[Trainer, Marks] | None:
    """The trainer that left a folder, and by what it was told; None if nothing known here says so."""
    told = [(trainer, marks) for trainer in TRAINERS.values() if (marks := trainer.marks(folder)) is not None]
    return max(told, key=lambda one: (one[1].sure, len(one[1].why)), default=None)


def trainer_named(text: str) -> tuple[Trainer, str | None]:
    """A trainer and its release, from ``specforge`` or ``specforge==0.2.0``.

    Raises:
        UsageError: none is called so.
    """
    name, _, release = text.partition("==")
    if name not in TRAINERS:
        raise UsageError(f"no trainer is called {name!r}: those known here are {', '.join(TRAINERS)}")
    return TRAINERS[name], release or None


__all__ = [
    "TRAINERS", "Doubt", "Folder", "Marks", "Trainer", "Training", "speculators", "told_by", "trainer_named",
    "trainer_of",
]  # fmt: skip
