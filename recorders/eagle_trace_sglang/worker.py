"""SGLang's draft worker, as the recorder in its scheduler process sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.forward import BEST_SITES
from eagle_trace.recording.hooks import Hooks
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.facts import cached_as, never_computed, packages, target_facts, tell_missing
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.params import dropped
from eagle_trace_serving.recording import Recording
from eagle_trace_serving.stored import filled_by
from eagle_trace_serving.taps import shards_of
from eagle_trace_sglang.batches import batch_of, parents_of
from eagle_trace_sglang.deployment import ONE_REPLICA
from eagle_trace_sglang.graphs import has_graphs, hook_graph_boundaries, run_eagerly
from eagle_trace_sglang.layers import draft_layers, draft_place, family_of
from eagle_trace_sglang.params import loaded_params
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.sites import hook_draft, partial_sums, taps

EAGER = (
    "the draft ran eagerly while recording, its CUDA graphs put aside: Python hooks do not run inside a replayed graph"
)
KEPT_GRAPHS = (
    "CUDA graphs were kept: of the draft's extend only what enters and leaves its graph was recorded, of the draft's "
    "steps only the tokens"
)
#: the list and the flag that `set_eagle3_layers_to_capture` sets, on a target or on a model inside it
CAPTURES = ("layers_to_capture", "capture_aux_hidden_states")


class SGLangDraft:
    """An `EagleDraftWorker`, once its draft is loaded (`eagle_trace_serving.host.DraftWorker`)."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model = worker.draft_runner.model
        self._target_width = int(worker.target_worker.model_config.hidden_size)
        self.rank, self.ranks = draft_place(self._model)

    def facts(self) -> Facts:
        """What the manifest says of the server."""
        from sglang.srt.runtime_context import get_memory, get_spec

        worker, runner, target = self._worker, self._worker.draft_runner, self._worker.target_worker.model_runner
        arguments = worker.server_args
        # data parallelism, also of attention
        count = int(arguments.dp_size) * int(getattr(arguments, "attn_dp_size", 1))
        lost = dropped(self._model, self._filled())
        warnings = [f"SGLang dropped from the draft's checkpoint: {', '.join(lost)}"] if lost else []
        return Facts(
            host="sglang",
            packages=packages("sglang"),
            target=str(target.model_config.model_path),
            draft=str(runner.model_config.model_path),
            device=str(worker.device),
            dtype=str(runner.dtype).removeprefix("torch."),
            architecture=type(self._model).__name__,
            settings={
                "algorithm": str(get_spec().speculative_algorithm),
                "steps": int(worker.speculative_num_steps),
                "topk": int(worker.topk),
                "draft_tokens": int(worker.speculative_num_draft_tokens),
                "prefix_cache": not get_memory().disable_radix_cache,
                **cached_as(*(getattr(one, "kv_cache_dtype", None) for one in (target, runner))),
            },
            vocab_size=int(target.model_config.vocab_size),
            context_length=int(target.model_config.context_len),
            rank=self.rank,
            ranks=self.ranks,
            replicas=count,
            dropped_keys=lost,
            not_materialised=self._never_computed(),
            warnings=[*warnings, *check_release(str(worker.device))],
            refused="" if count == 1 else ONE_REPLICA,
            family=family_of(self._model).name,
        )

    def params(self) -> Iterator[dict[str, Any]]:
        """Rows of params.parquet: what this rank holds of each parameter of the draft."""
        return loaded_params(self._model, self._worker.hot_token_id, set().union(*self._filled().values()))

    def recording(self, order: Order, writer: TraceWriter) -> Recording:
        """A recording of this draft."""
        hot = self._worker.hot_token_id
        target_ids = None if hot is None else to_array(hot)
        return Recording(order, writer, self._target_width, target_ids, shards_of(taps(self._model)))

    def hang(self, hooks: Hooks, recording: Recording) -> None:
        """Hang everything that tells a recording of the draft's forwards; see `DraftWorker`."""
        manifest, keep_graphs = recording.writer.manifest, recording.order.keep_cuda_graphs
        # not with the other facts: SGLang tells its target which layers to capture after the draft was loaded
        manifest.target |= target_facts(self._worker.target_worker.model_runner.model, *CAPTURES)
        if has_graphs(self._worker):
            manifest.changes.append(KEPT_GRAPHS if keep_graphs else EAGER)
        if keep_graphs:
            hook_graph_boundaries(hooks, self._worker, recording)
        else:
            run_eagerly(hooks, self._worker)

        def opened(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recording.open_call(batch_of(kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]))

        hooks.before(self._model.model, opened)
        tell_missing(manifest, "SGLang", hook_draft(hooks, self._model, recording.capture))
        hooks.after(self._model.logits_processor, lambda *_: recording.close_call())
        _watch_branches(hooks, recording)

    def _filled(self) -> dict[str, tuple[str, ...]]:
        return filled_by(Path(self._worker.draft_runner.model_config.model_path), family_of(self._model))

    def _never_computed(self) -> list[dict[str, str]]:
        """Sites of which this server computes nothing, or not for all rows."""
        sites = never_computed(
            "SGLang computes logits for the last row of a prefill only", "prefill", ("logits", *BEST_SITES)
        )
        sites += never_computed(
            "SGLang leaves this sum unfinished on each rank and completes it in a later kernel",
            "all",
            partial_sums(self._model),
        )
        mlp = getattr(draft_layers(self._model)[0][1], "mlp", None)
        if getattr(getattr(mlp, "dual_gemm", None), "mode", None) is not None:
            why = "SGLang runs gate, up and activation in one kernel on this GPU"
            sites += never_computed(why, "all", [f"layer.0.mlp.{name}" for name in ("gate", "up", "act")])
        return sites


def _watch_branches(hooks: Hooks, recording: Recording) -> None:
    """Tell what the draft chose at each step."""
    from sglang.srt.speculative import eagle_worker_v2

    def chosen(result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        recording.chosen(result[0], *parents_of(result[3], int(args[0]), int(args[5])))

    hooks.wrap(eagle_worker_v2, "select_top_k_tokens", chosen)
