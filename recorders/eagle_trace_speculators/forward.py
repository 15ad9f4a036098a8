"""One forward of the draft over a pack, with the rows of every site that the pack asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from eagle_trace.capture import Rows
from eagle_trace.errors import HostError
from eagle_trace.recording.forward import Forward
from eagle_trace.recording.hooks import Hooks
from eagle_trace_speculators.hooks import SiteTap
from eagle_trace_speculators.load import DTYPES, LoadedDraft
from eagle_trace_training.documents import Pack

ROWS = 512
ATTENTION_BYTES = 1 << 30
ONE_THREAD_BELOW = 1024
INTEGER_SITES = ("token", "position")


class _Float64(TorchFunctionMode):
    """Keeps a float64 forward in float64 where the model's code asks for float32 (norms, softmax, rope)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """No gradients; and if `dtype` is float64, no detour through float32 either."""
    with torch.inference_mode():
        if dtype == "float64":
            with _Float64():
                yield
        else:
            yield


@contextmanager
def threads_for(device: str, hidden_size: int) -> Iterator[None]:
    """One thread for small models on a CPU, as many as torch likes for others.

    Threads that wait for each other after every small operation lose more than they win: on a busy machine of
    two cores, a draft of hidden size 128 took more than ten times as long on two threads as on one.
    """
    threads = torch.get_num_threads()
    if device == "cpu" and hidden_size < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def row_budget(heads: int, steps: int, element_bytes: int) -> int:
    """Rows a forward may have: its attention weights, [heads, T, steps * T] a few times over, must fit the
    memory.

    Small packs are also the fast ones: eager attention computes every pair of documents, to mask it away.
    """
    # scores, scores with the mask, softmax in float32 and its result are alive together
    each = 4 * max(4, element_bytes) * heads * steps
    return max(1, min(ROWS, int((ATTENTION_BYTES / each) ** 0.5)))


class PackRunner:
    """Runs packs through a hooked draft; a context manager that takes its hooks off.

    Args:
        draft: the loaded draft.
        dtype: on-disk name of the dtype the model computes in.
    """

    def __init__(self, draft: LoadedDraft, dtype: str) -> None:
        self._draft = draft
        self._dtype = dtype
        self._hooks = Hooks()
        self._forwards: Sequence[Forward] | None = None
        self._guesses: list[tuple[Rows, Any]] = []

    def __enter__(self) -> PackRunner:
        try:
            self._tap = SiteTap(self._hooks, self._draft.model, self._receive)
        except BaseException:
            self._hooks.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def run(self, pack: Pack, features: Any, forwards: Sequence[Forward], guesses: Sequence[tuple[Rows, Any]]) -> None:
        """Run all steps of a pack.

        Args:
            pack: the documents.
            features: target features [T, n * G], zeros where a row has none.
            forwards: each step's; takes what its sites show.
            guesses: for each step rows of which the best ids alone are kept, and their index; [] for none.

        Raises:
            HostError: the forward fed another token, or rotated by another position, than the pack says.
        """
        device = self._draft.model.fc.weight.device
        hidden_states = features.to(device=device, dtype=DTYPES[self._dtype])[None]
        self._forwards = forwards
        self._guesses = [(rows, torch.from_numpy(index).to(device)) for rows, index in guesses]
        try:
            with computing_in(self._dtype):
                forwards[0].take_features(hidden_states)
                self._tap.restart()
                self._draft.forward(
                    hidden_states=hidden_states,
                    input_ids=torch.from_numpy(pack.token_ids).long().to(device)[None],
                    document_ids=torch.from_numpy(pack.document_ids).long().to(device)[None],
                    position_ids=torch.from_numpy(pack.positions).long().to(device)[None],
                    ttt_steps=pack.steps,
                )
        finally:
            self._forwards = None

    def _receive(self, step: int, site: str, tensor: Any) -> None:
        if self._forwards is None:
            return
        forward = self._forwards[step]
        if site in INTEGER_SITES:
            forward.expect(site, tensor, lambda: another_fed(site, step))
            return
        if site == "logits" and self._guesses and len(self._guesses[step][1]):
            rows, index = self._guesses[step]
            forward.take_more_best(rows, tensor.reshape(-1, tensor.shape[-1]).index_select(0, index), 1)
        forward.take(site, tensor)


def another_fed(site: str, step: int) -> HostError:
    """A forward that this recorder was not written for."""
    return HostError(
        f"this version of speculators feeds another {site} at step {step} than the one this recorder was "
        "written for (0.9.0): install that one, or report it"
    )
