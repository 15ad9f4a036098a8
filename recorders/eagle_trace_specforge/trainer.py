"""SpecForge as a `TrainingHost`."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_trace.capture import Array
from eagle_trace.errors import CheckpointError
from eagle_trace_specforge.forward import run
from eagle_trace_specforge.live import LiveModel
from eagle_trace_specforge.load import load_draft
from eagle_trace_specforge.releases import check_release
from eagle_trace_specforge.sites import SiteTap
from eagle_trace_training.documents import pad
from eagle_trace_training.host import TrainingHost
from eagle_trace_training.weights import loading


def changes(dtype: str) -> list[str]:
    """In what the forward that is run differs from training's."""
    return [
        "no loss: the training forward runs without its Triton kernel",
        "attention is sdpa, uncompiled (most recipes train with flex attention): the same sums in another order",
        f"no autocast or FSDP: parameters and activations are {dtype} throughout, as a server holds them",
    ]


@dataclass(frozen=True)
class Captured:
    """One sample of SpecForge's offline capture: `input_ids` [T], `aux_hidden_state` [1, T, 3G], and its goal.

    SpecForge unpickles whatever is in such a file; here nothing but tensors is read.
    """

    file: Path

    @cached_property
    def _held(self) -> Any:
        with loading(f"cannot read {self.file}"):
            if self.file.suffix == ".gz":
                with gzip.open(self.file) as stream:
                    return torch.load(stream, weights_only=True, map_location="cpu")
            return torch.load(self.file, weights_only=True, mmap=True, map_location="cpu")

    def _get(self, name: str) -> Any:
        if not isinstance(self._held, dict) or not isinstance(self._held.get(name), torch.Tensor):
            raise CheckpointError(f"{self.file} holds no {name}: it is not a sample of SpecForge's offline capture")
        return self._held[name]

    @property
    def token_ids(self) -> Array:
        """x_0, x_1, ...: int64 [T]."""
        ids: Array = self._get("input_ids").reshape(-1).long().numpy()
        return ids

    def width(self) -> int:
        """3 * G."""
        return int(self._get("aux_hidden_state").shape[-1])

    def features(self, count: int) -> Any:
        """Features [count, 3 * G]."""
        held = self._get("aux_hidden_state")
        return held.reshape(-1, held.shape[-1])[:count].clone()


def samples(folder: Path) -> Sequence[Captured]:
    """SpecForge's offline samples below a folder."""
    return [Captured(file) for file in sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")])]


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
