"""speculators as a `TrainingHost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from eagle_trace.capture import Array
from eagle_trace_speculators.live import LiveModel
from eagle_trace_speculators.load import NOT_DRAFT, is_compiled, load_draft, uncompiled
from eagle_trace_speculators.releases import check_release
from eagle_trace_speculators.sites import SiteTap
from eagle_trace_training.documents import Pack
from eagle_trace_training.host import TrainingHost
from eagle_trace_training.weights import loading


def changes(dtype: str) -> list[str]:
    """In what the forward that is run differs from training's."""
    found = [
        "attention is eager (training uses flex attention): the same sums in another order",
        f"no autocast: parameters and activations are {dtype} throughout, as a server holds them",
        "positions start at 0 as in serving (training: at 1): a constant shift changes nothing under RoPE",
    ]
    if is_compiled():
        found.append("the forward was run uncompiled (speculators compiles it on CUDA)")
    return found


def forward(model: Any, pack: Pack, hidden_states: Any) -> None:
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


def samples(folder: Path) -> Sequence[HiddenStates]:
    """The folder's hs_N.safetensors, or those of its hidden_states; N is their row in the training dataset."""
    files = sorted(folder.glob("hs_*.safetensors")) or sorted((folder / "hidden_states").glob("hs_*.safetensors"))
    return [HiddenStates(file, np.asarray(_read(file, "token_ids")).astype(np.int64)) for file in files]


def _read(file: Path, name: str, rows: int | None = None) -> Any:
    with loading(f"cannot read {name} from {file}"), safe_open(file, framework="pt") as tensors:
        return tensors.get_slice(name)[:rows]


#: documents packed along T, eager attention, uncompiled
TRAINER = TrainingHost(
    name="speculators",
    packages=("speculators", "transformers", "torch", "numpy"),
    samples_are="hs_N.safetensors: --features takes compute, serve, or the folder speculators trained from",
    check=check_release,
    load=load_draft,
    changes=changes,
    sites=SiteTap,
    forward=forward,
    live=LiveModel,
    samples=samples,
    not_draft=NOT_DRAFT,
)
