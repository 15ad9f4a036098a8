"""Loading the draft (and what it needs of the target) with speculators, with an answer for every way that
fails.

Speculators looks for the verifier that the draft's config names, which may be on another machine or another
model by now. Here `--target` is the only target: the path in the config is not followed, and what the
checkpoint lacks is taken from `--target` as speculators does it for the verifier.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.utils import get_verifier_config, resolve_target_layer_ids
from speculators.utils.loading import load_model_layers
from transformers.utils import logging as hf_logging

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError, HostError, UsageError
from eagle_trace_speculators.params import draft_tensors

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SEED = 0


class _StandaloneDraft(Eagle3DraftModel):
    """Speculators' draft, loaded from its own folder only."""

    def load_verifier_weights(self) -> None:
        """Nothing: see `_fill_from_target`."""


@dataclass
class LoadedDraft:
    """A draft as speculators loaded it.

    Attributes:
        model: the `Eagle3DraftModel`, in evaluation mode.
        layer_ids: target layers its features come from (Hugging Face `hidden_states[i]`), None if nothing
            says.
        stored: names of the tensors in the checkpoint.
        facts: what the manifest says about it.
        warnings: what is wrong with it without being an error.
    """

    model: Any
    layer_ids: list[int] | None
    stored: set[str]
    facts: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's forward, not compiled: a compiled one would trace the hooks away."""
        return partial(uncompiled(type(self.model).forward), self.model)

    @property
    def fused_width(self) -> int:
        """Width of the features it takes."""
        return int(self.model.fc.in_features)

    @property
    def hidden_size(self) -> int:
        """Hidden size of the draft, and of its target (speculators makes them the same)."""
        return int(self.model.hidden_size)


def uncompiled(function: Any) -> Any:
    """The function that torch.compile was given (on CUDA), or `function` itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled() -> bool:
    """Whether speculators compiled its forward when it was imported."""
    return uncompiled(Eagle3DraftModel.forward) is not Eagle3DraftModel.forward


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for ``auto``; raises HostError for CUDA that is not there, UsageError for other devices."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu or cuda, not {device!r}")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise HostError("there is no CUDA device here: use --device cpu")
    return device


def resolve_dtype(dtype: str, draft: Path, replayed: str | None) -> str:
    """On-disk name of the dtype to run in; ``auto`` is the replayed trace's, else the draft checkpoint's."""
    if dtype == "auto":
        dtype = replayed or _stored_dtype(draft)
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"--dtype must be auto, float32, float16 or bfloat16, not {dtype!r}")
    return dtype


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
                "whose config.json has a transformer_layer_config"
            )
        raise CheckpointError(f"{draft} is no speculators draft: its config.json has no speculators_model_type")
    if kind != "eagle3":
        raise CheckpointError(f"{draft} is a {kind} draft: only eagle3 can be recorded")
    try:
        config = Eagle3SpeculatorConfig.from_pretrained(draft)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise CheckpointError(f"speculators refuses the config of {draft}: {_first_line(error)}") from error
    if not _weight_files(draft):
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
    stored = _stored_names(draft)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            # the dtype must come in here: .to(dtype) would also round the rotary frequencies
            model = _StandaloneDraft.from_pretrained(draft, config=config, dtype=DTYPES[dtype])
        except (RuntimeError, ValueError, OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"speculators cannot load {draft}: {_first_line(error)}") from error
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
    return LoadedDraft(model, layer_ids, stored, facts, notes)


def raise_dtype(model: Any, dtype: str) -> Any:
    """Widen the parameters of `model` in place; buffers (rotary frequencies) stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return model


def target_config(target: Path) -> Any:
    """The text config of a target folder; raises CheckpointError if there is none."""
    if not target.is_dir():
        raise CheckpointError(f"there is no target at {target}: no such folder")
    try:
        return get_verifier_config(str(target))
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"cannot read the config of the target {target}: {_first_line(error)}") from error


def target_facts(target: Path) -> dict[str, Any]:
    """What the manifest says about a target."""
    config = target_config(target)
    names = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "tie_word_embeddings",
    )
    facts = checkpoint_facts(target, read_config(target)) | {name: getattr(config, name, None) for name in names}
    return facts | target_sample(target)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or load reports: what matters of them is in the trace."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


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
        raise CheckpointError(f"the draft {draft} does not fit the target {target}: {_first_line(error)}") from error


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
        raise CheckpointError(f"cannot take {' and '.join(wanted)} from {target}: {_first_line(error)}") from error
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


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@contextlib.contextmanager
def _weights(file: Path) -> Iterator[Any]:
    """An open weights file; raises CheckpointError if it is cut off or altered."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({_first_line(error)}): copy or save the checkpoint again") from error


def _stored_names(draft: Path) -> set[str]:
    names: set[str] = set()
    for file in _weight_files(draft):
        with _weights(file) as tensors:
            names |= set(tensors.keys())
    return names


def _stored_dtype(draft: Path) -> str:
    read_draft_config(draft)
    for file in _weight_files(draft):
        with _weights(file) as tensors:
            if "fc.weight" in tensors.keys():  # noqa: SIM118 (no mapping)
                return str(tensors.get_tensor("fc.weight").dtype).removeprefix("torch.")
    return "float32"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
