"""One forward of the draft over a pack, with the rows of every site that the pack asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from eagle_trace.capture import Array
from eagle_trace.errors import HostError
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.hooks import Hooks
from eagle_trace.sites import fused_slices
from eagle_trace_speculators.hooks import SiteTap
from eagle_trace_speculators.load import DTYPES, LoadedDraft
from eagle_trace_training.documents import Pack

#: receives (step, site, rows [captured rows, W]) of every value site
Take = Callable[[int, str, Array], None]
Shapes = dict[int, list[dict[str, Any]]]

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
            self._tap = SiteTap(self._hooks, self._draft.model, self._receive)
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
        hidden_states = features.to(device=device, dtype=DTYPES[self._dtype])[None]
        with computing_in(self._dtype):
            self._given(hidden_states)
            self._tap.restart()
            self._draft.forward(
                hidden_states=hidden_states,
                input_ids=torch.from_numpy(pack.token_ids).long().to(device)[None],
                document_ids=torch.from_numpy(pack.document_ids).long().to(device)[None],
                position_ids=torch.from_numpy(pack.positions).long().to(device)[None],
                ttt_steps=pack.steps,
            )
        self._take = None
        self._check_fed(pack)
        return self._shapes

    def _given(self, hidden_states: Any) -> None:
        for name, columns in fused_slices(hidden_states.shape[-1], self._draft.hidden_size):
            self._receive(0, name, hidden_states[..., columns])
        self._receive(0, "fused", hidden_states)

    def _receive(self, step: int, site: str, tensor: Any) -> None:
        if self._take is None:
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
                    raise HostError(
                        f"this version of speculators feeds another {site} at step {step} than "
                        "the one this recorder was written for (0.9.0): install that one, or report it"
                    )
