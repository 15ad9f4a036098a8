"""A draft in the flat format that servers load, for a trainer whose class has other names for the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError
from eagle_trace.recording.names import FUSED, canonical_name
from eagle_trace_training.config import check_config, check_map, rope_form
from eagle_trace_training.weights import dtype_name, quantised_of, target_config, target_tensor, weight_files, weights

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class Published:
    """A draft as a trainer's class loads it.

    Attributes:
        folder: where it lies.
        config: its config, in the trainer's words.
        state: tensors by the trainer's names.
        stored: their names in the folder.
        layer_ids: target layers of its features, by servers' ids (the output of layer i); None if it names none.
        translated: what was put in other words.
    """

    folder: Path
    config: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    layer_ids: list[int] | None = None
    translated: list[str] = field(default_factory=list)

    def part(self, name: str) -> Mapping[str, Any]:
        """A nested part of the config, empty where there is none; raises CheckpointError for what is no object."""
        found = self.config.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(f"{name} in the config of {self.folder} is {found!r}, not an object")
        return found or {}

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of the config, which is one if it is there; raises CheckpointError where there is none."""
        found = self.config.get(name)
        found = default if found is None else found
        if found is None:
            raise CheckpointError(f"there is no {name} in the config of {self.folder}")
        return int(found)

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary parameters in the new form, whichever form the config has."""
        given = dict(self.config.get("rope_scaling") or self.config.get("rope_parameters") or {})
        given["rope_type"] = rope_form(given)
        return given

    @property
    def quantised(self) -> list[str]:
        """Tensors that are not of a dtype a draft is trained in."""
        return quantised_of({name: dtype_name(one) for name, one in self.state.items()})


def read_published(draft: Path, rename: Callable[[str], str]) -> Published:
    """Read a folder; fused projections are taken apart.

    Args:
        draft: the folder.
        rename: makes the trainer's name of a canonical one (`canonical_name`).

    Raises:
        CheckpointError: it is another kind of folder, or damaged.
    """
    found = Published(draft, dict(read_flat_config(draft)))
    check_config(draft, found.config)
    renamed: dict[str, str] = {}
    stored: set[str] = set()
    for file in weight_files(draft):
        with weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                stored.add(name)
                for part, tensor in _pieces(canonical_name(name), tensors.get_tensor(name), found):
                    own = rename(part)
                    found.state[own] = tensor
                    if own != name:
                        renamed[name] = own
    found.stored = frozenset(stored)
    ids = found.part("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        raise CheckpointError(
            f"eagle_aux_hidden_state_layer_ids in the config of {draft} is {ids!r}, not a list of ids"
        )
    found.layer_ids = ids
    vocabulary = found.number("vocab_size")
    check_map(draft, found.state.get("d2t"), found.number("draft_vocab_size", vocabulary), vocabulary)
    if renamed:
        name, own = next(iter(renamed.items()))
        found.translated.append(f"names of {len(renamed)} tensors, e.g. {name}: {own}")
    return found


def read_flat_config(draft: Path) -> dict[str, Any]:
    """The config of a draft in the format that servers load; raises CheckpointError for another kind of folder."""
    config = read_config(draft)
    if "speculators_model_type" in config:
        raise CheckpointError(f"{draft} is a draft of speculators: record it with --host speculators")
    if not weight_files(draft):
        raise CheckpointError(f"{draft} holds no *.safetensors: the draft's weights are missing")
    return config


def _pieces(name: str, tensor: Any, found: Published) -> list[tuple[str, Any]]:
    """A fused tensor in its parts, any other as it is."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            heads = found.number("num_attention_heads")
            groups = found.number("num_key_value_heads", heads)
            shares = [heads, groups, groups] if len(parts) == 3 else [1, 1]
            if len(tensor) % sum(shares):
                ratio = " : ".join(map(str, shares))
                raise CheckpointError(f"{name} in {found.folder} has {len(tensor)} rows, which do not split {ratio}")
            pieces = tensor.split([len(tensor) // sum(shares) * share for share in shares])
            return [(name.replace(fused, part), piece.clone()) for part, piece in zip(parts, pieces, strict=True)]
    return [(name, tensor)]


def beyond_one_layer(found: Published, rotations: Collection[str]) -> list[tuple[object, str]]:
    """What no class of one plain decoder layer computes: whether a draft has it, and what it does then.

    Args:
        found: the draft.
        rotations: forms of rotary embedding that the class has.
    """
    config, rope = found.config, found.rope
    layers = sorted(n for n in found.state if n.startswith("layers.") and not n.startswith("layers.0."))
    kind = "sections" if "mrope_section" in rope else rope["rope_type"]
    return [
        (found.quantised, f"holds quantised tensors ({', '.join(found.quantised[:2])}, ...)"),
        (config.get("quantization_config"), "has a quantization_config"),
        (layers, f"has more than one layer ({', '.join(layers[:2])}, ...)"),
        (config.get("norm_before_residual"), "has norm_before_residual: its residual stream starts from the norm"),
        (kind not in rotations, f"rotates by {kind} (the class has {', '.join(rotations)})"),
    ]


def from_target(
    draft: Path, stored: Collection[str], model: Any, target: Path | None, kept: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """The embedding and the head of a draft that has none, from its target; and what was taken, in words.

    Args:
        draft: its folder.
        stored: names of the tensors that it has.
        model: the trainer's module, which says how large they are.
        target: the target's folder, None if none was given.
        kept: ids of which a head is taken, bool [V], where the draft scores fewer than the target has.

    Raises:
        CheckpointError: there is no target, or it does not have them.
    """
    wanted = [name for name in (EMBEDDING, HEAD) if name not in stored]
    taken: dict[str, Any] = {}
    for name in wanted:
        if target is None:
            lacking = " and no ".join(wanted)
            raise CheckpointError(f"the draft {draft} has no {lacking}: give the target that it takes them from")
        tensor = target_tensor(target, name)
        if tensor is None and name == HEAD:
            tensor = target_tensor(target, EMBEDDING)  # tied
        if tensor is not None and name == HEAD and kept is not None and len(kept) == len(tensor):
            tensor = tensor[kept]
        place = model.get_parameter(name)
        if tensor is None or tensor.shape != place.shape:
            what = "none" if tensor is None else f"one of {list(tensor.shape)}"
            raise CheckpointError(
                f"the draft {draft} needs a {name} of {list(place.shape)}; the target {target} has {what}"
            )
        taken[name] = tensor
    return taken, [f"{name} is not in the draft's checkpoint: taken from the target" for name in wanted]


def default_layers(layers: int) -> list[int]:
    """Servers' ids of the layers that are captured of a target of so many, where the draft names none."""
    return [1, layers // 2 - 1, layers - 4]


def captured_inputs(found: Published, target: Path | None) -> list[int] | None:
    """Target layers by Hugging Face's numbers (the input of layer i); None if neither config nor target say.

    Args:
        found: the draft.
        target: the target's folder.

    Raises:
        CheckpointError: the target has no such layers.
    """
    ids = found.layer_ids
    if target is not None:
        layers = int(target_config(target).num_hidden_layers)
        ids = default_layers(layers) if ids is None else ids
        if not ids or not all(0 <= i < layers for i in ids):
            raise CheckpointError(
                f"the draft {found.folder} takes features of layers {ids}; the target {target} has {layers} layers"
            )
    return None if ids is None else [i + 1 for i in ids]
