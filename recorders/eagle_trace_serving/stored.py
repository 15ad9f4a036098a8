"""Which tensors a checkpoint folder stores, by the names that a trace has for them."""

from __future__ import annotations

from pathlib import Path

from eagle_trace.families import EAGLE3, EAGLE3_MLA, Family
from eagle_trace.recording.names import canonical_name, fills, latent_filled

#: what torch also saves beside a model, and a server leaves
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


def checkpoint_names(draft: Path) -> dict[str, str]:
    """Tensor names stored in a checkpoint folder, by canonical name; in the files of the kind that servers read."""
    for pattern, read in (("*.safetensors", _safetensors_names), ("*.bin", _torch_names), ("*.pt", _torch_names)):
        files = sorted(draft.glob(pattern))
        if files:
            found = [name for file in files if not file.name.endswith(NOT_WEIGHTS) for name in read(file)]
            return {canonical_name(name): name for name in found}
    return {}


def _safetensors_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        return list(tensors.keys())


def _torch_names(file: Path) -> list[str]:
    import torch

    # the server has read these files so already; on the meta device no number is read again
    return [str(name) for name in torch.load(file, map_location="meta", weights_only=True)]


def filled_by(draft: Path, family: Family = EAGLE3) -> dict[str, tuple[str, ...]]:
    """By stored name, the trained names of the parameters it is loaded into, should a model of the family have them."""
    names = checkpoint_names(draft).values()
    return latent_filled(names) if family is EAGLE3_MLA else {name: fills(name) for name in names}
