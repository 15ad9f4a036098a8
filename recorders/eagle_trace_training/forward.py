"""One forward of the draft over a pack, with the rows of every site that the pack asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagle_trace.capture import Rows
from eagle_trace.errors import HostError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.forward import Forward
from eagle_trace.recording.hooks import Hooks
from eagle_trace.sites import ROW_SITES
from eagle_trace_training.documents import Pack
from eagle_trace_training.host import HungTaps, LoadedDraft, TrainingHost
from eagle_trace_training.numerics import DTYPES, computing_in


def say_seen(manifest: Manifest, tap: HungTaps) -> None:
    """Write into the manifest what the forward was seen to compute; what the config claims is kept beside it.

    The diagnosis computes by the manifest's config, and a flag may mean another thing in another release of a trainer.
    """
    if seen := dict(tap.seen):
        config = dict(manifest.draft.get("config") or {})
        as_written = {name: config.get(name) for name in seen}
        manifest.draft |= {"config": config | seen, "as_written": as_written, **seen}


def feeds_another(host: str, site: str, step: int) -> HostError:
    """The error of a forward that feeds another token, or rotates by another position, than its batch says."""
    return HostError(
        f"this version of {host} feeds another {site} at step {step} than the one this recorder was written for: "
        "install a release that docs/support.md names, or report it"
    )


class PackRunner:
    """Runs packs through a hooked draft; a context manager that takes its hooks off.

    Args:
        host: the trainer.
        draft: its draft, loaded.
        dtype: on-disk name of the dtype the model computes in.
    """

    def __init__(self, host: TrainingHost, draft: LoadedDraft, dtype: str) -> None:
        self._host, self._draft = host, draft
        self._dtype = dtype
        self._hooks = Hooks()
        self._forwards: Sequence[Forward] = ()
        self._guesses: list[tuple[Rows, Any, int]] = []

    def __enter__(self) -> PackRunner:
        try:
            self.tap = self._host.sites(self._hooks, self._draft.model, self._receive)
        except BaseException:
            self._hooks.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def run(
        self, pack: Pack, features: Any, forwards: Sequence[Forward], guesses: Sequence[tuple[Rows, Any, int]]
    ) -> None:
        """Run all steps of a pack.

        Args:
            pack: the documents.
            features: target features [T, n * G], zeros where a row has none.
            forwards: each step's; takes what its sites show.
            guesses: for each step rows of which the best ids alone are kept, their index, and how many; [] for none.

        Raises:
            HostError: the forward fed another token, or rotated by another position, than the pack says.
        """
        device = self._draft.model.fc.weight.device
        hidden_states = features.to(device=device, dtype=DTYPES[self._dtype])
        self._guesses = [(rows, torch.from_numpy(index).to(device), count) for rows, index, count in guesses]
        self._forwards = forwards
        try:
            with computing_in(self._dtype):
                forwards[0].take_features(hidden_states)
                self.tap.restart()
                self._host.forward(self._draft.model, pack, hidden_states)
        finally:
            self._forwards = ()

    def _receive(self, step: int, site: str, tensor: Any) -> None:
        # what one forward computes beyond its last step shows the last carry only; and a wrapped function of the
        # trainer's module is heard by all runners
        if step >= len(self._forwards):
            return
        forward = self._forwards[step]
        if site in ROW_SITES:
            forward.expect(site, tensor, lambda: feeds_another(self._host.name, site, step))
            return
        if site == "logits" and self._guesses and len(self._guesses[step][1]):
            rows, index, count = self._guesses[step]
            forward.take_more_best(rows, tensor.reshape(-1, tensor.shape[-1]).index_select(0, index), count)
        forward.take(site, tensor)
