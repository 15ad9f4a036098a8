"""Where the target features g_p come from: the target, the server's record, or the trainer's own training data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import torch

from eagle_trace.capture import Array
from eagle_trace.checkpoints import read_config, text_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.reader import Trace, ValueReader, read_keys
from eagle_trace.recording.hooks import Hooks
from eagle_trace.sketch import sample_channels
from eagle_trace_training.host import Sample, TrainingHost
from eagle_trace_training.numerics import DTYPES, computing_in, quiet, raise_dtype
from eagle_trace_training.replay import Task
from eagle_trace_training.routing import Routing
from eagle_trace_training.target_model import decoder_of, load_target

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Precision:
    """The serving dtype, the reference dtype (on-disk names; the same where no floor is measured), and the device to
    compute on.
    """

    dtype: str
    reference: str
    device: str


class Features(Protocol):
    """Features of every prompt, one row a root from 0 on."""

    def count(self, task: Task) -> int:
        """Number of roots, from 0, that have features."""
        ...

    def rows(self, task: Task, *, reference: bool) -> Any:
        """Features [count, n * G]: in the serving dtype, or in the reference dtype where that differs."""
        ...


def to_tensor(array: Array) -> Any:
    """A torch tensor that owns a copy of `array`; bfloat16 by its bits, which numpy and torch share."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


# ---- compute: the target, run by Hugging Face transformers


