"""A published head, in the format servers load, as SpecForge's class has it: names, ids and flags translated.

SpecForge writes `midlayer.*`, and its own export is taken as it is, flags included: that is what it trained. Any other
folder's flags mean what servers mean by them. What the class cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.names import FUSED, canonical_name
from eagle_trace_training.weights import weight_files, weights

CLASS = "LlamaForCausalLMEagle3"
OWN = "midlayer."
#: rotations whose tables SpecForge builds as servers do
ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
#: dtypes a head is trained in; others are quantised
PLAIN = ("float32", "float16", "bfloat16")
WAY_OUT = "record the trainer that it comes from, or compare two servers"


@dataclass
class Published:
    """A head as SpecForge's class loads it.

    Attributes:
        config: SpecForge's config.
        state: tensors by SpecForge's names.
        layer_ids: target layers of its features, servers' ids (the output of layer i); None for SpecForge's default.
        translated: what was put in other words.
    """

    config: dict[str, Any]
    state: dict[str, Any]
    layer_ids: list[int] | None
    translated: list[str] = field(default_factory=list)


def read_head(draft: Path) -> Published:
    """Read a head's folder and translate it.

    Raises:
        CheckpointError: it is another kind of folder, or SpecForge's class cannot express what it holds.
    """
    config = head_config(draft)
    found = Published(dict(config), {}, (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"))
    stored = _tensors(draft)
    own = any(OWN in name for name in stored)
    _translate_names(found, stored, config)
    if not own:
        _translate_flags(found, draft)
    if config.get("architectures") != [CLASS]:
        found.translated.append(f"architectures {config.get('architectures')}: {CLASS}")
        found.config["architectures"] = [CLASS]
    if int(config.get("pretraining_tp") or 1) > 1:
        found.translated.append(
            f"pretraining_tp {config['pretraining_tp']}: 1, the same sums without slices of weights"
        )
        found.config["pretraining_tp"] = 1
    _check(found, draft)
    return found


def head_config(draft: Path) -> dict[str, Any]:
    """The config of a draft in the format that servers load; raises CheckpointError for another kind of folder."""
    if draft.is_dir() and not (draft / "config.json").exists() and any(draft.glob("training_state*.pt")):
        raise CheckpointError(
            f"{draft} is a checkpoint of SpecForge in training: export it (specforge export --to sglang) and give the "
            "folder that was exported"
        )
    config = read_config(draft)
    if "speculators_model_type" in config:
        raise CheckpointError(f"{draft} is a draft of speculators: record it with --host speculators")
    if not weight_files(draft):
        raise CheckpointError(f"{draft} holds no *.safetensors: the draft's weights are missing")
    return config


def _tensors(draft: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in weight_files(draft):
        with weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                found[name] = tensors.get_tensor(name)
    return found


def _translate_names(found: Published, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    renamed: dict[str, str] = {}
    for name, tensor in stored.items():
        canonical = canonical_name(name)
        for part, piece in _pieces(canonical, tensor, config):
            own = part.replace("layers.0.", OWN, 1)
            found.state[own] = piece
            if own != name:
                renamed[name] = own
    if renamed:
        name, own = next(iter(renamed.items()))
        found.translated.append(f"names of {len(renamed)} tensors, e.g. {name}: {own}")


def _pieces(name: str, tensor: Any, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A fused tensor in its parts, any other as it is."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            heads, groups = (int(config.get(key) or 0) for key in ("num_attention_heads", "num_key_value_heads"))
            shares = [heads, groups or heads, groups or heads] if len(parts) == 3 else [1, 1]
            if not sum(shares) or len(tensor) % sum(shares):
                raise CheckpointError(
                    f"{name} has {len(tensor)} rows, which {' : '.join(map(str, shares))} do not share"
                )
            rows = [len(tensor) // sum(shares) * share for share in shares]
            pieces = tensor.split(rows)
            return [(name.replace(fused, part), piece.clone()) for part, piece in zip(parts, pieces, strict=True)]
    return [(name, tensor)]


def _translate_flags(found: Published, draft: Path) -> None:
    """`norm_output`, which is servers' word for a normed carry, and another thing to SpecForge 0.2.0."""
    if found.config.get("norm_output"):
        raise CheckpointError(
            f"{draft} is served with norm_output true (the carry is normed), which SpecForge's class cannot express: "
            f"{WAY_OUT}"
        )
    if "norm_output" in found.config:
        del found.config["norm_output"]
        found.translated.append("norm_output false, as servers mean it (the carry is not normed): left out")


def _check(found: Published, draft: Path) -> None:
    """Raises CheckpointError for the first thing that SpecForge's class cannot express."""
    config, state = found.config, found.state
    inner = config.get("eagle_config") or {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    quantised = sorted(
        name
        for name, tensor in state.items()
        if name not in ("d2t", "t2d") and str(tensor.dtype).removeprefix("torch.") not in PLAIN
    )
    layers = sorted(name for name in state if name.startswith("layers."))
    biases = sorted(name for name in state if name.endswith(".bias") and torch.count_nonzero(state[name]))
    if "fc.weight" not in state:
        raise CheckpointError(f"{draft} has no fc.weight: it is not an EAGLE-3 draft")
    features = state["fc.weight"].shape[1] // int(config.get("target_hidden_size") or config["hidden_size"])
    for wrong, what in (
        (quantised, f"holds quantised tensors ({', '.join(quantised[:2])}, ...)"),
        (config.get("quantization_config"), "has a quantization_config"),
        (layers, f"has more than one layer ({', '.join(layers[:2])}, ...)"),
        (biases, f"has biases ({', '.join(biases[:2])}, ...)"),
        (features != 3, f"takes {features} features of the target, not 3"),
        (config.get("norm_before_residual"), "has norm_before_residual: its residual stream starts from the norm"),
        (inner.get("norm_before_fc") or config.get("norm_before_fc"), "norms its features together (norm_before_fc)"),
        (kind not in ROPE or "mrope_section" in rope, f"rotates by {kind} sections or scaling"),
        (inner.get("use_aux_hidden_state") is False, "takes no features of inner layers (use_aux_hidden_state false)"),
    ):
        if wrong:
            raise CheckpointError(f"{draft} {what}, which SpecForge's class cannot express: {WAY_OUT}")
    for name in [name for name in state if name.endswith(".bias")]:
        del state[name]
        found.translated.append(f"{name} is zero: left out")
