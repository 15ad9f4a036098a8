"""A deployed folder as the training that it must have come from, where nobody has that training any more.

The inverse of `export`: a published head in SGLang's format, written as speculators would have saved it, so that
speculators' forward can be held against what a server computes. What the folder says is believed: a rope theta that
was copied wrongly is wrong in this reference too. The weights are believed before the config: an fc that takes three
layers was trained on three, whatever `use_aux_hidden_state` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from eagle_trace.errors import CheckpointError
from eagle_trace.families import EAGLE3
from eagle_trace_analysis.checkpoint.exported import written_whole
from eagle_trace_analysis.checkpoint.files import StoredTensor, stored_dtype
from eagle_trace_analysis.checkpoint.subject import Subject, open_subject
from eagle_trace_analysis.engines import SGLANG, Engine

#: what a reference cannot be made of, and the way out
NEEDS_TRAINED = "give the folder that was trained as --trained"


def write_own_reference(deployed: Path, out: Path, *, target: Path, engine: Engine = SGLANG) -> None:
    """Write the folder `deployed`, in the format of `engine`, into the new folder `out` as speculators saves a draft.

    Raises:
        CheckpointError: speculators has no form of it; the sentence says what is missing.
    """
    subject = open_subject(deployed, target, None, engine)
    if subject.is_speculators:
        raise CheckpointError(f"{deployed} is in speculators format already: {NEEDS_TRAINED}")
    lacking = what_is_missing(subject)
    if lacking:
        raise CheckpointError(
            f"{deployed} cannot be its own reference: {'; '.join(lacking)}. "
            f"{NEEDS_TRAINED[0].upper()}{NEEDS_TRAINED[1:]}"
        )
    _write(subject, out)


def translate(draft: Path, out: Path, *, target: Path, force: bool = False) -> None:
    """The same for an engine that loads speculators format and is to serve a draft in SGLang's.

    Raises:
        CheckpointError: speculators has no form of it; the sentence says what is missing.
        OutputExistsError, RecordingError: see `written_whole`.
    """
    subject = open_subject(draft, target, None)
    if lacking := what_is_missing(subject):
        raise CheckpointError(f"{draft} cannot be written in speculators format: {'; '.join(lacking)}")
    with written_whole(out, force=force, sources=(draft, target)) as folder:
        _write(subject, folder)


def _write(subject: Subject, out: Path) -> None:
    tensors = _tensors(subject)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = _config(subject, stored_dtype(subject.tensors) or "float32")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def what_is_missing(subject: Subject) -> list[str]:
    """One sentence for each thing without which speculators' forward cannot stand in for the training."""
    if subject.kind is not None:
        return [f"it is no Llama-type EAGLE-3 draft but {subject.kind.name}, which speculators does not compute"]
    if EAGLE3.name != subject.engine.FAMILY:
        return ["its attention is latent (MLA), and speculators computes Llama and Qwen3 layers"]
    if subject.refused or not subject.has_sizes:
        return [f"{subject.engine.TITLE}'s config loader refuses its config (`eagle-trace check` says where)"]
    found = []
    if "quantization_config" in subject.checkpoint.config or not all(
        tensor.is_float or subject.engine.canonical_name(tensor.name) in ("d2t", "t2d")
        for tensor in subject.tensors.values()
    ):
        found.append("its weights are quantised, and speculators computes plain ones only")
    fc = subject.tensors.get("fc.weight")
    if fc is None:
        found.append("it holds no fc.weight: speculators has no head that is fed one feature as it is")
    elif _input_ids(subject) is None:
        found.append("neither its config nor its target says which target layers it was trained on")
    own, theirs = int(subject.full["hidden_size"]), subject.target.config.get("hidden_size") if subject.target else None
    if theirs is not None and theirs != own:
        found.append(f"it is {own} wide and its target {theirs}: speculators makes both the same")
    if _size(subject, "draft_vocab_size") != _size(subject, "vocab_size") and "d2t" not in subject.tensors:
        found.append("it has a vocabulary of its own and no d2t")
    return found


