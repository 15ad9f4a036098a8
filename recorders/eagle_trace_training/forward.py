"""One forward of the draft over a pack, with the rows of every site that the pack asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from eagle_trace.capture import Array
from eagle_trace.errors import HostError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.hooks import Hooks
from eagle_trace.sites import fused_slices
from eagle_trace_training.documents import Pack
from eagle_trace_training.host import HungTaps, LoadedDraft
from eagle_trace_training.numerics import DTYPES, computing_in

#: receives (step, site, rows [captured rows, W]) of every value site
Take = Callable[[int, str, Array], None]
Shapes = dict[int, list[dict[str, Any]]]

INTEGER_SITES = ("token", "position")


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
        draft: the loaded draft.
        dtype: on-disk name of the dtype the model computes in.

    `guesses` holds, after a run, the logits of the pack's guesses [rows, V] by step.
    """

    def __init__(self, draft: LoadedDraft, dtype: str) -> None:
        self._draft = draft
        self._dtype = dtype
        self._hooks = Hooks()
        self._index: list[Any] = []
        self._take: Take | None = None
        self._shapes: Shapes = {}
        self._fed: dict[tuple[int, str], Array] = {}
        self._guess_index: list[Any] = []
        self.guesses: dict[int, Array] = {}

    def __enter__(self) -> PackRunner:
        try:
            self.tap = self._draft.host.sites(self._hooks, self._draft.model, self._receive)
        except BaseException:
            self._hooks.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def run(self, pack: Pack, features: Any, take: Take) -> Shapes:
        """Run all steps of a pack.

        Args:
            pack: the documents.
            features: target features [T, n * G], zeros where a row has none.
            take: receives the captured rows of every value site, as the forward reaches it.

        Returns:
            For each step the sites seen with the forward's shape [T, W] and dtype, in the order of the
            forward.

        Raises:
            HostError: the forward fed another token, or rotated by another position, than the pack says.
        """
        device = self._draft.model.fc.weight.device
        self._index = [torch.from_numpy(pack.index(step)).to(device) for step in range(pack.steps)]
        guesses = [pack.index(step, guesses=True) for step in range(pack.steps)]
        self._guess_index, self.guesses = [torch.from_numpy(one).to(device) for one in guesses], {}
        self._take, self._shapes, self._fed = take, {step: [] for step in range(pack.steps)}, {}
        hidden_states = features.to(device=device, dtype=DTYPES[self._dtype])
        with computing_in(self._dtype):
            self._given(hidden_states)
            self.tap.restart()
            self._draft.host.forward(self._draft.model, pack, hidden_states)
        self._take = None
        self._check_fed(pack)
        return self._shapes

    def _given(self, hidden_states: Any) -> None:
        for name, columns in fused_slices(hidden_states.shape[-1], self._draft.hidden_size):
            self._receive(0, name, hidden_states[..., columns])
        self._receive(0, "fused", hidden_states)

    def _receive(self, step: int, site: str, tensor: Any) -> None:
        # what one forward computes beyond its last step shows the last carry only; and a wrapped function of the
        # trainer's module is heard by all runners
        if self._take is None or step >= len(self._index):
            return
        integer = site in INTEGER_SITES
        flat = tensor.reshape(-1) if integer else tensor.reshape(-1, tensor.shape[-1])
        rows = to_array(flat.index_select(0, self._index[step]))
        if integer:
            self._fed[step, site] = rows
            return
        if site == "logits" and len(self._guess_index[step]):
            self.guesses[step] = to_array(flat.index_select(0, self._guess_index[step]))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._shapes[step].append({"site": site, "shape": list(flat.shape), "dtype": dtype})
        self._take(step, site, rows)

    def _check_fed(self, pack: Pack) -> None:
        for step in range(pack.steps):
            expected = pack.rows(step, 0)
            for site, column in (("token", expected.token_id), ("position", expected.position)):
                if not np.array_equal(self._fed[step, site], column):
                    raise feeds_another(self._draft.host.name, site, step)
