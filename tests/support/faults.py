"""Ways to break a healthy pair: each changes a copy of the deployed (or of the trained) draft and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def edit(
    source: Path,
    out: Path,
    *,
    config: Callable[[Config], object] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
) -> Path:
    """A copy of the checkpoint `source` in `out`, with its config and its tensors changed in place."""
    shutil.copytree(source, out)
    if config is not None:
        path = out / "config.json"
        data = json.loads(path.read_text())
        config(data)
        path.write_text(json.dumps(data))
    if tensors is not None:
        path = out / "model.safetensors"
        held = load_file(path)
        tensors(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path)
    return out


#: what glibc fills fresh memory with (as float32: 0.0115), so that a parameter nobody loads is wrong in the same way on
#: every run: left to chance, it now and then holds a NaN, which is another fault
FRESH_MEMORY = ("MALLOC_PERTURB_", "195")


# ---- what is wrong in the deployed folder -----------------------------------------------------------------------


def single_layer_features(config: Config) -> None:
    config["eagle_config"]["use_aux_hidden_state"] = False


def layer_ids_shifted(config: Config) -> None:
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in ids]


def rope_theta(config: Config) -> None:
    config["rope_parameters"]["rope_theta"] = 500.0


def norm_eps(config: Config) -> None:
    config["rms_norm_eps"] = 1e-2


def lm_head_missing(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def d2t_minus_arange(tensors: Tensors) -> None:
    """The repair that broke the story's checkpoint: `arange` subtracted from offsets that were right."""
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))


DOWN, O_PROJ = "layers.0.mlp.down_proj.weight", "layers.0.self_attn.o_proj.weight"
GATE, UP, HIDDEN_NORM = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.hidden_norm.weight"


def partial_rotary(config: Config) -> None:
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    config["partial_rotary_factor"] = 0.5


def another_epoch(tensors: Tensors) -> None:
    """Every weight a little further, as more training leaves them."""
    draw = torch.Generator().manual_seed(5)
    for name, one in tensors.items():
        if one.is_floating_point() and name != "embed_tokens.weight":
            size = one.float().square().mean().sqrt()
            tensors[name] = (one.float() + 0.03 * size * torch.randn(one.shape, generator=draw)).to(one.dtype)


def int8(tensors: Tensors) -> None:
    """Every projection rounded to 127 steps of the largest element of each row."""
    for name, one in tensors.items():
        if name.endswith("_proj.weight"):
            step = one.float().abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = ((one.float() / step).round() * step).to(one.dtype)


def down_scaled(tensors: Tensors) -> None:
    """Less than one rounding of bfloat16 for most elements."""
    tensors[DOWN] = (1.005 * tensors[DOWN].float()).to(tensors[DOWN].dtype)


def one_output_scaled(tensors: Tensors) -> None:
    """One channel of the attention's output, of 128."""
    scaled = tensors[O_PROJ].float()
    scaled[7] *= 1.02
    tensors[O_PROJ] = scaled.to(tensors[O_PROJ].dtype)


def gate_and_up_exchanged(tensors: Tensors) -> None:
    tensors[GATE], tensors[UP] = tensors[UP], tensors[GATE]


def fc_blocks_moved(tensors: Tensors) -> None:
    a, b, c = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([b, a, c], dim=1)


def hidden_norm_scaled(tensors: Tensors) -> None:
    tensors[HIDDEN_NORM] = (1.2 * tensors[HIDDEN_NORM].float()).to(tensors[HIDDEN_NORM].dtype)


# ---- what the training side did that the server does not ----------------------------------------------------------


def norm_before_residual(config: Config) -> None:
    config["norm_before_residual"] = True


def norm_output(config: Config) -> None:
    config["norm_output"] = True
