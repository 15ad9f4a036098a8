"""What the installed SGLang makes of draft folders: its config loader, its class on the meta device, its loading.

Run in a process of its own (SGLang keeps its state for the life of a process): `ask` does. No engine is started and no
weight is made, so a folder takes milliseconds; importing SGLang takes the ten seconds.
"""

from __future__ import annotations

import json
import struct
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.own_process import run_module

#: config values that decide what the draft computes
VALUES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "mlp_bias",
)  # fmt: skip


def ask(folder: Path, model: Path, drafts: Sequence[Path], **more: Any) -> dict[str, Any]:
    """Verdicts of the installed SGLang, in a process of its own.

    Args:
        folder: an empty folder for the exchange.
        model: a target that SGLang's settings can be made from.
        drafts: one verdict each, in ``verdicts``.
        more: ``registry`` (true: which classes there are, and which can feed a draft), ``classes`` (model types whose
            config class is described), ``targets`` (folders of targets: what stops the engine at each, or None),
            ``rotations`` (folders of drafts: whether each has a rotary embedding that can be computed with), ``ramps``
            (see there).
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"model": str(model), "store": str(folder / "store"), "out": str(folder / "out.json")} | more
    (folder / "job.json").write_text(json.dumps(job | {"drafts": [str(draft) for draft in drafts]}))
    run_module("tests.support.engine_judge", folder / "job.json")
    answer: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return answer


def prepare(model: str, store: str) -> None:
    """SGLang's process-wide state, as one rank on a CPU."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models import llama_eagle3
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    vars(llama_eagle3)["get_spec"] = lambda: types.SimpleNamespace(speculative_draft_window_size=None)
    publish(
        prepare_server_args(["--model-path", model, "--device", "cpu", "--skip-tokenizer-init"]),
        role="scheduler",
        ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None),
    )
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
    )
    initialize_model_parallel()


def captured(eagle_config: Any) -> Any:
    """The inputs of a 30-layer llama target that a draft's `eagle_config` makes the engine feed; None: one layer."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )
    from sglang.srt.models.llama import LlamaForCausalLM

    use, ids = True, None
    try:  # as spec_aux_hidden_state.py does
        use = eagle_config.get("use_aux_hidden_state", True)
        ids = eagle_config["eagle_aux_hidden_state_layer_ids"]
    except Exception:  # noqa: BLE001 - as the engine does
        ids = None
    target = LlamaForCausalLM.__new__(LlamaForCausalLM)
    target.__dict__ |= {
        "_modules": {},
        "_parameters": {},
        "_buffers": {},
        "pp_group": types.SimpleNamespace(is_last_rank=True),
        "config": types.SimpleNamespace(num_hidden_layers=30),
        "model": types.SimpleNamespace(),
    }
    configure_aux_hidden_state_capture(
        model=target,
        eagle_use_aux_hidden_state=use,
        eagle_aux_hidden_state_layer_ids=ids,
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    return getattr(target.model, "layers_to_capture", None)


def stored_names(folder: Path) -> list[str]:
    """Names of the tensors in a folder's safetensors files."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            names += [name for name in json.loads(stream.read(length)) if name != "__metadata__"]
    return names


def load(model: Any, names: Sequence[str]) -> dict[str, Any]:
    """Which stored names the class takes, and which parameters (part by part) they fill."""
    import torch

    hits: list[tuple[str, Any]] = []
    params = dict(model.named_parameters())
    for key, param in params.items():
        param.weight_loader = lambda _param, _weight, shard=None, key=key: hits.append((key, shard))
    dropped, filled = [], set()
    for name in names:
        hits.clear()
        model.hot_token_id = None
        model.load_weights([(name, torch.zeros(1, dtype=torch.long))])
        filled |= {f"{key}:{shard}" for key, shard in hits}
        if not hits and model.hot_token_id is None and "t2d" not in name:
            dropped.append(name)
    parts = {"qkv_proj": "qkv", "gate_up_proj": (0, 1)}
    wanted = {f"{key}:{shard}" for key in params for shard in next((p for n, p in parts.items() if n in key), (None,))}
    return {"dropped": dropped, "empty": sorted(wanted - filled - {"model.embed_tokens.weight:None"})}


