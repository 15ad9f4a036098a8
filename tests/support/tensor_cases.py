"""Drafts whose tensors or files are out of the ordinary: what the engine makes of each, and what `check` must say.

The unit tests ask `check`; `tests/integration/test_tensor_judge.py` asks the engine's own loader about the same
folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make

Write = Callable[[Path], object]

#: what the engine does: loads all of it; leaves something at its start or drops it; does not start
FINE, PARTLY, REFUSES = "fine", "partly", "refuses"
#: not to be asked: it would build until the memory is full
UNBUILT = "unbuilt"


@dataclass(frozen=True)
class Case:
    """A folder.

    Attributes:
        engine: what the engine's loader makes of it.
        finding, words: the one check that fails and what it says ("" if nothing may fail).
        fix: what its fix says.
        warns: checks that warn.
    """

    name: str
    write: Write
    engine: str = FINE
    finding: str = ""
    words: str = ""
    fix: str = ""
    warns: tuple[str, ...] = field(default=())


def flat(**changes: Any) -> dict[str, Any]:
    """The flat config of the healthy draft."""
    config = make.decoder_config(1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": make.DRAFT_VOCABULARY,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
    }
    return config | changes


HEALTHY = make.draft_tensors()


def tensors(*without: str) -> make.Tensors:
    """The healthy draft's tensors without its embedding and some others."""
    gone = ("embed_tokens.weight", *without)
    return {name: value for name, value in HEALTHY.items() if name not in gone}


def layer(index: int) -> make.Tensors:
    """A further layer, behind the first."""
    found = {}
    for name, value in HEALTHY.items():
        if name.startswith("layers.0."):
            narrow = value[:, : make.HIDDEN] if name.split(".")[3] in ("q_proj", "k_proj", "v_proj") else value
            found[name.replace("layers.0.", f"layers.{index}.")] = narrow
    return found


def folder(config: dict[str, Any], stored: make.Tensors, **beside: dict[str, Any]) -> Write:
    def write(path: Path) -> None:
        make.write_checkpoint(path, config, stored)
        for name, content in beside.items():
            (path / f"{name}.json").write_text(json.dumps(content))

    return write


# ---- layer counts ----------------------------------------------------------------------------------------------

MIDLAYER = {name.replace("layers.0.", "midlayer."): value for name, value in tensors().items()}
COUNTS = [
    Case(
        "count of the target",
        folder(flat(num_hidden_layers=30), tensors()),
        PARTLY,
        "weights-present",
        "the config counts 30 decoder layers",
        "set num_hidden_layers to 1",
    ),
    Case(
        "count of the target, midlayer",
        folder(flat(num_hidden_layers=3), MIDLAYER),
        PARTLY,
        "weights-present",
        "the file holds 1",
        "set num_hidden_layers to 1",
    ),
    Case(
        "count too small",
        folder(flat(), tensors() | layer(1)),
        PARTLY,
        "weight-names",
        "the file holds 2",
        "set num_hidden_layers to 2",
    ),
    Case(
        "count too small, midlayer",
        folder(flat(num_hidden_layers=2), MIDLAYER | layer(1) | layer(2)),
        PARTLY,
        "weight-names",
        "the config counts 2 decoder layers, the file holds 3",
        "set num_hidden_layers to 3",
    ),
    Case("two layers", folder(flat(num_hidden_layers=2), tensors() | layer(1))),
]

# ---- how much is fed -------------------------------------------------------------------------------------------

NORM = "layers.0.hidden_norm.weight"
ONE = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}


def fc(width: int) -> make.Tensors:
    """The draft with an fc of another width."""
    draw = np.random.default_rng(11)
    return tensors() | {"fc.weight": (draw.standard_t(5, (make.HIDDEN, width)) * 0.1).astype(ml_dtypes.bfloat16)}


#: with an embedding of its own, as a draft of another width than its target needs
OWN = dict(HEALTHY)


def ids(*named: int, **more: Any) -> dict[str, Any]:
    return flat(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(named)}, **more)


