"""A training of SpecForge's on a CPU: its own reader, collator, target head, `forward_loss` and backward.

One thing is replaced: `LogSoftmaxLoss`, a Triton kernel, by the reference loss beside it, which like the kernel writes
the gradient into the logits' own storage.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.tracker import Tracker
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerController, TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from specforge.training.tracking import TrackerLogger

from eagle_trace_specforge.load import load_draft
from tests.support.pairs import TARGET

STEPS = 3


class InPlaceLoss(torch.autograd.Function):
    """The reference loss; its backward leaves the gradient where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, mask: Any) -> Any:
        """The loss."""
        ctx.save_for_backward(logits.detach(), target, mask)
        return _compute_loss(logits, target, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient of the logits, in their storage."""
        logits, target, mask = ctx.saved_tensors
        slope = (torch.softmax(logits.float(), -1) * target.sum(-1, keepdim=True) - target) * mask
        logits.copy_(gradients[0] * slope / (logits.shape[0] * logits.shape[1]))
        return logits, None, None


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """The loss as above, and nothing compiled."""
    original = eagle3.LogSoftmaxLoss
    eagle3.LogSoftmaxLoss = InPlaceLoss
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        eagle3.LogSoftmaxLoss = original


def strategy(draft: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The draft as SpecForge trains it, with the demo target's head beside it."""
    indexed = folder / "target"
    shutil.copytree(TARGET, indexed)
    names = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(names))
    head = TargetHead.from_pretrained(str(indexed), lm_head_key="model.embed_tokens.weight").to(dtype)
    model = load_draft(draft, TARGET, "float32", "cpu").model
    model.freeze_embedding()
    # as SpecForge does it, rotary tables and their frequencies included
    return Eagle3TrainStrategy(eagle3.OnlineEagle3Model(model.to(dtype).train(), length=STEPS), target_head=head)


def batch(samples: Path, *names: str) -> Any:
    """The named samples, padded to one batch as SpecForge's collator does it."""
    files = [samples / f"{name}.ckpt" for name in names]
    collated = DataCollatorWithPadding()([normalize_offline_sample(load_feature_file(str(one)), 2048) for one in files])
    tensors = {name: tensor for name, tensor in collated.items() if tensor is not None}
    return TrainBatch(list(names), "eagle3", tensors, {"target_repr": "hidden_state"})


def gradients(strategy: Any, given: Any) -> dict[str, Any]:
    """Loss and gradients of one batch."""
    strategy.eagle3_model.zero_grad()
    step = strategy.forward_loss(given)
    step.loss.backward()
    found = {name: one.grad for name, one in strategy.eagle3_model.named_parameters() if one.grad is not None}
    return copy.deepcopy(found | {"loss": step.loss.detach()})


def controller(strategy: Any, folder: Path, tracker: Any, *, accumulation: int = 2) -> Any:
    """SpecForge's own `TrainerController` of a strategy, logging each optimizer step to a tracker."""
    trained = [one for one in strategy.eagle3_model.parameters() if one.requires_grad]
    backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=lambda _: torch.optim.AdamW(trained, lr=1e-3))
    backend.prepare_model(strategy.eagle3_model, wrap=False)
    core = TrainerCore(strategy, backend, accumulation_steps=accumulation)
    return TrainerController(
        core, run_id="run", output_dir=str(folder), log_interval=1, logger=TrackerLogger(tracker), max_steps=2
    )


class Tracked(Tracker):
    """A tracker of SpecForge's that, as W&B, takes nothing for a step that it was given already."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SimpleNamespace(), str(folder))
        self.rows: dict[int, dict[str, Any]] = {}
        self.refused: list[int] = []

    @classmethod
    def validate_args(cls, parser: Any, args: Any) -> None:
        """None are needed."""

    def log(self, log_dict: dict[str, Any], step: int | None = None) -> None:
        """Keep it, unless its step lies behind."""
        if step is None or step <= max(self.rows, default=-1):
            self.refused.append(-1 if step is None else step)
            return
        self.rows[step] = dict(log_dict)

    def close(self) -> None:
        """Nothing to be closed."""
