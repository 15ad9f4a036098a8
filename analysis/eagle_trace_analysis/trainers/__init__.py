"""Trainers: what each writes into a checkpoint, and what it means by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_trace_analysis.trainers import speculators
from eagle_trace_analysis.trainers.base import Trainer, Training

#: by the name a user knows it by
TRAINERS: Mapping[str, Trainer] = {"speculators": speculators}


def trainer_of(config: Mapping[str, Any]) -> Trainer | None:
    """The trainer whose format a draft's config is in; None for the flat config of a server."""
    return next((trainer for trainer in TRAINERS.values() if trainer.recognises(config)), None)


__all__ = ["TRAINERS", "Trainer", "Training", "speculators", "trainer_of"]
