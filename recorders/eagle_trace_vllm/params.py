"""Parameters of the draft as vLLM really holds them, under speculators' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.params import parameter_row
from eagle_trace_serving.params import held_params
from eagle_trace_serving.stored import filled_by

#: what may become the target's own after loading
SHARED = ("embed_tokens.weight", "lm_head.weight")
#: vLLM's own name of d2t
MAP = "draft_id_to_target_id"


def watch(hooks: Hooks, read: Callable[[Any], None]) -> None:
    """Call `read(model)` between the loading of each model's weights and what vLLM makes of them for its kernels.

    On a CPU nothing is left of a linear layer's weight after that: it is packed, and `weight` is empty.
    """
    from vllm.model_executor.model_loader import base_loader

    hooks.precede(base_loader, "process_weights_after_loading", lambda args, _kwargs: read(args[0]))


def used_name(name: str) -> str | None:
    """The trained parameter that one of the model's is used as, both by canonical name; None if it is never used."""
    # a later layer has a `hidden_norm` and never applies it
    return None if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name) else name


def loaded_params(model: Any, draft: Path, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Rows of params.parquet for a loaded draft; see `held_params`.

    Args:
        model: the draft model.
        draft: folder of its checkpoint.
        wanted: whether to read the parameter of a name.
    """
    stored = set().union(*filled_by(draft).values())
    # a head that is the target's tied embedding is listed with duplicates only
    yield from held_params(model, stored, used_name, lambda name: name != MAP and wanted(name), duplicates=True)
    offsets = getattr(model, MAP, None)
    if offsets is not None and wanted(MAP):
        yield parameter_row(MAP, "d2t", offsets, in_checkpoint="d2t" in stored)
