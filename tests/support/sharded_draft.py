"""A draft as each of several tensor-parallel ranks loads it, by SGLang's own layers and without the other ranks.

Run as ``python -m tests.support.sharded_draft DRAFT TARGET RANKS`` in `cpu_environment`. Prints a JSON list, an entry a
rank: `sites` (index and count of the part by site, null for all of it), `params` (rows of params.parquet), `partial`
and `unreduced` (`partial_sums` as it is, and if o_proj did not add up).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Load the draft once a rank and say what it holds."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import prepare_server_args

    draft, target, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    words = ["--model-path", target, "--device", "cpu", "--attention-backend", "intel_amx", "--tp-size", str(ranks)]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    server_args = prepare_server_args(words)
    found = []
    for rank in range(ranks):
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
        group = SimpleNamespace(rank_in_group=rank, world_size=ranks, cpu_group=None, device_group=None)
        with get_parallel().override(pp_group=None, tp_group=group):
            found.append(_held(draft))
    print(json.dumps(found))


def _held(draft: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    from eagle_trace.sites import draft_sites
    from eagle_trace_serving.stored import checkpoint_names
    from eagle_trace_serving.taps import shards_of
    from eagle_trace_sglang.params import loaded_params
    from eagle_trace_sglang.sites import partial_sums, taps

    model = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(draft))
    model.load_weights(load_file(draft / "model.safetensors").items())
    known = shards_of(taps(model))
    sites = {site.name: known.get(site.name) for site in draft_sites(3, 1)}
    held = {
        "sites": {name: asdict(shard) if shard else None for name, shard in sites.items()},
        "params": list(loaded_params(model, model.hot_token_id, set(checkpoint_names(draft)))),
        "partial": partial_sums(model),
    }
    model.model.layers[0].self_attn.o_proj.reduce_results = False
    return held | {"unreduced": partial_sums(model)}


if __name__ == "__main__":
    main()
