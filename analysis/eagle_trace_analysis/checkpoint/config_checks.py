"""Checks on whether the engine reads the config at all, and as that of a draft of its class."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_trace_analysis.checkpoint.files import as_float32
from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.kinds import Kind, how_served
from eagle_trace_analysis.checkpoint.subject import Subject
from eagle_trace_analysis.engines.refusal import Refusal, shown


def check_format(subject: Subject) -> Finding:
    """Whether the engine would take the folder for an EAGLE-3 draft."""
    if subject.is_speculators and subject.format in subject.engine.READS:
        return passed("format", "", f"{subject.format} format, which {subject.engine.ENGINE} reads as it is")
    if subject.is_speculators:
        return passed(
            "format",
            "",
            "speculators format; everything below is about the folder `eagle-trace export` makes of it for "
            f"{subject.engine.ENGINE}",
        )
    architectures = subject.checkpoint.config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    kind = subject.kind
    if kind is not None:
        said = f"architectures is {architectures}, and " if architectures else ""
        left = [name for name in subject.checkpoint.unlisted if not name.endswith(".safetensors")]
        skips = f"; {subject.engine.TITLE} loads the safetensors alone and leaves {', '.join(left[:3])}" if left else ""
        if subject.engine.loads_kind(kind.id, subject.served):
            return skipped(
                "format",
                "",
                f"architectures is {architectures}, and the tensors are those of {kind.name}: {kind.marks}; "
                f"{how_served(kind.id, subject.served, subject.engine)}. This command knows "
                f"{subject.engine.ARCHITECTURE} only, so nothing else was checked",
            )
        return failed(
            "format",
            "",
            f"{said}the tensors are those of {kind.name}: {kind.marks}{skips}. The other checks are for EAGLE-3 "
            "drafts, and were not made",
            kind.advice or _advice(subject, kind),
        )
    other = next((other for other, names in subject.engine.OTHER_NAMES.items() if name in names), None)
    if other is not None:
        return failed(
            "format",
            "",
            f"architectures is {architectures}, {other}'s name for a draft with the same layer, which "
            f"{subject.engine.ENGINE} does not know; the rest is checked as if it were its own",
            f'set architectures to ["{subject.engine.ARCHITECTURE}"]{_ids_for(other, subject)}',
        )
    if name not in subject.engine.ARCHITECTURES:
        return failed(
            "format",
            "",
            f"architectures is {architectures}, by which the engine would not load it as an EAGLE-3 draft; the tensors "
            "are those of one",
            f'set architectures to ["{subject.engine.ARCHITECTURE}"]',
        )
    return passed("format", "", f"{subject.engine.TITLE} format ({name})")


def _advice(subject: Subject, kind: Kind) -> str:
    """What to do with a draft of another kind."""
    if kind.id == "unknown":
        return "give the folder of an EAGLE-3 draft"
    served = how_served(kind.id, subject.served, subject.engine)
    return served + {
        "latent": f"; this command knows {subject.engine.ARCHITECTURE} only",
        "whole": "; if it is the target, give the draft's folder",
    }.get(kind.id, "")


def _ids_for(other: str, subject: Subject) -> str:
    """What becomes of layer ids that were written for another engine, which counts inputs as trainers do."""
    config = subject.served
    ids = subject.engine.layer_ids(config) or config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return ""
    return (
        f"; if its layer ids {ids} are {other}'s too, which are inputs of layers, write {[i - 1 for i in ids]} into "
        "eagle_config.eagle_aux_hidden_state_layer_ids"
    )


def check_config(subject: Subject) -> Finding:
    """Whether the engine's config loader takes every key: types, nulls, spellings."""
    name, cause = "config", ""
    # one fault is one finding: these have checks of their own
    elsewhere = {"architectures"}
    if isinstance(subject.checkpoint.config.get("hidden_act"), str):
        elsewhere.add("hidden_act")
    if subject.checkpoint.config.get("target_hidden_size", 1) is None:
        elsewhere.add("target_hidden_size")
    refused = [refusal for refusal in subject.refused if refusal.key not in elsewhere]
    refused += _generation_config(subject.checkpoint.folder)
    if refused:
        return failed(
            name,
            cause,
            f"{subject.engine.ENGINE} stops at this config: {'; '.join(refusal.why for refusal in refused)}",
            "; ".join(dict.fromkeys(refusal.fix for refusal in refused)),
        )
    entry = subject.engine.config_class(subject.served)
    if entry is None:
        kind = subject.served.get("model_type")
        return skipped(
            name, cause, f"which types and defaults the config class of model_type {kind} has is not known here"
        )
    if not entry["loads"]:
        kind = subject.served.get("model_type")
        return failed(
            name,
            cause,
            f"model_type is {kind}: from its {entry['class']} the engine cannot build {subject.engine.LAYER}",
            f'set model_type to "{subject.engine.MODEL_TYPE}"',
        )
    imposed = [key for key, value in entry["imposes"].items() if subject.checkpoint.config.get(key, value) != value]
    if imposed and not subject.is_speculators:
        kind = subject.served.get("model_type")
        taken = ", ".join(f"{key} {entry['imposes'][key]}" for key in imposed)
        return failed(
            name,
            cause,
            f"model_type is {kind}, whose {entry['class']} takes {taken} whatever the config says",
            f'set model_type to "{subject.engine.MODEL_TYPE}"',
        )
    return passed(name, cause, f"every key is of a type that {entry['class']} and the engine take")


