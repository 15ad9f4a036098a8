"""A target and a draft that a server is to load, whichever server it is."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.checkpoints import class_names, read_config, text_config
from eagle_trace.errors import CheckpointError

#: files of weights, in the order in which servers look for them
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def exchanged(target: Path) -> str:
    """A question behind what is wrong with a draft, where the target is one; else nothing."""
    try:
        names = class_names(read_config(target))
    except CheckpointError:
        return ""
    drafts = any("eagle" in name.lower() for name in names)
    return "; were --target and --draft given the other way round?" if drafts else ""


def check_fit(title: str, target: Path, draft: Path) -> None:
    """Refuse a draft without weights, and one that is fed features of another width than the target's.

    Only what must fail is refused here: a draft that loads and computes garbage is what a recording is for.

    Raises:
        CheckpointError: it is one of these, or a folder holds no model.
    """
    if not any(any(draft.glob(pattern)) for pattern in WEIGHTS):
        raise CheckpointError(
            f"the draft {draft} has no weights: {title} loads {WEIGHTS[0]}, else {WEIGHTS[1]}, else {WEIGHTS[2]}"
        )
    config = read_config(draft)
    wide = text_config(read_config(target)).get("hidden_size")
    layer = config.get("transformer_layer_config") or config
    # a draft of another width says what it is fed, and keeps an embedding of its own
    narrow = config.get("target_hidden_size") or layer.get("hidden_size")
    if wide != narrow:
        raise CheckpointError(
            f"target and draft do not fit: the target is {wide} wide, and the draft takes features of {narrow}; "
            "use the target this draft was trained for"
        )
