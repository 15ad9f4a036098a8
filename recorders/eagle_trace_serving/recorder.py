"""The recorder inside SGLang's scheduler process: hangs its hooks when it is ordered to, and takes them off again.

The scheduler's thread runs the hooks; a second thread takes orders from SGLang's main process. Beginning, sealing and
sending have threads of their own, so that neither of the two ever waits for a disk or for another process.

Under tensor parallelism each rank has one of these. All are given the same orders and see the same calls, so their rows
are the same without a word between them.

Whatever goes wrong here ends the recording, is reported, and never reaches SGLang.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import FUSED, canonical_name, fills
from eagle_trace.store import as_place
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording
from eagle_trace_serving.session import Outbox, connect, packed
from eagle_trace_sglang.graphs import has_graphs, hook_graph_boundaries, run_eagerly
from eagle_trace_sglang.layers import draft_layers
from eagle_trace_sglang.params import checkpoint_names, loaded_params
from eagle_trace_sglang.plugin import SESSION
from eagle_trace_sglang.ranks import draft_place, replicas
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.sites import hook_draft, partial_sums, tell_missing

EAGER = (
    "the draft ran eagerly while recording, its CUDA graphs put aside: Python hooks do not run inside a replayed graph"
)
KEPT_GRAPHS = (
    "CUDA graphs were kept: of the draft's extend only what enters and leaves its graph was recorded, of the draft's "
    "steps only the tokens"
)
#: how long a rank that is behind may take to record what rank 0 has recorded
CATCH_UP_SECONDS = 30.0
#: how long a process that ends may take to seal: of the 5 s that are promised, the rest is for all else
LEAVE_SECONDS = 3.0
PACKAGES = ("sglang", "torch", "transformers", "numpy", "eagle-trace")


@dataclass
class _Active:
    """The recording that is going on, under the number that the main process gave it, and its hooks."""

    number: int
    recording: Recording
    hooks: Hooks


class ServeRecorder:
    """Records the draft worker it is attached to, one recording after the other."""

    def __init__(self, worker: Any, connection: Connection) -> None:
        self._worker = worker
        self._model = worker.draft_runner.model
        self._target_width = int(worker.target_worker.model_config.hidden_size)
        self._rank, self._ranks = draft_place(self._model)
        self._connection = connection
        self._outbox = Outbox(connection)
        # held for moments: by whoever takes the recording that is going on, or puts it there
        self._turn = threading.Lock()
        self._active: _Active | None = None
        #: the recording ordered last, and how it was told to end before it had begun
        self._number = 0
        self._early: tuple[dict[str, Any], str | None] | None = None
        self._ending: list[threading.Thread] = []
        self._reading = threading.Lock()
        self._loaded: list[dict[str, Any]] | None = None

    @classmethod
    def attach(cls, worker: Any) -> ServeRecorder:
        """Connect to SGLang's main process, report what was found, and wait for orders in a thread of its own."""
        import pandas  # noqa: F401 (pyarrow imports it with its first array: not while the first recording runs)

        connection = connect("recorder", SESSION)
        if connection is None:
            raise RuntimeError("armed without a session")
        recorder = cls(worker, connection)
        recorder._say("armed", recorder.facts())
        # processes that multiprocessing starts run these and no atexit functions
        Finalize(None, recorder._leave, exitpriority=10)
        threading.Thread(target=recorder._obey, name="eagle-trace-orders", daemon=True).start()
        return recorder

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the server, and only this process knows."""
        from sglang.srt.runtime_context import get_memory, get_spec

        runner, target = self._worker.draft_runner, self._worker.target_worker.model_runner
        mlp = getattr(draft_layers(self._model)[0][1], "mlp", None)
        stored = checkpoint_names(Path(runner.model_config.model_path))
        known = {canonical_name(name) for name, _ in self._model.named_parameters()}
        for whole, parts in FUSED.items():
            known |= {name.replace(whole, part) for name in known if whole in name for part in parts}
        known |= {"d2t", "t2d"}
        return {
            "packages": {name: version(name) for name in PACKAGES},
            "target": str(target.model_config.model_path),
            "draft": str(runner.model_config.model_path),
            "device": str(self._worker.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "architecture": type(self._model).__name__,
            "algorithm": str(get_spec().speculative_algorithm),
            "steps": int(self._worker.speculative_num_steps),
            "topk": int(self._worker.topk),
            "draft_tokens": int(self._worker.speculative_num_draft_tokens),
            "vocab_size": int(target.model_config.vocab_size),
            "context_length": int(target.model_config.context_len),
            "prefix_cache": not get_memory().disable_radix_cache,
            "rank": self._rank,
            "ranks": self._ranks,
            "replicas": replicas(self._worker.server_args),
            "partial_sums": partial_sums(self._model),
            "dropped_keys": sorted(stored[name] for name in set(stored) - known),
            "target_hidden_size": self._target_width,
            "warnings": check_release(str(self._worker.device)),
            "fused_mlp": getattr(getattr(mlp, "dual_gemm", None), "mode", None) is not None,
        }

    # ---- what the scheduler does, told by the plugin's hooks --------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request was queued."""
        self._guarded(lambda recording: recording.arrived(request))

    def ended(self, request: Any) -> None:
        """A request was answered or aborted; with the last one the hooks come off."""
        self._guarded(lambda recording: recording.ended(request))

    def verified(self, result: Any, batch: Any) -> None:
        """A verify round is over."""
        self._guarded(lambda recording: recording.verified(result, batch))

    def between_batches(self) -> None:
        """No forward is running: take the hooks off if nothing is left to record."""
        active = self._active
        if active is not None and active.recording.done:
            active.hooks.remove()
            if active.recording.order.alone:
                self._end(active, {}, None)

    # ---- orders -----------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Take orders until SGLang's main process is gone; none of them is carried out in this thread."""
        while True:
            try:
                name, number, *arguments = self._connection.recv()
            except (EOFError, OSError):
                # keep what there is while this process still lives
                self._leave()
                return
            except Exception as error:  # noqa: BLE001 (an order that cannot be read is no reason to be deaf)
                self._say_failed(None, error)
                continue
            if name == "counts":
                active = self._active
                self._say("counts", number, active.recording.counts if active is not None else {})
            elif name == "begin":
                with self._turn:
                    self._number, self._early = number, None
                self._start(self._begin, number, *arguments)
            elif number == self._number:
                self._start(self._finish, number, *arguments)

    def _start(self, order: Callable[..., None], number: int, *arguments: Any) -> None:
        def obey() -> None:
            try:
                order(number, *arguments)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._say_failed(number, error)

        threading.Thread(target=obey, name=f"eagle-trace{order.__name__}", daemon=True).start()

    def _begin(self, number: int, order: Order, manifest: Manifest) -> None:
        manifest.rank = manifest.tp_rank = self._rank
        manifest.ranks = self._ranks
        writer = TraceWriter(as_place(order.out), manifest, max_bytes=order.max_bytes, max_wait=order.max_wait)
        hooks = Hooks()
        try:
            for row in self._params():
                writer.put_record("params", row)
            recording = Recording(order, writer, self._model, self._target_width, self._worker.hot_token_id)
            if has_graphs(self._worker):
                manifest.changes.append(KEPT_GRAPHS if order.keep_cuda_graphs else EAGER)
            if order.keep_cuda_graphs:
                hook_graph_boundaries(hooks, self._worker, self._guarded)
            else:
                run_eagerly(hooks, self._worker)
            self._hang(recording, hooks)
        except Exception as error:
            hooks.remove()
            writer.abort(error)
            raise
        active = _Active(number, recording, hooks)
        with self._turn:
            called_off = self._early if number == self._number else ({}, "it was given up")
            if called_off is None:
                self._active = active
        if called_off is None:
            self._say("recording", number)
        else:
            hooks.remove()
            self._seal(active, *called_off)

    def _hang(self, recording: Recording, hooks: Hooks) -> None:
        def opened(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            self._guarded(lambda recording: recording.open_call(batch))

        def captured(site: str, tensor: Any) -> None:
            self._guarded(lambda recording: recording.capture(site, tensor))

        hooks.before(self._model.model, opened)
        tell_missing(recording.writer.manifest, hook_draft(hooks, self._model, captured))
        hooks.after(self._model.logits_processor, lambda *_: self._guarded(lambda recording: recording.close_call()))
        self._watch_branches(hooks)

    def _params(self) -> list[dict[str, Any]]:
        with self._reading:
            if self._loaded is None:  # read once: a server's weights stay what they are
                stored = checkpoint_names(Path(self._worker.draft_runner.model_config.model_path))
                filled = {parameter for name in stored.values() for parameter in fills(name)}
                self._loaded = list(loaded_params(self._model, self._worker.hot_token_id, filled))
            return self._loaded

    def _watch_branches(self, hooks: Hooks) -> None:
        from sglang.srt.speculative import eagle_worker_v2

        def chosen(result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._guarded(lambda recording: recording.chosen(result[0], result[3], int(args[0]), int(args[5])))

        hooks.wrap(eagle_worker_v2, "select_top_k_tokens", chosen)

    def _finish(self, number: int, settings: dict[str, Any], stopped: str | None) -> None:
        with self._turn:
            active = self._active
            if active is None or active.number != number:
                # it has not begun yet, or ended by itself and said so
                self._early = (settings, stopped)
                return
        if stopped is None:
            self._catch_up(active.recording)
        active.hooks.remove()
        self._end(active, settings, None if active.recording.done else stopped)

    def _catch_up(self, recording: Recording) -> None:
        """Wait until this rank has come as far as rank 0, whose answers come before other ranks are done."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while self._rank and not recording.done and time.monotonic() < deadline:
            time.sleep(0.01)

    def _leave(self) -> None:
        """This process ends, or SGLang's main process did: seal in a few seconds what there is."""
        deadline = time.monotonic() + LEAVE_SECONDS
        active = self._active
        if active is not None:
            active.hooks.remove()
            self._end(active, {}, "the server ended")
        for thread in list(self._ending):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._outbox.flush(deadline - time.monotonic())

    # ---- the end of a recording -------------------------------------------------------------------------------

    def _claim(self, active: _Active) -> bool:
        """Take the recording that is going on, unless somebody else was faster."""
        with self._turn:
            mine = self._active is active
            if mine:
                self._active = None
        return mine

    def _end(self, active: _Active, settings: dict[str, Any], stopped: str | None) -> None:
        """Seal in a thread of its own: the scheduler must not wait for the disk."""
        if self._claim(active):
            seal = threading.Thread(
                target=self._seal, args=(active, settings, stopped), name="eagle-trace-seal", daemon=True
            )
            self._ending = [thread for thread in self._ending if thread.is_alive()] + [seal]
            seal.start()

    def _seal(self, active: _Active, settings: dict[str, Any], stopped: str | None) -> None:
        try:
            active.recording.seal(settings, stopped)
        except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
            self._say_failed(active.number, error, active.recording.writer.waited)
        else:
            self._say("sealed", active.number, active.recording.outcome)

    def _fail(self, active: _Active, error: BaseException) -> None:
        if self._claim(active):
            active.hooks.remove()
            threading.Thread(
                target=active.recording.abort, args=(error,), name="eagle-trace-abort", daemon=True
            ).start()
            self._say_failed(active.number, error, active.recording.writer.waited)

    def _guarded(self, event: Callable[[Recording], None]) -> None:
        """Tell the recording, if there is one, such that an error ends it and not the host's forward."""
        active = self._active
        if active is None:
            return
        try:
            event(active.recording)
        except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
            self._fail(active, error)

    def _say_failed(self, number: int | None, error: BaseException, waited: float = 0.0) -> None:
        self._say("failed", number, *_words(error), waited)

    def _say(self, *message: Any) -> None:
        self._outbox.put(packed(message))


def _words(error: BaseException) -> tuple[str, str]:
    """What went wrong, and the traceback of what should not have happened."""
    expected = isinstance(error, EagleTraceError | OSError)
    return str(error) or type(error).__name__, "" if expected else "".join(traceback.format_exception(error))
