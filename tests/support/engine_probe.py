"""``python -m tests.support.engine_probe JOB``: what SGLang's own classes hold, load and capture.

Each of a job's configs is built on torch's meta device, and each of its names is loaded into it; each target class is
told each of the job's layer ids.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

from tests.support.engine_judge import prepare


def main(job: Path) -> None:
    """Answer a job where it says: ``answers`` per config (shapes, and where each name lands), ``ids`` per target."""
    asked = json.loads(job.read_text())
    prepare(asked["model"], asked["store"])
    answers = [_held(case["config"], case["names"], latent=case["latent"]) for case in asked["cases"]]
    ids: dict[str, list[Any]] = {}
    for module, name in asked["targets"]:
        owner = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
        ids[name] = [_captured(owner, given) for given in asked["ids"]]
    Path(asked["out"]).write_text(json.dumps({"answers": answers, "ids": ids}))


def _held(config: dict[str, Any], together: list[str], *, latent: bool) -> dict[str, Any]:
    """Shapes of a class's parameters, and where each name lands; names in one entry are loaded at once."""
    import torch
    from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from transformers import DeepseekV3Config, LlamaConfig

    make, cls = (DeepseekV3Config, Eagle3DeepseekV2ForCausalLM) if latent else (LlamaConfig, LlamaForCausalLMEagle3)
    try:
        made = make(**config)
        with torch.device("meta"):
            model = cls(made)
    except (ValueError, TypeError) as error:
        return {"refused": str(error)}
    params = dict(model.named_parameters())
    loaded: dict[str, Any] = {}
    for names in together:
        hit: list[list[Any]] = []
        for key, param in params.items():

            def loader(_param: Any, _weight: Any, shard: Any = None, key: str = key, hit: Any = hit) -> None:
                hit.append([key, shard])

            param.weight_loader = loader
        model.hot_token_id = None
        model.load_weights([(name, torch.zeros(1, dtype=torch.long)) for name in names.split()])
        loaded[names] = hit[0] if hit else (["d2t", None] if model.hot_token_id is not None else None)
    return {"shapes": {name: list(param.shape) for name, param in params.items()}, "loaded": loaded}


def _captured(owner: Any, given: list[int] | None) -> Any:
    fake = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(is_last_rank=True),
        config=types.SimpleNamespace(num_hidden_layers=30),
        model=types.SimpleNamespace(),
    )
    owner.set_eagle3_layers_to_capture(fake, given)
    return fake.model.layers_to_capture


if __name__ == "__main__":
    main(Path(sys.argv[1]))
