"""The recorder inside SGLang's scheduler process.

The scheduler's thread runs the hooks, which copy tensors; a whole forward is handed to the writer at once, so that a
recording that ends between two sites of a call keeps none of that call. A second thread takes orders from `record`.

Whatever goes wrong here ends the recording, is reported to `record`, and never reaches SGLang.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace.capture import Array, Rows
from eagle_trace.manifest import Manifest
from eagle_trace.recorder import Hooks, best_ids, to_array, to_rows
from eagle_trace.sites import fused_slices
from eagle_trace.writer import TraceWriter
from eagle_trace_sglang.draft_rows import DraftCall, Index, RowTracker, tree_parents
from eagle_trace_sglang.params import canonical_name, checkpoint_names, loaded_params
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.session import connect
from eagle_trace_sglang.sites import draft_layers, hook_draft, missing_sites

TOPK = 10
#: forward modes of the draft whose rows are data; an idle or prebuilt batch computes nothing of a request
RECORDED_MODES = ("EXTEND", "MIXED", "DECODE", "DRAFT_EXTEND_V2")


@dataclass
class _Recording:
    """One recording, from `begin` to `finish`."""

    writer: TraceWriter
    tracker: RowTracker
    calls: int = 0


@dataclass
class _Call:
    """One forward of the draft that is being captured."""

    facts: DraftCall
    rows: Rows
    index: Index
    whole: bool
    captures: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, tuple[list[int], str]] = field(default_factory=dict)


class ServeRecorder:
    """Records the draft worker it is attached to, from one `begin` order to the next `finish`."""

    def __init__(self, worker: Any, connection: Connection) -> None:
        self._worker = worker
        self._model = worker.draft_runner.model
        self._target_width = int(worker.target_worker.model_config.hidden_size)
        self._connection = connection
        self._hooks = Hooks()
        self._lock = threading.Lock()
        self._recording: _Recording | None = None
        self._call: _Call | None = None
        self._loaded: list[dict[str, Any]] | None = None

    @classmethod
    def attach(cls, worker: Any) -> ServeRecorder:
        """Connect to `record`, report what was found, and wait for orders in a thread of its own."""
        connection = connect("recorder")
        if connection is None:
            raise RuntimeError("armed without a session")
        recorder = cls(worker, connection)
        connection.send(("armed", recorder.facts()))
        threading.Thread(target=recorder._obey, name="eagle-trace-orders", daemon=True).start()
        return recorder

    def facts(self) -> dict[str, Any]:
        """What `record` puts into the manifest and cannot know itself."""
        runner = self._worker.draft_runner
        mlp = getattr(draft_layers(self._model)[0][1], "mlp", None)
        stored = checkpoint_names(Path(runner.model_config.model_path))
        known = {canonical_name(name) for name, _ in self._model.named_parameters()}
        fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for whole, parts in fused.items():
            known |= {name.replace(whole, part) for name in known if whole in name for part in parts}
        known |= {"d2t", "t2d"}
        return {
            "device": str(self._worker.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "architecture": type(self._model).__name__,
            "algorithm": self._worker.speculative_algorithm.name,
            "tp_size": int(getattr(runner, "tp_size", 1)),
            "dropped_keys": sorted(stored[name] for name in set(stored) - known),
            "target_hidden_size": self._target_width,
            "missing_sites": missing_sites(self._model),
            "warnings": check_release(str(self._worker.device)),
            "fused_mlp": getattr(getattr(mlp, "dual_gemm", None), "mode", None) is not None,
        }

    # ---- orders -----------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        orders: dict[str, Callable[..., None]] = {"begin": self._begin, "finish": self._finish}
        while True:
            try:
                name, *arguments = self._connection.recv()
            except (EOFError, OSError):
                # `record` is gone: nobody is left to seal for, but the host must go on without our hooks
                self._hooks.remove()
                return
            try:
                orders[name](*arguments)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._fail(error)

    def _begin(self, out: str, manifest: Manifest, prompts: dict[str, int], max_bytes: int | None) -> None:
        writer = TraceWriter(Path(out), manifest, max_bytes=max_bytes)
        for row in self._params():
            writer.put_record("params", row)
        with self._lock:
            self._recording = _Recording(writer, RowTracker(prompts))
        self._hooks.before(self._model.model, self._guard(self._open_call))
        hook_draft(self._hooks, self._model, self._guard(self._capture))
        self._hooks.after(self._model.logits_processor, self._guard(lambda *_: self._close_call()))
        self._watch_branches()
        self._connection.send(("recording",))

    def _params(self) -> list[dict[str, Any]]:
        if self._loaded is None:  # read once: a server's weights stay what they are
            stored = checkpoint_names(Path(self._worker.draft_runner.model_config.model_path))
            self._loaded = list(loaded_params(self._model, self._worker.hot_token_id, stored.keys()))
        return self._loaded

    def _watch_branches(self) -> None:
        from sglang.srt.speculative import eagle_worker_v2

        def chosen(result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            step, topk = int(args[0]), int(args[5])
            if self._recording is None or topk == 1:
                return
            # the third part of the tree info numbers every candidate over all steps: undo that to get its parent
            offset = topk * topk * (step - 1) + topk
            parents = None if step == 0 else (to_array(result[3][2]) - offset) // topk
            self._recording.tracker.select_branches(parents)

        self._hooks.wrap(eagle_worker_v2, "select_top_k_tokens", self._guard(chosen))

    def _finish(self, prompts: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        with self._lock:
            recording, self._recording = self._recording, None
        self._hooks.remove()
        if recording is None:
            return  # already failed, and said so
        for prompt in prompts:
            ids = recording.tracker.committed(prompt["request_id"], prompt["token_ids"])
            recording.writer.put_record("prompts", prompt | {"token_ids": ids})
        recording.writer.manifest.settings |= settings
        recording.writer.seal()
        self._connection.send(("sealed", recording.calls))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            recording, self._recording = self._recording, None
        self._hooks.remove()
        if recording is not None:
            recording.writer.abort(error)
        self._connection.send(("failed", str(error) or type(error).__name__, traceback.format_exc()))

    def _guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function`, such that an error in it ends the recording and not the host's forward."""

        def guarded(*args: Any) -> None:
            if self._recording is None:
                return
            try:
                function(*args)
            except Exception as error:  # noqa: BLE001 (reported, never raised into the host)
                self._fail(error)

        return guarded

    # ---- one forward of the draft -----------------------------------------------------------------------------

    def _open_call(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        self._call = None
        recording = self._recording
        if recording is None or batch.forward_mode.name not in RECORDED_MODES or not recording.writer.accepting:
            return
        if not any(rid in recording.tracker for rid in batch.rids or ()):
            return
        facts = _call_facts(batch)
        rows, index = recording.tracker.rows(facts, recording.calls)
        self._call = _Call(facts, rows, index, whole=len(index) == len(facts.input_ids))
        if facts.mode != "DECODE":
            hidden = batch.spec_info.hidden_states
            self._capture("fused", hidden)
            for name, columns in fused_slices(hidden.shape[-1], self._target_width):
                self._call.shapes[name] = (
                    [hidden.shape[0], columns.stop - columns.start],
                    self._call.shapes["fused"][1],
                )

    def _capture(self, site: str, tensor: Any) -> None:
        call = self._call
        if call is None:
            return
        call.shapes[site] = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        recording = self._recording
        if recording is None or recording.writer.manifest.level == "shapes":
            return
        if not call.whole and site != "logits":
            tensor = tensor[_torch_index(call.index, tensor)]
        call.captures[site] = to_rows(tensor)

    def _close_call(self) -> None:
        call, self._call = self._call, None
        with self._lock:
            recording = self._recording
            if call is None or recording is None:
                return
            self._write(recording, call)

    def _write(self, recording: _Recording, call: _Call) -> None:
        writer = recording.writer
        if writer.failure is not None:
            raise writer.failure
        facts, rows = call.facts, call.rows
        writer.put_rows(rows)
        fused = call.captures.get("fused")
        if fused is not None:
            for name, columns in fused_slices(fused.shape[-1], self._target_width):
                writer.put_values(name, rows, np.ascontiguousarray(fused[:, columns]))
        logits = call.captures.pop("logits", None)
        for site, values in call.captures.items():
            writer.put_values(site, rows, values)
        if logits is not None:
            self._write_logits(writer, call, logits)
        shapes = [{"site": site, "shape": shape, "dtype": dtype} for site, (shape, dtype) in call.shapes.items()]
        record = {"call_id": recording.calls, "role": "draft", "mode": facts.mode, "shapes": shapes}
        writer.put_record("calls", record | {"batch_size": len(facts.rids), "tokens": len(facts.input_ids)})
        recording.calls += 1

    def _write_logits(self, writer: TraceWriter, call: _Call, logits: Array) -> None:
        if len(logits) == len(call.facts.input_ids):
            rows, kept = call.rows, logits[call.index]
        else:
            # a prefill has logits for the last row of each request only
            at = {int(row): number for number, row in enumerate(call.index)}
            pairs = [(at[int(row)], b) for b, row in enumerate(call.facts.last_rows) if int(row) in at]
            rows = call.rows.take(np.array([row for row, _ in pairs], dtype=np.intp))
            kept = logits[[b for _, b in pairs]]
        writer.put_values("logits", rows, np.ascontiguousarray(kept))
        draft_ids, scores, logprobs = best_ids(kept, TOPK)
        hot = self._worker.hot_token_id
        target_ids = draft_ids if hot is None else to_array(hot)[draft_ids]
        writer.put_topk(rows, draft_ids, target_ids, scores, logprobs)

    # ---- one verify round -------------------------------------------------------------------------------------

    def verified(self, result: Any, batch: Any) -> None:
        """Take note of a verify round: `result` of the worker's `verify`, whose input `batch.spec_info` still is."""
        self._guard(self._record_round)(result, batch)

    def _record_round(self, result: Any, batch: Any) -> None:
        recording = self._recording
        if recording is None or batch.forward_mode.is_idle() or not recording.writer.accepting:
            return
        verify = batch.spec_info
        count = int(verify.draft_token_num)
        tokens = to_array(verify.draft_token).reshape(-1, count)
        best = to_array(result.logits_output.next_token_logits.argmax(dim=-1)).reshape(-1, count)
        predicted = to_array(result.next_token_ids).reshape(-1, count)
        children = to_array(verify.retrieve_next_token).reshape(-1, count)
        siblings = to_array(verify.retrieve_next_sibling).reshape(-1, count)
        accepted = to_array(result.accept_lens)
        lengths = to_array(batch.seq_lens)
        for b, request in enumerate(batch.reqs):
            if request.rid not in recording.tracker:
                continue
            kept = predicted[b, : accepted[b]].tolist()
            recording.writer.put_record(
                "rounds",
                {
                    "prompt_id": recording.tracker.prompt_id(request.rid),
                    "round": recording.tracker.close_round(request.rid),
                    "root": int(lengths[b]) - 1,
                    "proposed": tokens[b, 1:].tolist(),
                    "parents": tree_parents(children[b], siblings[b])[1:],
                    "target_argmax": best[b].tolist(),
                    "accepted": kept[:-1],
                    "bonus": kept[-1],
                },
            )


def _call_facts(batch: Any) -> DraftCall:
    mode = batch.forward_mode.name
    accepted = getattr(batch.spec_info, "num_accept_tokens", None)
    return DraftCall(
        mode=mode,
        rids=list(batch.rids),
        input_ids=to_array(batch.input_ids),
        positions=to_array(batch.positions),
        seq_lens=to_array(batch.seq_lens),
        extend_lens=None if batch.extend_seq_lens is None or mode == "DECODE" else to_array(batch.extend_seq_lens),
        accept_lens=to_array(accepted) if mode == "DRAFT_EXTEND_V2" else None,
    )


def _torch_index(index: Index, like: Any) -> Any:
    """`index` as a torch index on the device of `like`."""
    import torch

    return torch.from_numpy(index).to(like.device)
