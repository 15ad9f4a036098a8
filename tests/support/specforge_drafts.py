"""The demo draft as SpecForge writes it, and SpecForge's training data of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.pairs import DRAFT, TARGET


def draft_config(**flags: Any) -> dict[str, Any]:
    """The draft_config.json that one writes for SpecForge."""
    given = json.loads((DRAFT / "config.json").read_text())
    layer = dict(given["transformer_layer_config"])
    rope = layer.pop("rope_parameters")
    # speculators' id i is the input of layer i, servers' and SpecForge's its output
    ids = [i - 1 for i in given["eagle_aux_hidden_state_layer_ids"]]
    return layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "bfloat16",
        "draft_vocab_size": given["draft_vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        **flags,
    }  # fmt: skip


def own_names() -> dict[str, Any]:
    """The demo draft's tensors by SpecForge's names, without the embedding, which it does not save."""
    stored = load_file(DRAFT / "model.safetensors")
    return {name.replace("layers.0.", "midlayer."): one for name, one in stored.items() if "embed" not in name}


def write_checkpoint(folder: Path, **flags: Any) -> Path:
    """What SpecForge leaves in training: `run-step1/training_state.pt`, with the draft_config.json beside it."""
    checkpoint = folder / "run-step1"
    checkpoint.mkdir(parents=True)
    (folder / "draft_config.json").write_text(json.dumps(draft_config(**flags)))
    state = {"strategy": "eagle3", "draft_state_dict": own_names(), "global_step": 1}
    torch.save(state, checkpoint / "training_state.pt")
    return checkpoint


def exported(folder: Path, **flags: Any) -> Path:
    """A checkpoint, exported by SpecForge's own command to the format that SGLang loads."""
    from specforge.export.to_sglang import export_to_sglang

    checkpoint = write_checkpoint(folder, **flags)
    with contextlib.redirect_stdout(None):
        export_to_sglang(str(checkpoint), str(folder / "draft_config.json"), str(folder / "exported"))
    return folder / "exported"


def write_samples(folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> Path:
    """SpecForge's offline samples, as its capture leaves them: what layers 1, 3 and 4 put out, and the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).eval()
    folder.mkdir(parents=True, exist_ok=True)
    ids = draft_config()["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = model.model(tokens, output_hidden_states=True)
        mask = torch.ones(len(prompt), dtype=torch.long)
        mask[: len(prompt) // 3] = 0
        sample = {
            "input_ids": tokens[0],
            "loss_mask": mask,
            "aux_hidden_state": torch.cat([out.hidden_states[i + 1] for i in ids], -1),
            "hidden_state": out.last_hidden_state,
        }
        torch.save(sample, folder / f"{number}.ckpt")
    return folder