def _size(subject: Subject, name: str) -> int:
    return int(subject.full.get(name) or subject.full["vocab_size"])


def _input_ids(subject: Subject) -> list[int] | None:
    """Target layers in speculators' convention, as many as fc takes; None if nothing says which."""
    config = dict(subject.served)
    own = {key: value for key, value in (config.get("eagle_config") or {}).items() if key != "use_aux_hidden_state"}
    ids = subject.engine.captured_inputs(
        config | {"eagle_config": own}, subject.target_layers, subject.target_architecture
    )
    width = int(subject.full.get("target_hidden_size") or subject.full["hidden_size"])
    return ids if ids is not None and len(ids) * width == subject.tensors["fc.weight"].shape[1] else None


def _config(subject: Subject, dtype: str) -> dict[str, Any]:
    full = subject.full
    layer: dict[str, Any] = {
        name: full[name]
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size", "hidden_act", "attention_bias",
            "mlp_bias",
        )
        if name in full
    }  # fmt: skip
    rope = {
        key: value
        for key, value in subject.engine.rope_settings(subject.served).items()
        if key != "partial_rotary_factor"
    }
    normed = any(name.endswith(".q_norm.weight") for name in subject.engine.parameters(subject.served))
    kind, name = ("qwen3", "Qwen3ForCausalLM") if normed else ("llama", "LlamaForCausalLM")
    layer |= {"model_type": kind, "architectures": [name], "rope_parameters": rope}
    layer |= {"dtype": dtype, "tie_word_embeddings": False}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": _size(subject, "draft_vocab_size"),
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": _input_ids(subject),
        "embed_requires_grad": False,
        # an engine that has the other form only computes that, whatever the config says
        "norm_before_residual": bool(subject.served.get("norm_before_residual"))
        and subject.gap("norm_before_residual") is None,
        "norm_before_fc": subject.engine.norm_before_fc(subject.served),
        "fc_norm": subject.engine.fc_norm(subject.served),
        "norm_output": bool(subject.served.get("norm_output", False)),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": [subject.target_architecture or "LlamaForCausalLM"]},
        },
    }


def _tensors(subject: Subject) -> dict[str, NDArray[Any]]:
    """The weights under speculators' names: fused ones cut apart, the map of the vocabulary made whole."""
    known = subject.engine.parameters(subject.served)
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in subject.tensors.items():
        if name in ("d2t", "t2d") or (name == "embed_tokens.weight" and subject.engine.REPLACES_EMBEDDING):
            continue  # the engine takes the target's embedding, and so does speculators where there is none
        parts = subject.engine.destinations(tensor.name, known)
        found |= _cut(tensor, parts, known) if len(parts) > 1 else {name: tensor.read()}
    for name in [one for one in found if (entering := subject.engine.entering_norm(one)) and entering in found]:
        # of a later layer SGLang applies hidden_norm, which is speculators' input_layernorm
        found[name] = found.pop(str(subject.engine.entering_norm(name)))
    for name in [one for one in found if one.endswith(".hidden_norm.weight") and subject.engine.layer_of(one)]:
        found[name.replace("hidden_norm", "input_layernorm")] = found.pop(name)
    if subject.served.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found | _vocabulary(subject)


def _cut(tensor: StoredTensor, parts: tuple[str, ...], known: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    ends = np.cumsum([known[part][0] for part in parts])[:-1]
    return dict(zip(parts, (np.ascontiguousarray(one) for one in np.split(tensor.read(), ends)), strict=True))


def _vocabulary(subject: Subject) -> dict[str, NDArray[Any]]:
    """d2t as offsets, and the mask t2d that it stands for, which nobody needs for serving; nothing for all ids."""
    whole, own = _size(subject, "vocab_size"), _size(subject, "draft_vocab_size")
    stored = subject.tensors.get("d2t")
    if stored is None or whole == own:
        return {}
    d2t = stored.read().astype(np.int64)
    ids = d2t + np.arange(len(d2t))
    t2d = np.zeros(whole, np.bool_)
    t2d[ids[(ids >= 0) & (ids < whole)]] = True
    return {"d2t": d2t, "t2d": t2d}