class ComputedFeatures:
    """Features from a forward of the target over all prompts, in the serving and in the reference dtype.

    The target is loaded once, widened in place for the second pass, and gone before the draft runs; the
    features of all prompts stay in host memory. Beside them `layers` holds a few channels of every layer's hidden
    state, so that whatever a server fed instead can be recognised later, and `routing` how near each token came to
    other experts, None where no other precision says what rounding does.

    Args:
        target: folder of the target.
        layer_ids: which layers: i is the input of layer i, and the number of layers the last one's output.
        tasks: the prompts.
        width: n * G that the draft's fc takes.
        precision: dtypes and device.
        progress: receives messages.

    Raises:
        CheckpointError: the target is of another width, cannot be loaded, or its decoder layers are not found.
    """

    def __init__(
        self,
        target: Path,
        layer_ids: Sequence[int],
        tasks: Sequence[Task],
        width: int,
        precision: Precision,
        progress: Progress,
    ) -> None:
        dtype, reference = precision.dtype, precision.reference
        hidden = text_config(read_config(target)).get("hidden_size")
        if hidden is not None and hidden * len(layer_ids) != width:
            raise CheckpointError(
                f"{target} is {hidden} wide and the draft takes {len(layer_ids)} layers as {width} numbers: give the "
                "target that it is trained for"
            )
        with quiet():
            model = load_target(target, DTYPES[dtype])
        decoder = decoder_of(model.to(precision.device).eval(), target)
        progress(f"target features of {len(tasks)} prompts in {dtype}")
        self.layers = LayerSamples(decoder, sum(max(0, len(task.token_ids) - 1) for task in tasks))
        self.routing = Routing(decoder, max(layer_ids, default=0), dtype) if reference != dtype else None
        with self.layers, self.routing.watching() if self.routing else nullcontext():
            after = [self.layers.keep, *([self.routing.keep] if self.routing else [])]
            self._low = self._run(decoder, layer_ids, tasks, dtype, after)
        self._reference = self._low
        if self.routing is not None:
            progress(f"target features of {len(tasks)} prompts in {reference}, for the rounding floor")
            with self.routing.watching():
                wide = raise_dtype(decoder, reference)
                self._reference = self._run(wide, layer_ids, tasks, reference, [self.routing.measure])

    def count(self, task: Task) -> int:
        """Every root whose next token is known."""
        return len(self._low[task.prompt_id])

    def rows(self, task: Task, *, reference: bool) -> Any:
        """Features [count, n * G]."""
        return (self._reference if reference else self._low)[task.prompt_id]

    @staticmethod
    def _run(
        decoder: Any,
        layer_ids: Sequence[int],
        tasks: Sequence[Task],
        dtype: str,
        after: Sequence[Callable[[int], None]],
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}
        device = next(decoder.parameters()).device

        def keep(layer: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
            def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()

            return hook

        features = {}
        with Hooks() as hooks, computing_in(dtype):
            for layer in set(layer_ids):
                # behind the last layer, the final norm's input: hidden_states[-1] of Hugging Face is its
                # output
                hooks.before(decoder.layers[layer] if layer < len(decoder.layers) else decoder.norm, keep(layer))
            for task in tasks:
                token_ids = torch.tensor([task.token_ids[:-1]], dtype=torch.long, device=device)
                if token_ids.shape[1]:
                    decoder(input_ids=token_ids, use_cache=False)
                    for take in after:
                        take(task.prompt_id)
                    features[task.prompt_id] = torch.cat([found[layer] for layer in layer_ids], dim=-1).cpu()
                else:
                    features[task.prompt_id] = torch.empty(0, 0, dtype=DTYPES[dtype])
        return features


class LayerSamples:
    """A few channels of every layer's hidden state at some roots: the rows of layers.parquet. A context manager.

    Layer i is the input of decoder layer i (Hugging Face's `hidden_states[i]`), L the last layer's output, L + 1 the
    same behind the final norm. Beside the inputs of layers 1 to L lies what the layer before added last to the stream:
    the output of the last module it called (its MLP, or the norm behind that).

    Args:
        decoder: the target's decoder.
        roots: roots of all prompts together; every k-th is kept, such that at most `SAMPLED_ROOTS` are.

    Attributes:
        records: the rows.
        channels: which channels they hold, int64, ascending; none before the first forward.
    """

    SAMPLED_ROOTS = 512

    def __init__(self, decoder: Any, roots: int) -> None:
        self.records: list[dict[str, Any]] = []
        self.channels = np.empty(0, dtype=np.int64)
        self._index: Any = None
        self._decoder = decoder
        self._stride = max(1, -(-roots // self.SAMPLED_ROOTS))
        self._found: dict[int, Array] = {}
        self._branches: dict[int, Array] = {}
        self._last: Any = None
        self._hooks = Hooks()

    def __enter__(self) -> LayerSamples:
        layers, norm = self._decoder.layers, self._decoder.norm
        for number, layer in enumerate(layers, start=1):
            for part in layer.children():
                self._hooks.after(part, self._remember)
            self._hooks.after(layer, self._branch_taker(number))
        for number, module in enumerate([*layers, norm]):
            self._hooks.before(module, self._taker(number))
        self._hooks.after(norm, lambda _module, _args, output: self._take(len(layers) + 1, output))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def _taker(self, layer: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _module, args, kwargs: self._take(layer, args[0] if args else kwargs["hidden_states"])

    def _take(self, layer: int, hidden: Any) -> None:
        self._found[layer] = self._sampled(hidden)

    def _sampled(self, hidden: Any) -> Array:
        if self._index is None:
            self.channels = sample_channels(hidden.shape[-1])
            self._index = torch.from_numpy(self.channels).to(hidden.device)
        channels = self._index
        sampled: Array = hidden[0, :: self._stride].index_select(-1, channels).float().cpu().numpy()
        return sampled

    def _remember(self, _module: Any, _args: Any, output: Any) -> None:
        self._last = output[0] if isinstance(output, tuple) else output

    def _branch_taker(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def take(_module: Any, _args: Any, output: Any) -> None:
            whole, last = output[0] if isinstance(output, tuple) else output, self._last
            self._last = None
            # experts may give their rows flat
            if last is not None and last.numel() == whole.numel():
                self._branches[layer] = self._sampled(last.reshape(whole.shape))

        return take

    def keep(self, prompt_id: int) -> None:
        """Keep what the last forward of the decoder showed, as rows of the prompt."""
        for layer, samples in sorted(self._found.items()):
            branches = self._branches.get(layer)
            for number, sample in enumerate(samples):
                row = {"prompt_id": prompt_id, "root": number * self._stride, "layer": layer, "sample": sample}
                self.records.append(row | {"branch": None if branches is None else branches[number]})


# ---- serve: what the server fed its draft


class ServedFeatures:
    """The `fused` rows of a serve trace, so that the draft is compared in isolation and no target is needed.

    Args:
        trace: the serve trace.
        tasks: the prompts.
        width: n * G that the draft's fc takes.

    Raises:
        UsageError: the trace keeps no values of `fused`, or lacks positions in the middle of a prompt.
        CheckpointError: the server fed its draft rows of another width.
    """

    def __init__(self, trace: Trace, tasks: Sequence[Task], width: int) -> None:
        found = trace.site_data("fused")
        if not found or not found[0].has_values:
            raise UsageError(
                f"{trace.path} keeps no values of the features the server fed (level {trace.level}): "
                "record it with --level values, or use --features compute"
            )
        fitting = [data for data in found if data.width == width]
        if not fitting:
            raise CheckpointError(
                f"the server fed features of width {found[0].width}, this draft's fc takes {width}: "
                "use --features compute to record the training side as it was trained"
            )
        self._reader = ValueReader(fitting[0])
        keys = read_keys(fitting[0])
        self._row_of: dict[int, dict[int, int]] = {task.prompt_id: {} for task in tasks}
        for row, (prompt, root, step) in enumerate(zip(keys.prompt_id, keys.root, keys.step, strict=True)):
            if step == 0 and int(prompt) in self._row_of:
                self._row_of[int(prompt)][int(root)] = row
        for task in tasks:
            rows = self._row_of[task.prompt_id]
            lost = next((root for root in range(len(rows)) if root not in rows), None)
            if lost is not None:
                raise UsageError(
                    f"{trace.path} has no features of prompt {task.record['prompt_key']} at position {lost}: "
                    "the server skipped it (prefix cache?); record with that off, or take --features compute"
                )

    def count(self, task: Task) -> int:
        """Roots up to the last one the server computed."""
        return len(self._row_of[task.prompt_id])

    def rows(self, task: Task, *, reference: bool) -> Any:  # noqa: ARG002 (given, so exact in any dtype)
        """Features [count, n * G], as recorded."""
        rows = self._row_of[task.prompt_id]
        return to_tensor(self._reader.take(np.array([rows[root] for root in range(len(rows))], dtype=np.int64)))


# ---- a folder: the trainer's own training data


class StoredFeatures:
    """What a trainer trained on.

    Samples are found by their tokens, which must begin with the prompt's (all but its last, whose features nobody
    needs).

    Args:
        folder: where they are.
        host: the trainer, which reads them.
        tasks: the prompts.
        width: n * G that the draft's fc takes.

    Raises:
        UsageError: no such folder, or no samples in it.
        CheckpointError: a prompt has no sample, or a sample's width is not the draft's.
    """

    def __init__(self, folder: Path, host: TrainingHost, tasks: Sequence[Task], width: int) -> None:
        samples = host.samples(folder)
        if not samples:
            raise UsageError(f"{folder} holds no {host.samples_are}")
        self._sample_of: dict[int, Sample] = {}
        wanted = {task.prompt_id: np.array(task.token_ids[:-1], dtype=np.int64) for task in tasks}
        for sample in samples:
            for prompt, tokens in wanted.items():
                if prompt not in self._sample_of and np.array_equal(sample.token_ids[: len(tokens)], tokens):
                    self._sample_of[prompt] = sample
        if lost := [task.record["prompt_key"] for task in tasks if task.prompt_id not in self._sample_of]:
            raise CheckpointError(
                f"{folder}: none of {len(samples)} files begins with the tokens of prompt {lost[0]} "
                f"({len(lost)} of {len(tasks)} have none): was it made with another chat template?"
            )
        for sample in self._sample_of.values():
            if sample.width() != width:
                raise CheckpointError(
                    f"{sample.file} holds features of width {sample.width()}, "
                    f"this draft's fc takes {width}: it was made for another draft"
                )

    def count(self, task: Task) -> int:
        """Every root whose next token is known."""
        return max(0, len(task.token_ids) - 1)

    def rows(self, task: Task, *, reference: bool) -> Any:  # noqa: ARG002 (given, so exact in any dtype)
        """Features [count, n * G], as stored."""
        return self._sample_of[task.prompt_id].features(self.count(task))


def open_features(
    features: str,
    *,
    host: TrainingHost,
    tasks: Sequence[Task],
    replay: Trace | None,
    target: Path | None,
    layer_ids: Sequence[int] | None,
    width: int,
    precision: Precision,
    progress: Progress,
) -> Features:
    """The features that `--features` names: ``compute``, ``serve`` or a folder.

    Raises:
        UsageError: what it needs was not given.
        CheckpointError: see the classes above.
    """
    if features == "serve":
        if replay is None:
            raise UsageError("--features serve takes them from the trace given with --replay, and there is none")
        return ServedFeatures(replay, tasks, width)
    if features != "compute":
        return StoredFeatures(Path(features), host, tasks, width)
    if target is None or layer_ids is None:
        raise UsageError("--features compute runs the target: give --target, or take --features serve")
    return ComputedFeatures(target, layer_ids, tasks, width, precision, progress)
