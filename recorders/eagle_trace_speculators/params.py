"""Parameters of the draft as speculators loaded them; its names are the canonical ones."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row

#: training's own targets, no part of the draft forward and never in a checkpoint
NOT_DRAFT = ("verifier_lm_head.", "verifier_norm.")


def draft_tensors(model: Any) -> dict[str, Any]:
    """Parameters and vocabulary maps of an `Eagle3DraftModel` by name, without training's own targets."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(NOT_DRAFT)}


def loaded_params(model: Any, stored: Set[str] | None) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet.

    Args:
        model: the loaded draft.
        stored: names of the tensors in the checkpoint, None for a model in training, which has none.
    """
    for name, tensor in draft_tensors(model).items():
        in_checkpoint = None if stored is None else name in stored
        yield parameter_row(name, canonical_name(name), tensor, in_checkpoint=in_checkpoint)
