"""What a training command of SpecForge imports, and what is done then; imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle_trace_training.arm import begin_at_first_call


def _strategy_ready(module: Any) -> None:
    # not the model's own call: what it is given lacks the first tokens, which `forward_loss` has
    begin_at_first_call(module.Eagle3TrainStrategy, "eagle_trace_specforge", method="forward_loss")


WATCHED: Mapping[str, Callable[[Any], None]] = {"specforge.training.strategies.base": _strategy_ready}

#: the class that trains and its method that does, by module
TRAINERS: Mapping[str, tuple[str, str]] = {"specforge.training.controller": ("TrainerController", "fit")}
