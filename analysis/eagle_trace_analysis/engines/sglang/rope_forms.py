"""Which rotary embeddings the engine builds from a config, and what it stops at while it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle_trace_analysis.engines.refusal import Refusal, is_number, not_an_object, shown

#: forms of rotary embedding that the engine builds, and what transformers wants beside the form
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor"),
    "deepseek_yarn": (), "proportional": (),
}  # fmt: skip


def rope_refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """What the engine stops at in the keys of the rotary embedding, old and new."""
    scaling = config.get("rope_scaling")
    rope, name = (scaling, "rope_scaling") if scaling else (config.get("rope_parameters"), "rope_parameters")
    if scaling and not isinstance(scaling, dict):
        yield not_an_object("rope_scaling", scaling)
        return
    factor = config.get("partial_rotary_factor", 1)
    if not is_number(factor) or factor < 0:
        yield Refusal(
            "partial_rotary_factor",
            f"partial_rotary_factor is {shown(factor)}, which is not a share of a head",
            "remove partial_rotary_factor, or set it as trained",
        )
    for key, bad in (("rope_is_neox_style", list | dict), ("original_max_position_embeddings", dict)):
        held = config.get(key)
        if isinstance(held, bad) and (held or key == "rope_is_neox_style"):
            yield Refusal(key, f"{key} is {shown(config[key])}", f"remove {key}, or set it as trained")
    rope = rope if isinstance(rope, dict) else {}
    theta, where = (
        (rope["rope_theta"], f"{name}.rope_theta")
        if "rope_theta" in rope
        else (config.get("rope_theta", 1e4), "rope_theta")
    )
    if not is_number(theta):
        yield Refusal(where, f"rope_theta is {shown(theta)}, not a number", "set rope_theta as trained")
    yield from _rope_form(rope, name)


def _rope_form(rope: Mapping[str, Any], name: str) -> Iterator[Refusal]:
    # sections for text, height and width make it a plain embedding to the class, whatever form is named
    form = rope["rope_type"] if "rope_type" in rope else rope.get("type", "default")
    form = "default" if "mrope_section" in rope else form
    if not isinstance(form, str) or form not in ROPE_NEEDS:
        known = ", ".join(ROPE_NEEDS)
        yield Refusal(
            f"{name}.rope_type",
            f"{name} asks for the rotary embedding {shown(form)}, of which the engine has none (it has {known})",
            f"set {name} as trained",
        )
        return
    for key in ROPE_NEEDS[form]:
        if key not in rope:
            yield Refusal(f"{name}.{key}", f"{name} of the form {form} has no {key}", f"set {name}.{key} as trained")
    for key, value in rope.items():
        if isinstance(value, dict):
            yield Refusal(f"{name}.{key}", f"{name}.{key} is an object, not a value", f"set {name}.{key} as trained")
    yield from _rope_numbers(rope, name, form)


def _rope_numbers(rope: Mapping[str, Any], name: str, form: str) -> Iterator[Refusal]:
    scaled = form not in ("default", "proportional")
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if (
            key not in rope
            or not scaled
            or (key != "factor" and form not in ("llama3", "yarn", "longrope", "deepseek_yarn"))
        ):
            continue
        value = rope[key]
        if form == "longrope" and key == "factor":
            continue
        if not is_number(value):
            yield Refusal(
                f"{name}.{key}",
                f"{name}.{key} is {shown(value)}, not a number",
                f"set {name}.{key} as trained",
            )
        elif form == "linear" and key == "factor" and not isinstance(value, float):
            yield Refusal(
                f"{name}.factor",
                f"{name}.factor is {shown(value)}: for the form linear the engine wants a number with a fraction",
                f"set {name}.factor to {float(value)}",
            )
        elif key.endswith("freq_factor") and not value:
            yield Refusal(
                f"{name}.{key}",
                f"{name}.{key} is {value!r}, which the engine divides by",
                f"set {name}.{key} as trained",
            )
        elif key.startswith("original") and form in ("yarn", "longrope") and value <= (form == "longrope"):
            yield Refusal(
                f"{name}.{key}",
                f"{name}.{key} is {shown(value)}, which the engine divides by",
                f"set {name}.{key} as trained",
            )
    if form == "longrope":
        for key in ("short_factor", "long_factor"):
            if key in rope and not (isinstance(rope[key], list) and all(map(is_number, rope[key]))):
                yield Refusal(
                    f"{name}.{key}",
                    f"{name}.{key} is {shown(rope[key])}, not a list of numbers",
                    f"set {name}.{key} as trained",
                )
