"""Parameters of the draft as SGLang really holds them, under speculators' names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.params import parameter_row
from eagle_trace_serving.params import held_params


def used_name(name: str) -> str | None:
    """The trained parameter that one of the model's is used as, both by canonical name; None if it is never used.

    A layer behind the first starts with `input_layernorm` in speculators. SGLang has it too, but applies `hidden_norm`.
    """
    later = re.fullmatch(r"(layers\.[1-9]\d*)\.(input_layernorm|hidden_norm)\.weight", name)
    if later is None:
        return name
    return f"{later.group(1)}.input_layernorm.weight" if later.group(2) == "hidden_norm" else None


def loaded_params(model: Any, hot_token_id: Any, stored: Set[str]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded draft; see `held_params`.

    Args:
        model: the draft model.
        hot_token_id: the worker's draft-to-target map [draft vocabulary] as ids, or None; recorded as offsets (`d2t`).
        stored: canonical names of the parameters that the checkpoint's tensors fill (`names.fills`).
    """
    yield from held_params(model, stored, used_name)
    if hot_token_id is not None:
        ids = to_array(hot_token_id)
        yield parameter_row("hot_token_id", "d2t", ids - np.arange(len(ids)), in_checkpoint="d2t" in stored)
