"""What a training command of speculators imports, and what is done then; imports nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle_trace_training.arm import begin_at_first_call, remember_datasets


def _model_ready(module: Any) -> None:
    begin_at_first_call(
        module.Eagle3DraftModel,
        "eagle_trace_speculators",
        wanted=lambda model: getattr(model.config, "speculators_model_type", "eagle3") == "eagle3",
    )


WATCHED: Mapping[str, Callable[[Any], None]] = {
    "speculators.models.eagle3.core": _model_ready,
    "speculators.train.data": lambda module: remember_datasets(module.ArrowDataset),
}

#: the class that trains and its method that does, by module
TRAINERS: Mapping[str, tuple[str, str]] = {"speculators.train.trainer": ("Trainer", "run_training")}
