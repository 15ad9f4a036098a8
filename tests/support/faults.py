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


# ---- what the training side did that the server does not ----------------------------------------------------------


def norm_before_residual(config: Config) -> None:
    config["norm_before_residual"] = True


def norm_output(config: Config) -> None:
    config["norm_output"] = True