def _generation_config(folder: Path) -> list[Refusal]:
    """The engine reads a draft's generation config, which it does not use, and stops at one that is not an object.

    One that is not JSON at all is taken for none.
    """
    path = folder / "generation_config.json"
    try:
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return []
    if isinstance(held, dict):
        return []
    why = f"generation_config.json holds {shown(held)}, not an object"
    return [Refusal("generation_config.json", why, "delete generation_config.json: a draft needs none")]


def check_decoder(subject: Subject) -> Finding:
    """What the decoder layer must be for the engine's class: of its kind, with silu and no biases.

    A layer that was trained with speculators is what its config says. In a flat config `model_type` only picks the
    config class, so the tensors decide.
    """
    name, cause = "decoder-layer", "weights-dropped"
    source = subject.trained_layer or subject.full
    layer, own = subject.engine.LAYER, subject.engine.MODEL_TYPE
    kind = source.get("model_type", own)
    trained = [] if subject.training is None else subject.gaps
    problems = [gap.why for gap in trained if gap.setting in ("decoder", "activation")]
    if subject.full["hidden_act"] != "silu" and not any(gap.setting == "activation" for gap in trained):
        problems.append(f"the activation is served as {subject.full['hidden_act']}: the engine has silu only")
    extra = [
        n
        for n in subject.tensors
        # a bias of fc is judged with fc
        if n.endswith((".q_norm.weight", ".k_norm.weight", ".bias"))
        and n != "fc.bias"
        and n not in subject.engine.parameters(subject.served)
        and not _is_zero_bias(subject, n)
    ]
    if extra:
        problems.append(f"the engine drops {', '.join(extra[:4])}")
    else:
        problems += [gap.why for gap in trained if gap.setting == "bias"]
    if problems:
        return failed(name, cause, "; ".join(problems), f"retrain with {layer} (silu, no biases, no q/k norms)")
    others = _other_defaults(subject)
    if others:
        return warned(
            name,
            cause,
            f"{layer} by its tensors, but with model_type {kind} the engine takes {others}",
            f'write these keys as trained, or set model_type to "{own}" if {own}\'s defaults were',
        )
    said = "" if kind == own else f" (model_type {kind} picks the config class only)"
    return passed(name, cause, f"{layer} with silu and no biases, as the engine computes{said}")


def _is_zero_bias(subject: Subject, name: str) -> bool:
    """Whether a tensor is a bias of zeros, which adds nothing where it is dropped."""
    stored = subject.tensors[name]
    return name.endswith(".bias") and stored.is_float and not as_float32(stored.read()).any()


def _other_defaults(subject: Subject) -> str:
    """Defaults that the served `model_type` gives to absent keys and the layer's own (llama) would not; shapes have
    their own checks.
    """
    if subject.trained_layer is not None or subject.engine.config_class(subject.served) is None:
        return ""
    own = subject.engine.MODEL_TYPE
    as_own = subject.engine.with_defaults({**subject.served, "model_type": own})
    found = [
        f"{key} {subject.full.get(key)} ({own} {as_own.get(key)})"
        for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias")
        if subject.served.get(key) is None and subject.full.get(key) != as_own.get(key)
    ]
    ours, theirs = (
        subject.engine.rope_settings(config) for config in (subject.served, {**subject.served, "model_type": own})
    )
    found += [
        f"{key} {ours.get(key)} ({own} {theirs.get(key)})"
        for key in ("rope_theta", "partial_rotary_factor", "rope_type")
        # a NaN that is the same NaN is no other default
        if ours.get(key) not in (theirs.get(key),)
    ]
    return ", ".join(found)