def judge(folder: Path) -> dict[str, Any]:
    """Verdict on one folder: ``error`` (None if the engine takes it), and what it would use."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    try:
        settings = ModelConfig(str(folder), is_draft_model=True, trust_remote_code=False)
        config = settings.hf_config
        inputs = captured(getattr(config, "eagle_config", None))
        # what the model loader does around the class
        before = torch.get_default_dtype()
        torch.set_default_dtype(settings.dtype)
        try:
            with torch.device("meta"):
                model = LlamaForCausalLMEagle3(config)
        finally:
            torch.set_default_dtype(before)
    except Exception as error:  # noqa: BLE001 - whatever stops the engine
        return {"error": f"{type(error).__name__}: {error}"}
    attention = model.model.layers[0].self_attn if len(model.model.layers) else None
    rotary = attention and attention.rotary_emb
    return {
        "error": None,
        "class": config.architectures[0],
        "dtype": str(settings.dtype).removeprefix("torch."),
        "context": settings.context_len,
        "captured": inputs,
        "shapes": {name: list(value.shape) for name, value in model.named_parameters()},
        "theta": rotary and rotary.base,
        "rotary": rotary and [type(rotary).__name__, rotary.rotary_dim],
        "rope": config.rope_parameters,
        "heads": attention and [attention.total_num_heads, attention.total_num_kv_heads, attention.head_dim],
        "norm_output": bool(model.model.norm_output),
        "target_head": model.load_lm_head_from_target,
        "values": {key: getattr(config, key, None) for key in VALUES},
        **load(model, stored_names(folder)),
    }


def rotation(folder: Path) -> bool:
    """Whether a draft's class builds tables of cosines and sines that can be computed with, as it does for a GPU."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    def as_on_a_gpu(*given: Any, device: Any = None, **more: Any) -> Any:
        return get_rope(*given, **more)

    vars(deepseek_v2)["get_rope_wrapper"] = as_on_a_gpu
    try:
        config = ModelConfig(str(folder), is_draft_model=True, trust_remote_code=False).hf_config
        latent = config.architectures == [Eagle3DeepseekV2ForCausalLM.__name__]
        model = (Eagle3DeepseekV2ForCausalLM if latent else LlamaForCausalLMEagle3)(config)
    except Exception:  # noqa: BLE001 - whatever stops the engine
        return False
    attention = next(module for module in model.modules() if hasattr(module, "rotary_emb"))
    scale = torch.tensor(float(attention.scaling))
    names = ("cos_sin_cache", "short_cos_sin_cache", "long_cos_sin_cache")
    tables = [table for name in names if (table := getattr(attention.rotary_emb, name, None)) is not None]
    return bool(scale.isfinite() and scale and all(len(one) and one.isfinite().all() and one.any() for one in tables))


def ramps(ends: Sequence[tuple[float, float]]) -> list[list[bool]]:
    """Of `beta_fast` and `beta_slow`: whether each class of yarn divides fast rotations and leaves slow ones."""
    import torch
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    plain, factor, found = 1 / 5e4 ** (torch.arange(0, 64, 2) / 64), 64.0, []
    settings = {"rotary_dim": 64, "base": 5e4, "max_position_embeddings": 4096, "scaling_factor": factor}
    settings |= {"extrapolation_factor": 1, "truncate": True, "device": "cpu"}
    for fast, slow in ends:
        divided = []
        for owner in (YaRNScalingRotaryEmbedding, DeepseekScalingRotaryEmbedding):
            one = owner.__new__(owner)
            torch.nn.Module.__init__(one)
            vars(one).update(settings, beta_fast=fast, beta_slow=slow)
            divided.append(plain / one._compute_inv_freq(factor))
        found.append([bool(share[0] > share[-1]) for share in divided])
    return found


def judge_target(folder: Path) -> str | None:
    """What stops the engine at a target's config; None if it is read."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        ModelConfig(str(folder), trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - whatever stops the engine
        return f"{type(error).__name__}: {error}"
    return None


def registry() -> dict[str, dict[str, bool]]:
    """Every target class that this process could import, and which of the two methods it has."""
    from sglang.srt.models.registry import ModelRegistry

    methods = ("set_eagle3_layers_to_capture", "get_embed_and_head")
    return {
        name: {method: hasattr(owner, method) for method in methods} for name, owner in ModelRegistry.models.items()
    }


def config_class(model_type: str) -> dict[str, Any]:
    """Name, and own fields with their types, of the config class that a model type stands for."""
    import dataclasses

    from sglang.srt.utils.hf_transformers import common  # registers SGLang's own
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert common
    owner = CONFIG_MAPPING[model_type]
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = {field.name: field.type for field in dataclasses.fields(owner) if field.name not in base}
    # a flat config's numbers only: nothing below speaks of fields that hold other configs
    words = {
        name: str(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind) for name, kind in fields.items()
    }
    return {
        "class": owner.__name__,
        "types": {
            name: text.replace("transformers.modeling_rope_utils.RopeParameters | ", "") for name, text in words.items()
        },
    }


def model_types() -> list[str]:
    """Every model type that a config may name."""
    from sglang.srt.utils.hf_transformers import common
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted({*CONFIG_MAPPING, *common._CONFIG_REGISTRY})


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prepare(job["model"], job["store"])
    answer: dict[str, Any] = {"verdicts": [judge(Path(folder)) for folder in job["drafts"]]}
    answer["targets"] = [judge_target(Path(folder)) for folder in job.get("targets", ())]
    answer["rotations"] = [rotation(Path(folder)) for folder in job.get("rotations", ())]
    answer["ramps"] = ramps(job.get("ramps", ()))
    if job.get("registry"):
        answer["registry"] = registry()
    if "classes" in job:
        answer["classes"] = {name: config_class(name) for name in job["classes"]}
        answer["model_types"] = model_types()
    Path(job["out"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
