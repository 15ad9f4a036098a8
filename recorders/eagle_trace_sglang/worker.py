"""SGLang's draft worker, as the recorder in its scheduler process sees it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eagle_trace.families import EAGLE3_MLA
from eagle_trace.manifest import Manifest
from eagle_trace.recording.arrays import to_array
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import FUSED, FUSED_ON_LOAD, MAPS, canonical_name, fills, latent_filled
from eagle_trace.writer import TraceWriter
from eagle_trace_serving.cached import cached_as
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recorder import Tell
from eagle_trace_serving.recording import Recording
from eagle_trace_serving.stored import checkpoint_names
from eagle_trace_sglang.batches import batch_of, parents_of
from eagle_trace_sglang.captured import target_facts
from eagle_trace_sglang.deployment import ONE_REPLICA
from eagle_trace_sglang.graphs import has_graphs, hook_graph_boundaries, run_eagerly
from eagle_trace_sglang.layers import draft_layers, family_of
from eagle_trace_sglang.params import loaded_params
from eagle_trace_sglang.ranks import draft_place, replicas
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.sites import hook_draft, partial_sums, shards, tell_missing

EAGER = (
    "the draft ran eagerly while recording, its CUDA graphs put aside: Python hooks do not run inside a replayed graph"
)
KEPT_GRAPHS = (
    "CUDA graphs were kept: of the draft's extend only what enters and leaves its graph was recorded, of the draft's "
    "steps only the tokens"
)
PACKAGES = ("sglang", "torch", "transformers", "numpy", "eagle-trace")


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
        count = replicas(worker.server_args)
        dropped = self._dropped()
        warnings = [f"SGLang dropped from the draft's checkpoint: {', '.join(dropped)}"] if dropped else []
        return Facts(
            host="sglang",
            packages={name: version(name) for name in PACKAGES},
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
            dropped_keys=dropped,
            not_materialised=list(self._never_computed()),
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
        return Recording(order, writer, self._target_width, target_ids, shards(self._model))

    def hang(self, hooks: Hooks, tell: Tell, order: Order, manifest: Manifest) -> None:
        """Hang everything that tells a recording of the draft's forwards; see `DraftWorker`."""
        # not with the other facts: SGLang tells its target which layers to capture after the draft was loaded
        manifest.target |= target_facts(self._worker.target_worker.model_runner.model)
        if has_graphs(self._worker):
            manifest.changes.append(KEPT_GRAPHS if order.keep_cuda_graphs else EAGER)
        if order.keep_cuda_graphs:
            hook_graph_boundaries(hooks, self._worker, tell)
        else:
            run_eagerly(hooks, self._worker)

        def opened(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            tell(lambda recording: recording.open_call(batch_of(batch)))

        def captured(site: str, tensor: Any) -> None:
            tell(lambda recording: recording.capture(site, tensor))

        hooks.before(self._model.model, opened)
        tell_missing(manifest, hook_draft(hooks, self._model, captured))
        hooks.after(self._model.logits_processor, lambda *_: tell(lambda recording: recording.close_call()))
        _watch_branches(hooks, tell)

    def _stored(self) -> dict[str, str]:
        return checkpoint_names(Path(self._worker.draft_runner.model_config.model_path))

    def _filled(self) -> dict[str, tuple[str, ...]]:
        """By stored name, the trained names of the parameters it is loaded into, should the model have them."""
        names = self._stored().values()
        if family_of(self._model) is EAGLE3_MLA:
            return latent_filled(names)
        return {name: fills(name) for name in names}

    def _dropped(self) -> list[str]:
        """Tensors of the checkpoint that no parameter of the loaded model comes from."""
        known = {canonical_name(name) for name, _ in self._model.named_parameters()}
        for whole, parts in (FUSED | FUSED_ON_LOAD).items():
            known |= {name.replace(whole, part) for name in known if f".{whole}." in name for part in parts}
        known |= {*MAPS}
        return sorted(name for name, into in self._filled().items() if not known.intersection(into))

    def _never_computed(self) -> Iterator[dict[str, str]]:
        """Sites of which this server computes nothing, or not for all rows."""
        for site in ("logits", "topk.draft_id", "topk.target_id"):
            why = "SGLang computes logits for the last row of a prefill only"
            yield {"site": site, "rows": "prefill", "why": why}
        for site in partial_sums(self._model):
            why = "SGLang leaves this sum unfinished on each rank and completes it in a later kernel"
            yield {"site": site, "rows": "all", "why": why}
        mlp = getattr(draft_layers(self._model)[0][1], "mlp", None)
        if getattr(getattr(mlp, "dual_gemm", None), "mode", None) is not None:
            why = "SGLang runs gate, up and activation in one kernel on this GPU"
            for name in ("gate", "up", "act"):
                yield {"site": f"layer.0.mlp.{name}", "rows": "all", "why": why}


def _watch_branches(hooks: Hooks, tell: Tell) -> None:
    """Tell what the draft chose at each step."""
    from sglang.srt.speculative import eagle_worker_v2

    def chosen(result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        tell(lambda recording: recording.chosen(result[0], *parents_of(result[3], int(args[0]), int(args[5]))))

    hooks.wrap(eagle_worker_v2, "select_top_k_tokens", chosen)
