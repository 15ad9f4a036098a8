"""A tiny random target and the EAGLE-3 draft that speculators makes for it, in the formats that both really
save.

The weights are random but not small, so that no site comes out near zero, and the norms' weights differ from
1, so that a norm that is left out shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eagle_trace.capture import Rows
from eagle_trace.manifest import Manifest
from eagle_trace.writer import TraceWriter, prepare_output

VOCAB, DRAFT_VOCAB, HIDDEN = 96, 40, 32
LAYER_IDS = (1, 2, 4)
TTT_STEPS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,  # on a CPU, SGLang pads what is no multiple of 32
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Pair:
    """Folders of a target and of its draft."""

    target: Path
    draft: Path

    def weights(self) -> dict[str, torch.Tensor]:
        """The draft's tensors as saved."""
        return load_file(self.draft / "model.safetensors")


def write_target(
    folder: Path, *, layers: int = 4, hidden: int = HIDDEN, seed: int = 0, qwen3: bool = False, head_dim: int = 8
) -> Path:
    """Write a random float32 `LlamaForCausalLM` (or Qwen3's) without tokenizer; returns `folder`."""
    make, kind = (Qwen3Config, Qwen3ForCausalLM) if qwen3 else (LlamaConfig, LlamaForCausalLM)
    shape = SHAPE | {"hidden_size": hidden, "head_dim": head_dim}
    config = make(**shape | {"num_hidden_layers": layers, "tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        _stir(model)
    model.save_pretrained(folder)
    return folder


def write_pair(
    folder: Path,
    *,
    draft_layers: int = 1,
    qwen3: bool = False,
    qwen3_target: bool = False,
    target_layers: int = 4,
    full_vocab: bool = False,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 8,
    **flags: bool,
) -> Pair:
    """Write a target and a draft below `folder`.

    Args:
        folder: parent of both.
        draft_layers: decoder layers of the draft.
        qwen3: give the draft Qwen3 layers, which norm queries and keys, instead of Llama's.
        qwen3_target: give the target Qwen3 layers.
        target_layers: decoder layers of the target; SGLang captures none behind the last but one.
        full_vocab: let the draft choose among all of the target's tokens, without d2t and t2d.
        dtype: dtype the draft is saved in.
        head_dim: width of a head, of target and draft; vLLM's CPU attention has none below 32.
        flags: `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`.
    """
    target = write_target(folder / "target", layers=target_layers, qwen3=qwen3_target, head_dim=head_dim)
    make = Qwen3Config if qwen3 else LlamaConfig
    config = make(**SHAPE | {"head_dim": head_dim}, num_hidden_layers=draft_layers, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        size = VOCAB if full_vocab else DRAFT_VOCAB
        kept = torch.randperm(VOCAB)[:size].sort().values
        model = Eagle3DraftModel.from_training_args(
            config,
            t2d=torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True),
            d2t=kept - torch.arange(size),
            draft_vocab_size=size,
            ttt_steps=TTT_STEPS,
            verifier_name_or_path=str(target),
            target_layer_ids=list(LAYER_IDS),
            draft_attn_impl="eager",
            **{"norm_before_residual": False, **flags},
        )
        _stir(model)
    # where the draft was trained is not where it is recorded
    model.config.speculators_config.verifier.name_or_path = "/nowhere/verifier"
    model.to(dtype).save_pretrained(folder / "draft")
    return Pair(target, folder / "draft")


def _stir(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue  # what a draft takes over from its target
        wide = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
        noise = torch.randn(parameter.shape) * wide
        parameter.data = 1.0 + noise if parameter.ndim == 1 else noise * (8.0 if "embed" in name else 1.0)


def random_prompts(lengths: Sequence[int], *, seed: int = 3) -> list[list[int]]:
    """Random token ids, one list a length."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, size=length).tolist() for length in lengths]


def write_prompts(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """Write a prompts file of token ids; returns `path`."""
    path.write_text("".join(f'{{"id": "p{n}", "input_ids": {list(ids)}}}\n' for n, ids in enumerate(prompts)))
    return path


def write_serve_trace(
    out: Path,
    prompts: Sequence[Sequence[int]],
    chains: Mapping[int, Sequence[tuple[int, tuple[int, ...]]]],
    *,
    fused: Sequence[np.ndarray[Any, Any]] | None = None,
    dtype: str = "float32",
    level: str = "values",
    crossed: Sequence[tuple[int, int, tuple[int, ...]]] = (),
    without_roots: Sequence[tuple[int, int]] = (),
) -> Path:
    """Write what a serve recorder would have: step 0 of every root, and one row for each chain and each
    beginning of it.

    Args:
        out: folder of the trace.
        prompts: committed tokens of each prompt.
        chains: for each prompt (root, tokens fed at steps 1 ..).
        fused: for each prompt the features fed, [n - 1, n * G].
        dtype: the server's dtype.
        level: level of the trace.
        crossed: (prompt, root, path) of rows that attended to another branch.
        without_roots: (prompt, root) of step-0 rows the server did not compute.
    """
    prepare_output(out)
    writer = TraceWriter(out, Manifest("serve", level, "sglang", dtype=dtype, target={"path": "/served/target"}))
    for n, ids in enumerate(prompts):
        record = {"prompt_id": n, "prompt_key": f"key-{n}", "request_id": f"r{n}", "token_ids": list(ids)}
        writer.put_record("prompts", record | {"num_prompt_tokens": 2, "text": "", "output_ids": list(ids)[2:]})
        roots = [root for root in range(len(ids) - 1) if (n, root) not in without_roots]
        rows = Rows.build(
            prompt_id=[n] * len(roots),
            root=roots,
            step=[0] * len(roots),
            token_id=[ids[root + 1] for root in roots],
            position=roots,
            call_id=n,
        )
        writer.put_rows(rows)
        if fused is not None:
            writer.put_values("fused", rows, np.ascontiguousarray(fused[n][roots]))
        below = {(root, path[:s], True) for root, path in chains.get(n, ()) for s in range(1, len(path) + 1)}
        below |= {(root, path, False) for prompt, root, path in crossed if prompt == n}
        for root, path, own in sorted(below):
            writer.put_rows(
                Rows.build(
                    prompt_id=[n],
                    root=[root],
                    step=[len(path)],
                    token_id=[path[-1]],
                    position=[root + len(path)],
                    call_id=n,
                    path=[path],
                    own_path=[own],
                )
            )
    return writer.seal()
