"""Loading the draft (and what it needs of the target) with speculators, with an answer for every way that
fails.

Speculators looks for the verifier that the draft's config names, which may be on another machine or another
model by now. Here `--target` is the only target: the path in the config is not followed, and what the
checkpoint lacks is taken from `--target` as speculators does it for the verifier.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.utils import resolve_target_layer_ids

from eagle_trace.checkpoints import checkpoint_facts, read_config
from eagle_trace.errors import CheckpointError
from eagle_trace_training.config import check_config, check_map, check_shapes
from eagle_trace_training.host import LoadedDraft
from eagle_trace_training.numerics import DTYPES, quiet
from eagle_trace_training.published import EMBEDDING, HEAD, from_target
from eagle_trace_training.weights import (
    draft_tensors,
    first_line,
    loading,
    quantised_of,
    stored_forms,
    stored_tensor,
    target_config,
    weight_files,
)

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
#: training's own targets
NOT_DRAFT = ("verifier_lm_head.", "verifier_norm.")
SEED = 0


class _StandaloneDraft(Eagle3DraftModel):
    """Speculators' draft, loaded from its own folder only."""

    def load_verifier_weights(self) -> None:
        """Nothing: see `load_draft`."""


def uncompiled(function: Any) -> Any:
    """The function that torch.compile was given (on CUDA), or `function` itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled() -> bool:
    """Whether speculators compiled its forward when it was imported."""
    return uncompiled(Eagle3DraftModel.forward) is not Eagle3DraftModel.forward


def read_draft_config(draft: Path) -> Eagle3SpeculatorConfig:
    """The config of a speculators EAGLE-3 draft.

    Raises:
        CheckpointError: no such folder, or it holds something else.
    """
    data = read_config(draft)
    kind = data.get("speculators_model_type")
    if kind is None:
        if "eagle_config" in data or "Eagle" in str(data.get("architectures")):
            raise CheckpointError(
                f"{draft} is a draft in SGLang's flat format: give the folder that speculators saved, "
                "whose config.json has a transformer_layer_config, or record it with --host specforge"
            )
        raise CheckpointError(f"{draft} is no speculators draft: its config.json has no speculators_model_type")
    if kind != "eagle3":
        raise CheckpointError(f"{draft} is a {kind} draft: only eagle3 can be recorded")
    layer = data.get("transformer_layer_config")
    check_config(draft, data | (layer if isinstance(layer, dict) else {}))
    with quiet(), loading(f"speculators refuses the config of {draft}"):
        config = Eagle3SpeculatorConfig.from_pretrained(draft)
    if not weight_files(draft):
        raise CheckpointError(f"{draft} holds no *.safetensors: the draft's weights are missing")
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def load_draft(draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
    """Load a draft in `dtype` onto `device`.

    Args:
        draft: folder that speculators saved.
        target: folder of the target, None if none is needed.
        dtype: on-disk dtype name.
        device: ``cpu`` or ``cuda``.

    Raises:
        CheckpointError: the draft or the target is not what is needed, or they do not fit each other.
    """
    config = read_draft_config(draft)
    layer_ids = _layer_ids(config, draft, target)
    config.eagle_aux_hidden_state_layer_ids = layer_ids
    # with a name here, from_pretrained reads the config of a verifier that may not exist any more
    config.speculators_config.verifier.name_or_path = None
    stored = _stored(draft, config)
    with quiet(), torch.random.fork_rng(devices=[]), loading(f"speculators cannot load {draft}"):
        torch.manual_seed(SEED)
        # the dtype must come in here: .to(dtype) would also round the rotary frequencies
        model = _StandaloneDraft.from_pretrained(draft, config=config, dtype=DTYPES[dtype])
    taken, notes = from_target(draft, stored, model, target, model.t2d.bool() if model.use_draft_vocab else None)
    for name, tensor in taken.items():
        model.get_parameter(name).data.copy_(tensor)
    model = model.to(device).eval()
    names = set(draft_tensors(model, NOT_DRAFT))
    missing, dropped = sorted(names - stored), sorted(stored - names)
    facts = checkpoint_facts(draft, read_config(draft)) | config_facts(config, layer_ids)
    facts |= {"missing_keys": missing, "dropped_keys": dropped}
    if others := [name for name in missing if name not in (EMBEDDING, HEAD)]:
        notes.append(f"not in the draft's checkpoint, left at their start values: {', '.join(others)}")
    if dropped:
        notes.append(f"in the draft's checkpoint, not used by speculators: {', '.join(dropped)}")
    return replace(loaded(model, layer_ids), stored=stored, facts=facts, warnings=notes)


def _stored(draft: Path, config: Any) -> set[str]:
    """Names of a draft's tensors; raises CheckpointError for what its class cannot take, or would convert silently."""
    forms = stored_forms(draft)
    if quantised := quantised_of({name: dtype for name, (dtype, _) in forms.items()}):
        tensors = f"quantised tensors ({', '.join(quantised[:2])}, ...)"
        raise CheckpointError(f"{draft} holds {tensors}, which speculators' class cannot express")
    vocabulary = config.transformer_layer_config.vocab_size
    check_map(draft, stored_tensor(draft, "d2t"), config.draft_vocab_size or vocabulary, vocabulary)
    # by its config alone: transformers only logs which tensor does not fit
    with quiet(), torch.device("meta"), loading(f"speculators cannot load {draft}"):
        made = _StandaloneDraft(config).state_dict()
    check_shapes(draft, {name: shape for name, (_, shape) in forms.items()}, made)
    return set(forms)


def loaded(model: Any, layer_ids: list[int] | None) -> LoadedDraft:
    """A model with what its config says of it."""
    config = model.config
    methods = config.speculators_config.proposal_methods
    return LoadedDraft(
        model,
        layer_ids,
        stored=set(draft_tensors(model, NOT_DRAFT)),
        facts={},
        fused_width=int(model.fc.in_features),
        hidden_size=int(model.hidden_size),  # speculators makes the draft's and the target's the same
        heads=config.transformer_layer_config.num_attention_heads,
        steps=next((int(n) for method in methods if (n := getattr(method, "speculative_tokens", None))), None),
    )


def _layer_ids(config: Any, draft: Path, target: Path | None) -> list[int] | None:
    ids: list[int] | None = config.eagle_aux_hidden_state_layer_ids
    if target is None:
        return ids
    found = target_config(target)
    hidden = config.transformer_layer_config.hidden_size
    if found.hidden_size != hidden:
        raise CheckpointError(
            f"the draft {draft} is for targets of hidden size {hidden}, {target} has {found.hidden_size}: "
            "give the target it was trained for"
        )
    try:
        with quiet():
            return list(resolve_target_layer_ids(ids, str(target)))
    except ValueError as error:
        raise CheckpointError(f"the draft {draft} does not fit the target {target}: {first_line(error)}") from error


def config_facts(config: Any, layer_ids: list[int] | None) -> dict[str, Any]:
    """What the manifest says of a draft's config, by names that do not depend on where the config has them."""
    layer = config.transformer_layer_config
    names = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
        "max_position_embeddings", "sliding_window", "vocab_size",
    )  # fmt: skip
    return {
        "format": "speculators",
        "layer_ids": layer_ids,
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(layer, name, None) for name in names},
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