FED = [
    Case("one feature", folder(flat(eagle_config=ONE), tensors("fc.weight", NORM)), warns=("weights-present",)),
    Case("one feature with its norm", folder(flat(eagle_config=ONE), tensors("fc.weight"))),
    Case("one feature, no ids", folder(flat(eagle_config={"use_aux_hidden_state": False}), tensors("fc.weight"))),
    Case("one captured layer", folder(ids(29), tensors("fc.weight"))),
    Case("two features", folder(ids(1, 14), fc(2 * make.HIDDEN))),
    Case("four features", folder(ids(1, 14, 20, 26), fc(4 * make.HIDDEN))),
    Case(
        "one feature, flag on",
        folder(flat(), tensors("fc.weight", NORM)),
        PARTLY,
        "aux-hidden-state",
        "holds no fc",
        "set eagle_config.use_aux_hidden_state to false",
        ("weights-present",),
    ),
    Case("fc lost", folder(flat(), tensors("fc.weight")), PARTLY, "weights-present", "fc.weight", "ship them"),
    Case(
        "three features, flag off",
        folder(flat(eagle_config={**ONE, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}), tensors()),
        FINE,
        "aux-hidden-state",
        "takes 3",
        "set eagle_config.use_aux_hidden_state to true",
    ),
    Case(
        "fc of one feature",
        folder(flat(eagle_config=ONE, num_aux_hidden_states=1), fc(make.HIDDEN)),
        FINE,
        "aux-hidden-state",
        "is skipped",
        "train without fc",
    ),
    Case(
        "fc of one feature, built for three",
        folder(flat(eagle_config=ONE), fc(make.HIDDEN)),
        REFUSES,
        "aux-hidden-state",
        "is skipped",
        "train without fc",
    ),
    Case(
        "fc of one captured layer", folder(ids(29), fc(make.HIDDEN)), FINE, "fc-width", "skips fc", "train on several"
    ),
    Case("features of another width", folder(flat(target_hidden_size=80), OWN | {"fc.weight": fc(240)["fc.weight"]})),
    Case(
        "one feature of another width, built for three",
        folder(flat(eagle_config=ONE, target_hidden_size=80), OWN | {"fc.weight": fc(80)["fc.weight"]}),
        REFUSES,
        "aux-hidden-state",
        "builds fc for 3",
        "set num_aux_hidden_states to 1",
    ),
    Case(
        "one feature of another width",
        folder(flat(eagle_config=ONE, target_hidden_size=80, num_aux_hidden_states=1), OWN | fc(80)),
    ),
    Case(
        "count beyond all bounds",
        folder(flat(num_hidden_layers=10**9), tensors()),
        UNBUILT,
        "weights-present",
        "the file holds 1",
        "set num_hidden_layers to 1",
    ),
    Case("fc too wide", folder(flat(), fc(4 * make.HIDDEN)), REFUSES, "fc-width", "3 layers", "name that many"),
    Case(
        "four announced, three named",
        folder(flat(num_aux_hidden_states=4), fc(4 * make.HIDDEN)),
        FINE,
        "fc-width",
        "captures 3 layers",
        "name the 4 trained layers",
    ),
    Case(
        "bias of fc",
        folder(flat(), tensors() | {"fc.bias": np.ones(make.HIDDEN, np.float32)}),
        PARTLY,
        "fc-width",
        "fc has a bias",
        '"bias" to true',
    ),
    Case(
        "bias of fc, asked for",
        folder(
            flat(bias=True),
            tensors()
            | {
                "fc.bias": np.ones(make.HIDDEN, np.float32),
                "layers.0.self_attn.o_proj.bias": np.ones(make.HIDDEN, np.float32),
            },
        ),
    ),
    Case(
        "bias of fc, without o_proj's",
        folder(flat(bias=True), tensors() | {"fc.bias": np.ones(make.HIDDEN, np.float32)}),
        PARTLY,
        "weights-present",
        "o_proj.bias",
        "ship them",
    ),
]

# ---- files -----------------------------------------------------------------------------------------------------


def _repeated(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "model-00001-of-00001.safetensors", tensors())


def _consolidated(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "consolidated.safetensors", {"output.weight": np.ones(3, np.float32)})


def _other_index(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    index = {"weight_map": {"fc.weight": "gone.safetensors"}}
    (path / "diffusion.safetensors.index.json").write_text(json.dumps(index))


LORA = {
    "base_model.model.layers.0.mlp.up_proj.lora_A.weight": np.eye(4, 64, dtype=np.float32),
    "base_model.model.layers.0.mlp.up_proj.lora_B.weight": 1 + np.eye(96, 4, dtype=np.float32),
}


def _adapter(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    make.write_safetensors(path / "adapter_model.safetensors", LORA)


def _adapter_hides_bin(path: Path) -> None:
    make.write_checkpoint(path, flat(), tensors())
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"never read")
    make.write_safetensors(path / "adapter_model.safetensors", LORA)


INVERSE = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
FILES = [
    Case("twice in two files", _repeated, warns=("weight-names",)),
    Case("consolidated beside", _consolidated),
    Case("an index of something else", _other_index),
    Case("adapter beside", _adapter, PARTLY, warns=("weight-names",)),
    Case("adapter hides the .bin", _adapter_hides_bin, PARTLY, "format", "leaves pytorch_model.bin", "merge it"),
    Case("a buffer that is rebuilt", folder(flat(), tensors() | INVERSE), PARTLY),
]

CASES = [*COUNTS, *FED, *FILES]
