"""SpecForge's training forward with its own loop, shifts, masks and positions; the loss is the only thing left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as eagle3

from eagle_trace.recording.hooks import Hooks
from eagle_trace_training.documents import Pack


class _WithoutLoss(eagle3.OnlineEagle3Model):  # the loss is a Triton kernel
    def _acc_and_loss(self, **_: Any) -> tuple[None, ...]:
        return (None,) * 7


def _no_teacher(*, target: Any, t2d: Any, loss_mask: Any, length: int) -> tuple[Any, ...]:  # noqa: ARG001 (its names)
    """Stands in for `_compute_target_p_padded`: targets as narrow as can be, which are sliced and read by nobody."""
    padded = torch.zeros(loss_mask.shape[0], loss_mask.shape[1] + length, 1, device=loss_mask.device)
    return padded, padded, padded[..., 0].long(), loss_mask


@contextlib.contextmanager
def _masks_in(dtype: Any) -> Iterator[None]:
    """The causal mask is built in torch's default dtype and would overflow in a wider one."""
    default = torch.get_default_dtype()
    if dtype is torch.float64:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def run(draft: Any, pack: Pack, hidden_states: Any) -> None:
    """All steps of a padded pack, and one more, which shows the last carry.

    Args:
        draft: a `LlamaForCausalLMEagle3` with sdpa attention.
        pack: documents padded to [B, T].
        hidden_states: features [B * T, n * G].
    """
    shape, device = (len(pack.documents), len(pack) // len(pack.documents)), hidden_states.device
    model = _WithoutLoss(draft, length=pack.steps + 1, attention_backend="sdpa")
    with Hooks() as hooks, _masks_in(hidden_states.dtype), torch.compiler.set_stance("force_eager"):
        hooks.replace(eagle3, "_compute_target_p_padded", _no_teacher)
        model(
            input_ids=torch.from_numpy(pack.token_ids).long().to(device).view(shape),
            attention_mask=torch.from_numpy(pack.document_ids >= 0).long().to(device).view(shape),
            target=None,
            loss_mask=torch.ones(*shape, 1, device=device),
            hidden_states=hidden_states.view(*shape, -1),
        )
