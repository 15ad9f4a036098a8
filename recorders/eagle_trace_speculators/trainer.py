"""speculators as a `TrainingHost`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eagle_trace.capture import Array
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.hooks import Hooks
from eagle_trace_speculators.hooks import SiteTap
from eagle_trace_speculators.live import LiveModel
from eagle_trace_speculators.load import is_compiled, load_draft, read_draft_config, uncompiled
from eagle_trace_speculators.params import loaded_params
from eagle_trace_speculators.releases import check_release
from eagle_trace_training.documents import Document, Pack, pack
from eagle_trace_training.host import HungTaps, LiveDraft, LoadedDraft, Receive
from eagle_trace_training.live import Recording
from eagle_trace_training.live import recording as record_live
from eagle_trace_training.weights import stored_dtype


def recording(model: Any, **options: Any) -> Recording:
    """Record the next forwards of a model that speculators trains: ``with recording(model, out="train.trace"): ...``.

    Args:
        model: an `Eagle3DraftModel`, also inside DistributedDataParallel, FSDP or torch.compile.
        options: those of `eagle_trace_training.live.recording`: out, batches, level, dataset and others.
    """
    return record_live(Speculators(), model, **options)


class Speculators:
    """speculators: documents packed along T, eager attention, uncompiled."""

    name = "speculators"
    packages: tuple[str, ...] = ("speculators", "transformers", "torch", "numpy")
    samples_are = "hs_N.safetensors: --features takes compute, serve, or the folder speculators trained from"

    def check(self) -> list[str]:
        """See `check_release`."""
        return check_release()

    def stored_dtype(self, draft: Path) -> str:
        """On-disk name of the dtype of the draft's weights; raises CheckpointError for another kind of folder."""
        read_draft_config(draft)
        return stored_dtype(draft)

    def load(self, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
        """See `load_draft`."""
        return load_draft(self, draft, target, dtype, device)

    def changes(self, dtype: str) -> list[str]:
        """In what the forward that is run differs from training's."""
        changes = [
            "attention is eager (training uses flex attention): the same sums in another order",
            f"no autocast: parameters and activations are {dtype} throughout, as a server holds them",
            "positions start at 0 as in serving (training: at 1): a constant shift changes nothing under RoPE",
        ]
        if is_compiled():
            changes.append("the forward was run uncompiled (speculators compiles it on CUDA)")
        return changes

    def params(self, model: Any, stored: Set[str] | None) -> Iterator[dict[str, Any]]:
        """See `loaded_params`."""
        return loaded_params(model, stored)

    def sites(self, hooks: Hooks, model: Any, receive: Receive) -> HungTaps:
        """See `SiteTap`."""
        return SiteTap(hooks, model, receive)

    def packs(self, documents: Iterable[Document], rows: int) -> Iterator[Pack]:
        """Documents side by side along T, as training packs them."""
        return pack(documents, rows)

    def forward(self, model: Any, pack: Pack, hidden_states: Any) -> None:
        """The model's forward, not compiled: a compiled one would trace the hooks away."""
        device = hidden_states.device

        def batch(rows: Any) -> Any:
            return torch.from_numpy(rows).long().to(device)[None]

        uncompiled(type(model).forward)(
            model,
            hidden_states=hidden_states[None],
            input_ids=batch(pack.token_ids),
            document_ids=batch(pack.document_ids),
            position_ids=batch(pack.positions),
            ttt_steps=pack.steps,
        )

    def samples(self, folder: Path) -> Sequence[HiddenStates]:
        """The folder's hs_N.safetensors, or those of its hidden_states; N is their row in the training dataset."""
        files = sorted(folder.glob("hs_*.safetensors")) or sorted((folder / "hidden_states").glob("hs_*.safetensors"))
        return [HiddenStates(file, np.asarray(_read(file, "token_ids")).astype(np.int64)) for file in files]

    def live(self, model: Any) -> LiveDraft:
        """See `LiveModel`."""
        return LiveModel(self, model)


@dataclass(frozen=True)
class HiddenStates:
    """One hs_N.safetensors: `token_ids` [T] and `hidden_states` [T, n + 1, G].

    The last of the n + 1 layers is the target's final output, which training takes as its goal and does not feed.
    """

    file: Path
    token_ids: Array

    def width(self) -> int:
        """n * G."""
        with safe_open(self.file, framework="pt") as tensors:
            _, layers, hidden = tensors.get_slice("hidden_states").get_shape()
        return int((layers - 1) * hidden)

    def features(self, count: int) -> Any:
        """Features [count, n * G]."""
        return _read(self.file, "hidden_states", rows=count)[:, :-1].flatten(1)


def _read(file: Path, name: str, rows: int | None = None) -> Any:
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(name)[:rows]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {name} from {file}: {error}") from error
