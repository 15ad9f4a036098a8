"""SpecForge as a `TrainingHost`."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_trace.capture import Array
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.params import parameter_row
from eagle_trace_specforge.forward import run
from eagle_trace_specforge.live import LiveModel
from eagle_trace_specforge.load import load_draft
from eagle_trace_specforge.published import head_config
from eagle_trace_specforge.releases import check_release
from eagle_trace_specforge.sites import SiteTap
from eagle_trace_training.documents import Document, Pack, pad
from eagle_trace_training.host import HungTaps, LiveDraft, LoadedDraft, Receive
from eagle_trace_training.live import Recording
from eagle_trace_training.live import recording as record_live
from eagle_trace_training.weights import first_line, stored_dtype


def recording(model: Any, **options: Any) -> Recording:
    """Record the next forwards of a model that SpecForge trains: ``with recording(model, out="train.trace"): ...``.

    Args:
        model: an `Eagle3TrainStrategy` or its `OnlineEagle3Model`, also inside DistributedDataParallel or FSDP.
        options: those of `eagle_trace_training.live.recording`: out, batches, level, dataset and others.
    """
    return record_live(SpecForge(), model, **options)


class SpecForge:
    """SpecForge: documents padded to [B, T], sdpa attention, uncompiled."""

    name = "specforge"
    packages: tuple[str, ...] = ("specforge", "transformers", "torch", "numpy")
    samples_are = "*.ckpt samples: --features takes compute, serve, or the folder that SpecForge trained from"

    def check(self) -> list[str]:
        """See `check_release`."""
        return check_release()

    def stored_dtype(self, draft: Path) -> str:
        """On-disk name of the dtype of the draft's weights; raises CheckpointError for another kind of folder."""
        head_config(draft)
        return stored_dtype(draft)

    def load(self, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
        """See `load_draft`."""
        return load_draft(self, draft, target, dtype, device)

    def changes(self, dtype: str) -> list[str]:
        """In what the forward that is run differs from training's."""
        return [
            "no loss: the training forward runs without its Triton kernel",
            "attention is sdpa, uncompiled (most recipes train with flex attention): the same sums in another order",
            f"no autocast or FSDP: parameters and activations are {dtype} throughout, as a server holds them",
        ]

    def params(self, model: Any, stored: Set[str] | None) -> Iterator[dict[str, Any]]:
        """Rows of params.parquet, by SpecForge's names."""
        for name, tensor in model.state_dict().items():
            there = None if stored is None else name in stored
            yield parameter_row(name, canonical_name(name), tensor, in_checkpoint=there)

    def sites(self, hooks: Hooks, model: Any, receive: Receive) -> HungTaps:
        """See `SiteTap`."""
        return SiteTap(hooks, model, receive)

    def packs(self, documents: Iterable[Document], rows: int) -> Iterator[Pack]:
        """Documents padded on the right, as SpecForge's collator does it; it does not pack."""
        return pad(documents, rows)

    def forward(self, model: Any, pack: Pack, hidden_states: Any) -> None:
        """See `run`."""
        run(model, pack, hidden_states)

    def samples(self, folder: Path) -> Sequence[Captured]:
        """SpecForge's offline samples below a folder."""
        return [Captured(file) for file in sorted([*folder.rglob("*.ckpt"), *folder.rglob("*.ckpt.gz")])]

    def live(self, model: Any) -> LiveDraft:
        """See `LiveModel`."""
        return LiveModel(self, model)


@dataclass(frozen=True)
class Captured:
    """One sample of SpecForge's offline capture: `input_ids` [T], `aux_hidden_state` [1, T, 3G], and its goal.

    SpecForge unpickles whatever is in such a file; here nothing but tensors is read.
    """

    file: Path

    @cached_property
    def _held(self) -> Any:
        try:
            if self.file.suffix == ".gz":
                with gzip.open(self.file) as stream:
                    return torch.load(stream, weights_only=True, map_location="cpu")
            return torch.load(self.file, weights_only=True, mmap=True, map_location="cpu")
        except Exception as error:
            # whatever the pickle format makes of a file that was cut off or is another's
            raise CheckpointError(f"cannot read {self.file}: {first_line(error)}") from error

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
