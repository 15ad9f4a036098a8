"""Recording the forwards of a model that trains: the real batches, features, masks and loss.

Hooks copy what passes them and change nothing. Whatever fails in here ends the recording and is said once; it never
reaches the training.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import speculators.models.attention
import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle_trace.capture import LEVELS, Array, Rows
from eagle_trace.errors import HostError, RecordingError, UsageError
from eagle_trace.manifest import OPEN_SEAL
from eagle_trace.prompts import content_key, prompts_digest, unique_key
from eagle_trace.recorder import Hooks, best_ids, to_array
from eagle_trace.selection import Selection
from eagle_trace.sites import fused_slices
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_speculators.batches import Batch
from eagle_trace_speculators.first_tokens import UNKNOWN, FirstTokens
from eagle_trace_speculators.forward import INTEGER_SITES
from eagle_trace_speculators.hooks import SiteTap
from eagle_trace_speculators.live_facts import FLEX, is_sharded, live_manifest, rank_and_world, rank_folder, unwrapped
from eagle_trace_speculators.load import is_compiled, uncompiled
from eagle_trace_speculators.params import loaded_params
from eagle_trace_speculators.session import TOPK

logger = logging.getLogger("eagle_trace")

#: speculators names a metric of step 2 ``full_acc_2_sum``
STEP_OF_METRIC = re.compile(r"_(\d+)_(?:sum|total)$")
#: rows that are no data (their token is another document's, or padding) and that the loss counts all the same
LEAKING = "loss_rows_across_documents"


@dataclass(frozen=True)
class LiveOptions:
    """What a recording of a training is asked to do; see `recording`."""

    out: Path
    batches: int = 2
    level: str = "values"
    selection: Selection = Selection()
    max_bytes: int | None = None
    first_token: int | None = None
    datasets: tuple[Any, ...] = ()
    force: bool = False

    def check(self) -> None:
        """Raises UsageError if the options do not make sense."""
        if self.batches < 1:
            raise UsageError(f"batches must be 1 or more, not {self.batches}")
        if self.level not in LEVELS:
            raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {self.level!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"max_bytes must be a positive number of bytes, not {self.max_bytes}")
        if self.first_token is not None and self.first_token < 0:
            raise UsageError(f"first_token must be a token id, not {self.first_token}")


def recording(
    model: Any,
    *,
    out: str | Path,
    batches: int = 2,
    level: str = "values",
    selection: Selection | None = None,
    steps: int | None = None,
    max_bytes: int | None = None,
    first_token: int | None = None,
    dataset: Any = None,
    force: bool = False,
) -> Recording:
    """Record the next forwards of a draft that trains: ``with recording(model, out="train.trace"): ...``.

    After `batches` forwards the hooks come off and the trace is sealed, also in the middle of the block; it is sealed as
    stopped, with the reason, when the block ends earlier or raises. Nothing about the training changes: gradients,
    parameters, loss and random state are the same to the last bit (on CUDA see `Recording`). What fails while recording
    ends the recording, is logged once under the name ``eagle_trace``, and stands in the manifest.

    Each document of each batch becomes one prompt of the trace. Its first token is not in the batch (`shift_batch` drops
    it): it is looked up in `dataset`, else taken to be `first_token`, else -1 in prompts.parquet.

    Args:
        model: speculators' `Eagle3DraftModel`, also inside DistributedDataParallel, FSDP or torch.compile.
        out: folder of the trace to write; ranks above 0 write beside it (``run.rank1.trace``).
        batches: number of forwards to record; batches of padding alone do not count.
        level: how much to keep of each row.
        selection: which sites, roots, steps and documents to keep; shapes are kept of all sites.
        steps: keep this many forwards of each batch (short for a selection of steps).
        max_bytes: stop after so many bytes of captures, at the end of a step.
        first_token: first token of documents that `dataset` does not hold.
        dataset: what the batches are made from: `datasets.Dataset` or speculators' `ArrowDataset`, an Arrow table, or a
            list of token id lists; or a tuple of such.
        force: replace the trace at `out`.

    Raises:
        UsageError: not an EAGLE-3 draft of speculators, or an argument makes no sense.
        OutputExistsError: `out` is taken (raised on entering the block, as is RecordingError for a folder that cannot be
            made).
    """
    selection = selection or Selection()
    if steps is not None:
        if steps < 1 or selection.steps:
            raise UsageError(f"steps must be 1 or more, and not beside a selection of steps; it is {steps}")
        selection = Selection(selection.sites, selection.roots, ((0, steps),), selection.prompts)
    datasets = dataset if isinstance(dataset, tuple) else () if dataset is None else (dataset,)
    options = LiveOptions(Path(out), batches, level, selection, max_bytes, first_token, datasets, force)
    options.check()
    return Recording(model, options)


class _GuardedHooks(Hooks):
    """Hooks whose functions are passed through `guard` first."""

    def __init__(self, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        super().__init__()
        self._guard = guard

    def after(self, module: Any, function: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().after(module, self._guard(function))

    def before(self, module: Any, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().before(module, self._guard(function))

    def wrap(self, owner: Any, name: str, observe: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().wrap(owner, name, self._guard(observe))


class Recording:
    """A recording of a model that trains; a context manager, made by `recording`.

    On CUDA speculators compiles its forward, which leaves no place for hooks. It then runs uncompiled while recording,
    with flex attention compiled on its own (uncompiled, that would need memory for every pair of rows): the same
    formulas, rounded in other places.

    Attributes:
        path: folder of the trace.
        batches: forwards recorded so far.
        done: whether the hooks are off again.
        failure: what went wrong in the recorder, None if nothing did.
    """

    def __init__(self, model: Any, options: LiveOptions) -> None:
        self._asked = options
        self._wrapper, self._model = model, unwrapped(model)
        self._first_tokens = FirstTokens(options.datasets, options.first_token)
        self._rank, self._world = rank_and_world()
        self.path = rank_folder(options.out, self._rank)
        self.batches = 0
        self.done = True
        self.failure: BaseException | None = None
        self._hooks = _GuardedHooks(self._guarded)
        self._signature = inspect.signature(uncompiled(Eagle3DraftModel.forward))
        self._seen: dict[str, int] = {}
        self._keys: list[str] = []
        self._documents = self._unknown = self._calls = 0
        self._versions: list[int] | None = None
        self._moved = False
        self._batch: Batch | None = None
        self._prompts: list[int] = []
        self._call_of: list[int] = []
        self._labels: Array | None = None
        self._step = -1
        self._rows: Rows | None = None
        self._full = False

    def __enter__(self) -> Recording:
        prepare_output(self.path, force=self._asked.force)
        manifest = live_manifest(self._model, self._asked.level)
        manifest.settings = {"training": True, "batches": self._asked.batches, "rank": self._rank, "ranks": self._world}
        if left_out := self._asked.selection.to_dict():
            manifest.settings["selection"] = left_out
        try:
            self._writer = TraceWriter(self.path, manifest, max_bytes=self._asked.max_bytes, rank=self._rank)
        except OSError as error:
            raise RecordingError(f"cannot write to {self.path}: {error}") from error
        self.done = False
        self._guarded(self._hang)()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        seen = f"{self.batches} of {self._asked.batches} batches"
        if error is not None:
            self.finish(f"the block raised {_words(error)} after {seen}")
        else:
            self.finish(f"the block ended after {seen}")

    # ---- hooks ------------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.done:
                return
            try:
                with torch.no_grad():
                    function(*args)
            except Exception as error:  # noqa: BLE001 (never into the training: it ends the recording, and is said)
                self._fail(error)

        return call

    def _hang(self) -> None:
        model, hooks = self._model, self._hooks
        hooks.before(model, self._begin)
        self._tap = SiteTap(hooks, model, self._receive)
        hooks.after(model.verifier_lm_head, self._verified)
        hooks.after(model, self._end)
        changes = self._writer.manifest.changes
        if is_compiled():
            hooks.replace(model, "forward", partial(uncompiled(type(model).forward), model))
            changes.append("the forward was run uncompiled while recording (speculators compiles it on CUDA)")
            if model._attn_impl == FLEX:
                owner = speculators.models.attention
                hooks.replace(owner, "flex_attention", torch.compile(owner.flex_attention))
                changes.append("flex attention was compiled on its own while recording")
        if hasattr(self._wrapper, "_orig_mod"):
            stance = torch.compiler.set_stance("force_eager")
            hooks.on_removal(lambda: stance.__exit__(None, None, None))
            changes.append("nothing was run compiled while recording (torch.compile was given the model)")

    def _begin(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is not None:
            raise HostError("the forward before this one raised: the rest of its batch was never computed")
        given = self._signature.bind(None, *args, **kwargs).arguments
        if given["input_ids"].shape[0] != 1:
            raise HostError(f"the forward was given {given['input_ids'].shape[0]} rows of tokens, not one packed row")
        batch = _batch(given)
        documents = batch.documents
        if not documents:
            return
        if self._versions is None:
            self._describe(given)
        elif not self._moved and self._versions != self._now():
            self._moved = True
            self._writer.manifest.warnings.append(
                f"the parameters moved after batch {self.batches - 1}: params.parquet holds those it was computed with"
            )
        if not self._writer.accepting:
            self._over()
            return
        self._prompts = [self._put_prompt(number, tokens) for number, tokens in enumerate(documents)]
        self._batch, self._labels, self._call_of, self._step, self._full = batch, None, [], -1, False
        self._tap.restart()
        fused = given["hidden_states"].detach()
        for name, columns in fused_slices(fused.shape[-1], self._model.hidden_size):
            self._receive(0, name, fused[..., columns])
        self._receive(0, "fused", fused)

    def _verified(self, _module: Any, _args: tuple[Any, ...], output: Any) -> None:
        if self._batch is not None:
            self._labels = to_array(output.argmax(dim=-1).reshape(-1), copy=False)

    def _receive(self, step: int, site: str, tensor: Any) -> None:
        if self._batch is None:
            return
        if step != self._step:
            self._enter(self._batch, step)
        if self._rows is None:
            return
        flat = tensor.reshape(-1) if site in INTEGER_SITES else tensor.reshape(-1, tensor.shape[-1])
        if site in INTEGER_SITES:
            expected = self._rows.token_id if site == "token" else self._rows.position
            if not np.array_equal(to_array(flat.index_select(0, self._index), copy=False), expected):
                raise HostError(
                    f"this version of speculators feeds another {site} at step {step} than the one this recorder was "
                    "written for (0.9.0): install that one, or report it"
                )
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._shapes.append({"site": site, "shape": list(flat.shape), "dtype": dtype})
        if site == "fc.out":
            self._writer.manifest.dtype = dtype
        wanted = self._asked.selection.wants
        best = site == "logits" and (wanted("topk.draft_id") or wanted("topk.target_id"))
        if self._asked.level == "shapes" or not (wanted(site) or best) or not len(self._rows):
            return
        values = to_array(flat.index_select(0, self._index), copy=False)
        if best:
            draft_ids, logits, logprobs = best_ids(values, TOPK)
            self._writer.put_topk(self._rows, draft_ids, self._target_ids(draft_ids), logits, logprobs)
        if wanted(site):
            self._writer.put_values(site, self._rows, values)

    def _end(self, _module: Any, _args: tuple[Any, ...], output: Any) -> None:
        if self._batch is None:
            return
        self._leave()
        self._put_metrics(self._batch, output)
        self._batch = None
        self.batches += 1
        if self._full or self.batches >= self._asked.batches:
            self._over()

    # ---- one batch --------------------------------------------------------------------------------------------

    def _put_prompt(self, number: int, tokens: Array) -> int:
        prompt = self._documents * self._world + self._rank
        self._documents += 1
        first = self._first_tokens.find(tokens)
        self._unknown += first == UNKNOWN
        ids = [first, *tokens.tolist()]
        self._keys.append(unique_key(content_key("input_ids", ids), self._seen))
        record = {
            "prompt_id": prompt,
            "prompt_key": self._keys[-1],
            "request_id": f"batch {self.batches}, document {number}",
            "token_ids": ids,
            "num_prompt_tokens": len(ids),
            "text": "",
            "output_ids": [],
        }
        self._writer.put_record("prompts", record)
        return prompt

    def _enter(self, batch: Batch, step: int) -> None:
        """A step begins: decide which of its rows to keep."""
        self._leave()
        self._step = step
        if not self._writer.accepting:
            self._full = True
            return
        index = batch.index(step)
        rows = batch.rows(step, index, self._prompts, self._calls * self._world + self._rank)
        kept = np.flatnonzero(self._asked.selection.mask(rows))
        self._rows, self._at, self._shapes = rows.take(kept), index[kept], []
        self._index = torch.from_numpy(self._at).to(self._model.fc.weight.device)

    def _leave(self) -> None:
        """A step is over: its call and its rows."""
        batch, rows, self._rows = self._batch, self._rows, None
        if batch is None or rows is None:
            return
        call = self._calls * self._world + self._rank
        self._calls += 1
        self._call_of.append(call)
        mode = "train" if self._model.training else "eval"
        shared = {"call_id": call, "role": "draft", "mode": mode, "shapes": self._shapes}
        self._writer.put_record("calls", shared | {"batch_size": len(self._prompts), "tokens": len(batch)})
        training: dict[str, Array] = {}
        if (counted := batch.counted(self._step, self._at)) is not None:
            training["loss_mask"] = counted
        if self._labels is not None:
            training["label"] = self._labels[self._at + self._step]
        self._writer.put_rows(rows, training)

    def _put_metrics(self, batch: Batch, output: Any) -> None:
        def put(name: str, value: float, step: int | None = None) -> None:
            call = self._call_of[step] if step is not None and step < len(self._call_of) else None
            record = {"batch": self.batches, "call_id": call, "step": step, "name": name, "value": value}
            self._writer.put_record("metrics", record)

        if not (isinstance(output, tuple) and len(output) == 3):
            return  # no verifier was given, so there is no loss
        _, loss, metrics = output
        put("loss", float(loss))
        for name, value in metrics.items():
            step = STEP_OF_METRIC.search(name)
            put(name, float(value), int(step.group(1)) if step else None)
        for step_number in range(1, len(self._call_of)):
            put(LEAKING, batch.leaking(step_number), step_number)

    def _target_ids(self, draft_ids: Array) -> Array:
        d2t = self._model.d2t
        return draft_ids if d2t is None else draft_ids + to_array(d2t, copy=False)[draft_ids]

    # ---- the beginning and the end ----------------------------------------------------------------------------

    def _now(self) -> list[int]:
        """Counts that grow whenever a parameter is written to."""
        return [parameter._version for parameter in self._model.parameters()]

    def _describe(self, given: Mapping[str, Any]) -> None:
        """What only the first forward shows: how training runs the draft, and the parameters it begins with."""
        self._versions = self._now()
        model, manifest = self._model, self._writer.manifest
        device = manifest.device
        autocast = torch.is_autocast_enabled(device)
        manifest.settings |= {
            "steps": int(given.get("ttt_steps", self._signature.parameters["ttt_steps"].default)),
            "features": "training",
            "attention": model._attn_impl,
            "autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.") if autocast else None,
            "parameters": str(model.fc.weight.dtype).removeprefix("torch."),
        }
        if is_sharded(model):
            manifest.warnings.append("the parameters are sharded over ranks (FSDP): params.parquet leaves them out")
            return
        for record in loaded_params(model, None):
            self._writer.put_record("params", record)

    def _over(self) -> None:
        """Recording ends by itself: all batches, the budget spent, or the writer failed."""
        if self._writer.failure is not None:
            self._fail(self._writer.failure)
        else:
            self.finish(None)

    def _fail(self, error: BaseException) -> None:
        if self.done:
            return
        self.failure = error
        why = f"the recorder failed in batch {self.batches}: {_words(error)}"
        self._writer.manifest.warnings.append(why)
        logger.warning("recording into %s ended: %s; the training goes on without it", self.path, why)
        self.finish(why)

    def finish(self, why: str | None) -> None:
        """Take all hooks off and seal the trace; nothing happens if that is done.

        Args:
            why: why recording stopped early, None if it did not.
        """
        if self.done:
            return
        self.done = True
        manifest = self._writer.manifest
        try:
            self._hooks.remove()
            self._leave()
            self._batch = None
            manifest.stopped = manifest.stopped or why
            manifest.settings["recorded_batches"] = self.batches
            manifest.prompts_digest = prompts_digest(self._keys)
            if self._unknown:
                manifest.warnings.append(
                    f"the first token of {self._unknown} of {self._documents} documents is not known (training's shift "
                    "drops it): token_ids begins with -1 there; give recording() dataset= or first_token="
                )
            self._writer.seal()
        except Exception as error:  # noqa: BLE001 (the training must go on)
            if self.failure is None:
                self.failure = error
                logger.warning("the trace %s could not be finished: %s", self.path, _words(error))
            self._writer.abort(error)
            with contextlib.suppress(OSError):
                manifest.write(self.path, OPEN_SEAL)


def _batch(given: Mapping[str, Any]) -> Batch:
    """The forward's arguments as plain numbers."""
    flat = {
        name: to_array(given[name].reshape(-1), copy=False)
        for name in ("input_ids", "document_ids", "position_ids", "loss_mask")
        if given.get(name) is not None
    }
    tokens = flat["input_ids"].astype(np.int32)
    # without positions the forward counts rows from 1, over all documents
    positions = flat.get("position_ids", np.arange(1, len(tokens) + 1)).astype(np.int32)
    mask = flat["loss_mask"].astype(np.bool_) if "loss_mask" in flat else None
    return Batch(tokens, positions, flat["document_ids"].astype(np.int32), mask)


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
