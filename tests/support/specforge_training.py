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
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.training.strategies.base import Eagle3TrainStrategy

from eagle_trace_specforge.trainer import SpecForge
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
    model = SpecForge().load(draft, TARGET, "float32", "cpu").model
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
