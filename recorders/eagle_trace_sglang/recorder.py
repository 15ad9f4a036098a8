"""The recorder inside SGLang's scheduler process: hangs its hooks when it is ordered to, and takes them off again.

The scheduler's thread runs the hooks; a second thread takes orders from SGLang's main process, and sealing has a thread
of its own, so that the scheduler never waits for a disk.

Under tensor parallelism each rank has one of these. All are given the same orders and see the same calls, so their rows
are the same without a word between them.

Whatever goes wrong here ends the recording, is reported, and never reaches SGLang.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from eagle_trace.errors import EagleTraceError
from eagle_trace.manifest import Manifest
from eagle_trace.recorder import Hooks
from eagle_trace.store import as_place
from eagle_trace.writer import TraceWriter
from eagle_trace_sglang.graphs import has_graphs, hook_graph_boundaries, run_eagerly
from eagle_trace_sglang.layers import draft_layers
from eagle_trace_sglang.orders import Order
from eagle_trace_sglang.params import canonical_name, checkpoint_names, loaded_params
from eagle_trace_sglang.plugin import SESSION
from eagle_trace_sglang.ranks import draft_place, replicas
from eagle_trace_sglang.recording import Recording
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.session import connect
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
PACKAGES = ("sglang", "torch", "transformers", "numpy", "eagle-trace")


class ServeRecorder:
    """Records the draft worker it is attached to, one recording after the other."""

    def __init__(self, worker: Any, connection: Connection) -> None:
        self._worker = worker
        self._model = worker.draft_runner.model
        self._target_width = int(worker.target_worker.model_config.hidden_size)
        self._rank, self._ranks = draft_place(self._model)
        self._connection = connection
        self._sending = threading.Lock()
        self._hooks = Hooks()
        self._recording: Recording | None = None
        self._ending: threading.Thread | None = None
        self._loaded: list[dict[str, Any]] | None = None

    @classmethod
    def attach(cls, worker: Any) -> ServeRecorder:
        """Connect to SGLang's main process, report what was found, and wait for orders in a thread of its own."""
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
        fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for whole, parts in fused.items():
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
        recording = self._recording
        if recording is not None and recording.done:
            self._hooks.remove()
            if recording.order.alone:
                self._end(recording, {}, None)

    # ---- orders -----------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        orders: dict[str, Callable[..., None]] = {"begin": self._begin, "finish": self._finish, "counts": self._counts}
        while True:
            try:
                name, *arguments = self._connection.recv()
            except (EOFError, OSError):
                # SGLang's main process is gone: keep what there is while this process still lives
                self._leave()
                return
            try:
                orders[name](*arguments)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._fail(error)

    def _begin(self, order: Order, manifest: Manifest) -> None:
        if self._ending is not None:
            self._ending.join()
        manifest.rank = manifest.tp_rank = self._rank
        manifest.ranks = self._ranks
        writer = TraceWriter(as_place(order.out), manifest, max_bytes=order.max_bytes)
        for row in self._params():
            writer.put_record("params", row)
        recording = Recording(order, writer, self._model, self._target_width, self._worker.hot_token_id)
        if has_graphs(self._worker):
            manifest.changes.append(KEPT_GRAPHS if order.keep_cuda_graphs else EAGER)
        if order.keep_cuda_graphs:
            hook_graph_boundaries(self._hooks, self._worker, self._guarded)
        else:
            run_eagerly(self._hooks, self._worker)
        self._hang(recording)
        self._recording = recording
        self._say("recording")

    def _hang(self, recording: Recording) -> None:
        def opened(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            self._guarded(lambda recording: recording.open_call(batch))

        def captured(site: str, tensor: Any) -> None:
            self._guarded(lambda recording: recording.capture(site, tensor))

        self._hooks.before(self._model.model, opened)
        tell_missing(recording.writer.manifest, hook_draft(self._hooks, self._model, captured))
        self._hooks.after(
            self._model.logits_processor, lambda *_: self._guarded(lambda recording: recording.close_call())
        )
        self._watch_branches()

    def _params(self) -> list[dict[str, Any]]:
        if self._loaded is None:  # read once: a server's weights stay what they are
            stored = checkpoint_names(Path(self._worker.draft_runner.model_config.model_path))
            self._loaded = list(loaded_params(self._model, self._worker.hot_token_id, stored.keys()))
        return self._loaded

    def _watch_branches(self) -> None:
        from sglang.srt.speculative import eagle_worker_v2

        def chosen(result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            self._guarded(lambda recording: recording.chosen(result[0], result[3], int(args[0]), int(args[5])))

        self._hooks.wrap(eagle_worker_v2, "select_top_k_tokens", chosen)

    def _finish(self, settings: dict[str, Any], stopped: str | None) -> None:
        recording = self._recording
        if recording is not None and stopped is None:
            self._catch_up(recording)
        self._hooks.remove()
        recording = self._recording
        if recording is not None:  # else it ended by itself or failed, and said so
            self._end(recording, settings, None if recording.done else stopped)

    def _catch_up(self, recording: Recording) -> None:
        """Wait until this rank has come as far as rank 0, whose answers come before other ranks are done."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while self._rank and not recording.done and time.monotonic() < deadline:
            time.sleep(0.01)

    def _leave(self) -> None:
        self._hooks.remove()
        if self._recording is not None:
            self._end(self._recording, {}, "the server ended")
        if self._ending is not None:
            self._ending.join()

    def _counts(self) -> None:
        recording = self._recording
        self._say("counts", recording.counts if recording is not None else {})

    # ---- the end of a recording -------------------------------------------------------------------------------

    def _end(self, recording: Recording, settings: dict[str, Any], stopped: str | None) -> None:
        """Seal in a thread of its own: the scheduler must not wait for the disk."""
        self._recording = None

        def seal() -> None:
            try:
                recording.seal(settings, stopped)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._say("failed", *_words(error))
            else:
                self._say("sealed", recording.counts)

        self._ending = threading.Thread(target=seal, name="eagle-trace-seal")
        self._ending.start()

    def _fail(self, error: BaseException) -> None:
        recording, self._recording = self._recording, None
        self._hooks.remove()
        if recording is not None:
            threading.Thread(target=recording.abort, args=(error,), name="eagle-trace-abort", daemon=True).start()
        self._say("failed", *_words(error))

    def _guarded(self, event: Callable[[Recording], None]) -> None:
        """Tell the recording, if there is one, such that an error ends it and not the host's forward."""
        recording = self._recording
        if recording is None:
            return
        try:
            event(recording)
        except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
            self._fail(error)

    def _say(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # nobody left to hear it
            self._connection.send(message)


def _words(error: BaseException) -> tuple[str, str]:
    """What went wrong, and the traceback of what should not have happened."""
    expected = isinstance(error, EagleTraceError | OSError)
    return str(error) or type(error).__name__, "" if expected else "".join(traceback.format_exception(error))
