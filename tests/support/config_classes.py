"""Makes the table of config classes that the static check carries, from the installed transformers and SGLang.

``python -m tests.support.config_classes`` writes it anew; a test holds the file against what this finds.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support import checkpoints as make
from tests.support.engine_judge import VALUES, ask

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "analysis/eagle_trace_analysis/engines/sglang/config_classes.json"

#: model types that flat draft configs were seen with, and those of targets that drafts are made for
MODEL_TYPES = (
    "llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "phi",
    "phi3", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4", "glm4_moe", "gemma2", "gemma3_text",
    "llama4_text", "minimax_m2", "granite", "granitemoe", "olmo2", "exaone4", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "seed_oss", "smollm3", "ernie4_5", "apertus", "cohere2", "starcoder2", "stablelm", "qwen2_5_vl_text",
    "qwen3_vl_text", "qwen3_vl_moe_text",
)  # fmt: skip


#: what classes work out from the other keys of `flat_config`
DERIVED = {"num_key_value_heads": make.HEADS, "head_dim": make.HIDDEN // make.HEADS}


def flat_config(**changes: Any) -> dict[str, Any]:
    """A flat config in which nothing is left to a default."""
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
    return (
        make.decoder_config(1)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": make.DRAFT_VOCABULARY,
            "eagle_config": eagle,
        }
        | changes
    )


def write_config(folder: Path, config: Any) -> Path:
    """A folder with that config alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def find(folder: Path) -> dict[str, Any]:
    """The table of the installed packages, by way of an empty `folder`."""
    cases = [(kind, key) for kind in MODEL_TYPES for key in (None, "heads", "rope_parameters", "empty rope", *VALUES)]
    drafts = []
    for number, (kind, key) in enumerate(cases):
        config = flat_config(model_type=kind)
        if key == "heads":
            # 64 is no multiple of 3; some classes mind
            config |= {"num_attention_heads": 3, "num_key_value_heads": 1}
        elif key == "empty rope":
            config["rope_parameters"] = {}
        elif key is not None:
            del config[key]
        drafts.append(write_config(folder / str(number), config))
    model = make.write_checkpoint(folder / "model", make.decoder_config(1), make.target_tensors())
    answer = ask(folder / "exchange", model, drafts, classes=MODEL_TYPES)
    classes: dict[str, Any] = {}
    for (kind, key), verdict in zip(cases, answer["verdicts"], strict=True):
        if key is None:
            classes[kind] = answer["classes"][kind] | {"loads": verdict["error"] is None, "defaults": {}, "needs": []}
            classes[kind] |= imposed(verdict)
        elif key == "rope_parameters":
            classes[kind]["rope"] = rope_left_out(verdict)
        elif key == "empty rope":
            classes[kind]["theta"] = None if verdict["error"] is not None else verdict["theta"]
        elif key == "heads":
            classes[kind]["divides"] = verdict["error"] is not None
        elif verdict["error"] is not None:
            classes[kind]["needs"].append(key)
        elif verdict["values"][key] != DERIVED.get(key):
            classes[kind]["defaults"][key] = verdict["values"][key]
    return {
        "transformers": version("transformers"),
        "sglang": version("sglang"),
        "model_types": answer["model_types"],
        "classes": classes,
    }


def imposed(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a class makes of a config that names everything: values of its own, a share of each head, no rope keys."""
    if verdict["error"] is not None:
        return {"imposes": {}, "share": 1.0, "reads_rope": True}
    flat = flat_config()
    values = verdict["values"] | {"head_dim": verdict["heads"][2]}
    return {
        "imposes": {key: values[key] for key in VALUES if values[key] != flat[key] and key not in ("mlp_bias",)},
        "share": verdict["rotary"][1] / verdict["heads"][2],
        "reads_rope": verdict["theta"] == flat["rope_parameters"]["rope_theta"],
    }


def rope_left_out(verdict: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding of a class whose config names none, where it is not the plain one."""
    rope: dict[str, Any] = (verdict["error"] is None and verdict["rope"]) or {}
    return {} if rope.get("rope_type", "default") == "default" else rope


def to_text(table: dict[str, Any]) -> str:
    """The file: one line per class."""
    lines = [
        f'"transformers": {json.dumps(table["transformers"])},',
        f'"sglang": {json.dumps(table["sglang"])},',
        f'"model_types": {json.dumps(" ".join(table["model_types"]))},',
        '"classes": {',
        ",\n".join(f"{json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in table["classes"].items()),
        "}",
    ]
    return "{\n" + "\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        TABLE.write_text(to_text(find(Path(scratch))))
