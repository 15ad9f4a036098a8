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
from safetensors import SafetensorError
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.utils import resolve_target_layer_ids
from speculators.utils.loading import load_model_layers

from eagle_trace.checkpoints import checkpoint_facts, read_config
from eagle_trace.errors import CheckpointError
from eagle_trace_speculators.params import draft_tensors
from eagle_trace_training.host import LoadedDraft, TrainingHost
from eagle_trace_training.numerics import DTYPES, quiet
from eagle_trace_training.weights import first_line, stored_names, target_config, weight_files

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SEED = 0


class _StandaloneDraft(Eagle3DraftModel):
    """Speculators' draft, loaded from its own folder only."""

    def load_verifier_weights(self) -> None:
        """Nothing: see `_fill_from_target`."""


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
    try:
        config = Eagle3SpeculatorConfig.from_pretrained(draft)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise CheckpointError(f"speculators refuses the config of {draft}: {first_line(error)}") from error
    if not weight_files(draft):
        raise CheckpointError(f"{draft} holds no *.safetensors: the draft's weights are missing")
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def load_draft(host: TrainingHost, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
    """Load a draft in `dtype` onto `device`.

    Args:
        host: speculators.
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
    stored = stored_names(draft)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            # the dtype must come in here: .to(dtype) would also round the rotary frequencies
            model = _StandaloneDraft.from_pretrained(draft, config=config, dtype=DTYPES[dtype])
        except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"speculators cannot load {draft}: {first_line(error)}") from error
    notes = _fill_from_target(model, stored, draft, target)
    model = model.to(device).eval()
    names = set(draft_tensors(model))
    missing, dropped = sorted(names - stored), sorted(stored - names)
    facts = checkpoint_facts(draft, read_config(draft)) | config_facts(config, layer_ids)
    facts |= {"missing_keys": missing, "dropped_keys": dropped}
    if others := [name for name in missing if name not in (EMBEDDING, HEAD)]:
        notes.append(f"not in the draft's checkpoint, left at their start values: {', '.join(others)}")
    if dropped:
        notes.append(f"in the draft's checkpoint, not used by speculators: {', '.join(dropped)}")
    made = loaded(host, model, layer_ids)
    return replace(made, stored=stored, facts=facts, warnings=notes)


def loaded(host: TrainingHost, model: Any, layer_ids: list[int] | None) -> LoadedDraft:
    """A model with what its config says of it."""
    config = model.config
    methods = config.speculators_config.proposal_methods
    return LoadedDraft(
        host,
        model,
        layer_ids,
        stored=set(draft_tensors(model)),
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


def _fill_from_target(model: Any, stored: set[str], draft: Path, target: Path | None) -> list[str]:
    """Take the embedding and the head from the target where the checkpoint has none; says what was taken."""
    wanted = [name for name in (EMBEDDING, HEAD) if name not in stored]
    if not wanted:
        return []
    if target is None:
        raise CheckpointError(
            f"the draft {draft} has no {' and no '.join(wanted)}: give the target that it takes them from"
        )
    try:
        with quiet():
            weights = load_model_layers([EMBEDDING, HEAD], str(target))
            # a target with tied embeddings has no head of its own
            weights.setdefault(HEAD, weights[EMBEDDING])
            if model.use_draft_vocab and HEAD in wanted:
                weights[HEAD] = weights[HEAD][model.t2d.bool()]
            for name in wanted:
                model.get_parameter(name).data.copy_(weights[name])
    except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"cannot take {' and '.join(wanted)} from {target}: {first_line(error)}") from error
    return [f"{name} is not in the draft's checkpoint: taken from the target, as speculators does" for name in wanted]


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
