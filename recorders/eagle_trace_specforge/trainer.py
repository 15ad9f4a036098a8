"""SpecForge as a `TrainingHost`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_trace_specforge.forward import run
from eagle_trace_specforge.live import LiveModel
from eagle_trace_specforge.load import load_draft
from eagle_trace_specforge.releases import check_release
from eagle_trace_specforge.sites import SiteTap
from eagle_trace_training.documents import pad
from eagle_trace_training.host import TrainingHost
from eagle_trace_training.samples import TorchSample


def changes(dtype: str) -> list[str]:
    """In what the forward that is run differs from training's."""
    return [
        "no loss: the training forward runs without its Triton kernel",
        "attention is sdpa, uncompiled (most recipes train with flex attention): the same sums in another order",
        f"no autocast or FSDP: parameters and activations are {dtype} throughout, as a server holds them",
    ]


def samples(folder: Path) -> Sequence[TorchSample]:
    """SpecForge's offline samples below a folder."""
    files = sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")])
    return [
        TorchSample(file, "input_ids", "aux_hidden_state", of="a sample of SpecForge's offline capture")
        for file in files
    ]


#: documents padded on the right, as SpecForge's collator does it (it does not pack), sdpa attention, uncompiled
TRAINER = TrainingHost(
    name="specforge",
    packages=("specforge", "transformers", "torch", "numpy"),
    samples_are="*.ckpt samples: --features takes compute, serve, or the folder that SpecForge trained from",
    check=check_release,
    load=load_draft,
    changes=changes,
    sites=SiteTap,
    forward=run,
    live=LiveModel,
    packs=pad,
    samples=samples,
)
