"""SGLang's CUDA graphs: Python hooks do not run inside a replayed one.

By default the draft runs eagerly while a recording lasts: SGLang falls back to its eager path wherever a worker holds
no graph runner, so the runners are put aside and handed back afterwards. The target keeps its graphs. With the graphs
kept, what goes into and comes out of them is all there is to see.
"""

from __future__ import annotations

from typing import Any

from eagle_trace.recording.hooks import Hooks
from eagle_trace_serving.recording import Recording
from eagle_trace_sglang.batches import batch_of

#: where the draft worker and its model runner hold graph runners
_RUNNERS = {
    "worker": ("cuda_graph_runner", "cuda_graph_runner_for_draft_extend"),
    "draft_runner": ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"),
}


def _holders(worker: Any) -> list[tuple[Any, str]]:
    owners = {"worker": worker, "draft_runner": worker.draft_runner}
    return [(owners[owner], name) for owner, names in _RUNNERS.items() for name in names]


def has_graphs(worker: Any) -> bool:
    """Whether the draft of `worker` is run by CUDA graphs at all."""
    return any(_is_graph(getattr(owner, name, None)) for owner, name in _holders(worker))


def _is_graph(runner: Any) -> bool:
    return runner is not None and "Eager" not in type(runner).__name__


def run_eagerly(hooks: Hooks, worker: Any) -> None:
    """Put the draft's graph runners aside until `hooks` are removed."""
    for owner, name in _holders(worker):
        if _is_graph(getattr(owner, name, None)):
            hooks.replace(owner, name, None)


def hook_graph_boundaries(hooks: Hooks, worker: Any, recording: Recording) -> None:
    """Record what enters and leaves the graph of the draft's extend: features in, carry and logits out.

    The graph of the draft steps returns tokens only; those are in rounds.parquet anyway.

    Args:
        hooks: takes the hooks off again.
        worker: SGLang's `EagleDraftWorker`.
        recording: told of each replay.
    """
    extend = getattr(worker, "cuda_graph_runner_for_draft_extend", None)
    if extend is None:
        return

    def replayed(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = args[0] if args else kwargs["forward_batch"]
        chosen = args[1] if len(args) > 1 else kwargs["select_index"]
        sites = {"carry": result.hidden_states, "logits": result.next_token_logits}
        recording.replayed(batch_of(batch), chosen, sites)

    hooks.wrap(extend, "execute", replayed)
