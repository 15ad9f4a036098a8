"""The reference forward as a `TrainingHost`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from eagle_trace.errors import UsageError
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.params import parameter_row
from eagle_trace_reference.host import CLASS
from eagle_trace_reference.load import load_draft, read_draft
from eagle_trace_reference.sites import SiteTap
from eagle_trace_training.documents import Document, Pack, pack
from eagle_trace_training.host import HungTaps, LiveDraft, LoadedDraft, Receive, Sample
from eagle_trace_training.weights import stored_dtype


class ReferenceForward:
    """Our own forward of a draft with latent attention: documents packed along T, keys and values expanded."""

    name = "reference"
    packages: tuple[str, ...] = ("torch", "transformers", "numpy")
    samples_are = "training data: no trainer belongs to the reference forward, --features takes compute or serve"

    def check(self) -> list[str]:
        """Nothing to be warned of: it comes with this release of eagle-trace."""
        return []

    def stored_dtype(self, draft: Path) -> str:
        """On-disk name of the dtype of the draft's weights; raises CheckpointError for another kind of folder."""
        read_draft(draft)
        return stored_dtype(draft)

    def load(self, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
        """See `load_draft`."""
        return load_draft(self, draft, target, dtype, device)

    def changes(self, dtype: str) -> list[str]:
        """What a reader must know: that no trainer computed this."""
        return [
            f"the forward is eagle-trace's own reference of {CLASS}, in plain torch, and not a trainer's: what a "
            "trainer computes otherwise than the draft's config says is not seen here",
            f"no autocast: parameters and activations are {dtype} throughout, as a server holds them",
        ]

    def params(self, model: Any, stored: Set[str] | None) -> Iterator[dict[str, Any]]:
        """Rows of params.parquet; the names are the canonical ones."""
        for name, tensor in model.state_dict().items():
            yield parameter_row(name, name, tensor, in_checkpoint=None if stored is None else name in stored)

    def sites(self, hooks: Hooks, model: Any, receive: Receive) -> HungTaps:
        """See `SiteTap`."""
        return SiteTap(hooks, model, receive)

    def packs(self, documents: Iterable[Document], rows: int) -> Iterator[Pack]:
        """Documents side by side along T."""
        return pack(documents, rows)

    def forward(self, model: Any, pack: Pack, hidden_states: Any) -> None:
        """See `LatentDraft.forward`."""

        def rows(numbers: Any) -> Any:
            return torch.from_numpy(numbers).long().to(hidden_states.device)

        model(rows(pack.token_ids), rows(pack.document_ids), rows(pack.positions), hidden_states, pack.steps)

    def samples(self, folder: Path) -> Sequence[Sample]:  # noqa: ARG002 (the protocol's name)
        """None: there is no trainer whose data it could be."""
        return []

    def live(self, model: Any) -> LiveDraft:  # noqa: ARG002 (the protocol's name)
        """Raises UsageError: nothing trains with it."""
        raise UsageError("the reference forward trains nothing: give --draft, and no training command")
