"""An `OnlineEagle3Model` in training: what its forward is given and returns, and where recording hangs in."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.modeling.draft.llama3_eagle import LlamaAttention, LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead

from eagle_trace.capture import Array
from eagle_trace.checkpoints import config_digest
from eagle_trace.errors import HostError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.stage import Held
from eagle_trace_specforge.load import default_layers, loaded
from eagle_trace_specforge.sites import SiteTap
from eagle_trace_training.batches import PADDING, Batch
from eagle_trace_training.host import HungTaps, LoadedDraft, Receive, TrainingHost
from eagle_trace_training.numerics import DTYPES
from eagle_trace_training.twin import twin
from eagle_trace_training.weights import target_config

#: what the forward returns, a list of one value per step each
METRICS = ("ploss", "acceptance_rate", "acc", "correct", "denom", "loss", "loss_denom")
#: where the verifier's distribution over the draft vocabulary is computed
TEACHERS = ("_compute_target_p_padded", "compute_target_p_padded_from_hidden")


class LiveModel:
    """The draft in a model that SpecForge trains; see `LiveDraft`.

    Args:
        host: SpecForge.
        model: an `Eagle3TrainStrategy` or its model, also inside DistributedDataParallel, FSDP or torch.compile.

    Raises:
        UsageError: there is no EAGLE-3 draft in it that can be recorded.
    """

    interrupts: tuple[type[BaseException], ...] = ()

    def __init__(self, host: TrainingHost, model: Any) -> None:
        self.host = host
        self.module = inner = getattr(model, "eagle3_model", model)
        while not isinstance(inner, eagle3.OnlineEagle3Model):
            inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
            if not isinstance(inner, torch.nn.Module):
                raise UsageError(
                    "recording() takes SpecForge's Eagle3TrainStrategy or OnlineEagle3Model, or a wrapper around one, "
                    f"not {type(model).__name__}"
                )
        self.module, self.draft = inner, inner.draft_model
        if not isinstance(self.draft, LlamaForCausalLMEagle3):
            raise UsageError(f"recording() takes a LlamaForCausalLMEagle3, not a {type(self.draft).__name__}")
        if inner.attention_backend == "usp":
            raise UsageError("recording() takes no draft whose sequences are split over ranks (attention usp)")
        self.hidden_size = int(self.draft.target_hidden_size)
        self.signature = inspect.signature(eagle3.OnlineEagle3Model.forward)
        self._unshifted: Any = None

    def describe(self, manifest: Manifest) -> None:
        """What its config says of it."""
        config = self.draft.config
        written = json.loads(config.to_json_string())
        ids = (written.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        manifest.draft = {
            # no path: what is on disk is not what is in training
            "path": None,
            "started_from": str(config.name_or_path or "") or None,
            "config_digest": config_digest(written),
            "config": written,
            "format": "specforge",
            # the features are whatever the data or the capturing server hold: these ids say what is deployed
            "layer_ids": None if ids is None else [i + 1 for i in ids],
            "draft_vocab_size": config.draft_vocab_size,
        }
        manifest.target = {"path": None}

    def trained(self) -> list[str]:
        """Canonical names of the parameters that are trained."""
        return [canonical_name(name) for name, one in self.draft.named_parameters() if one.requires_grad]

    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, with sdpa attention; see `eagle_trace_training.twin`."""
        model = twin(self.draft, DTYPES[dtype])
        # all kinds of attention have the same parameters
        model.midlayer.self_attn.__class__ = LlamaAttention
        ids = (model.config.to_dict().get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if ids is None and target is not None:
            ids = default_layers(int(target_config(target).num_hidden_layers))
        return loaded(self.host, model, None if ids is None else [i + 1 for i in ids])

    def hang(self, hooks: Hooks, receive: Receive, targets: Callable[[Any], None]) -> tuple[HungTaps, list[str]]:
        """Hang the sites, the verifier's distribution, and the shift that drops each document's first token."""
        tap = SiteTap(hooks, self.draft, receive)
        for name in TEACHERS:
            hooks.wrap(eagle3, name, lambda result, _args, given: targets(result[0][:, : -given["length"]]))
        hooks.wrap(TargetHead, "preprocess", lambda _result, args, given: self._shifted(args, given))
        return tap, []

    def _shifted(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._unshifted = given["input_ids"] if "input_ids" in given else args[1]

    def batch(self, given: Mapping[str, Any], keep: Callable[[Any], Held]) -> Callable[[], Batch]:
        """The forward's arguments, by name: a document per row, padded on the right.

        The row of a document's last token is fed what the shift leaves (0), so it is no data.

        Raises:
            HostError: the positions are not one number per token.
        """
        places = given.get("position_ids")
        if places is not None and places.ndim != 2:
            raise HostError("the forward was given positions of several axes: this draft's rotation is not recorded")
        unshifted, self._unshifted = self._unshifted, None
        tensors = {name: given.get(name) for name in ("input_ids", "attention_mask", "position_ids", "loss_mask")}
        held = {name: keep(one) for name, one in (tensors | {"unshifted": unshifted}).items() if one is not None}
        return lambda: batch_of({name: one.array for name, one in held.items()})

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 (the model itself holds them)
        """How training runs the draft; and how far its rotary tables reach, which one long sequence builds anew."""
        rotary = self.draft.midlayer.self_attn.rotary_emb
        return {
            "steps": int(self.module.length),
            "attention": self.module.attention_backend,
            "rotary_rows": getattr(rotary, "max_seq_len_cached", None),
            "max_position_embeddings": getattr(rotary, "max_position_embeddings", None),
        }

    def metrics(self, output: Any) -> Iterator[tuple[str, Any, int | None]]:
        """Losses and accuracies of each step."""
        for name, values in zip(METRICS, output, strict=False):
            for step, value in enumerate(values):
                yield name, value, step


def batch_of(given: Mapping[str, Array]) -> Batch:
    """The forward's arguments [B, T] and what they were before the shift, by name, as plain numbers."""
    tokens = given["input_ids"].astype(np.int32)
    held = given["attention_mask"].astype(bool) if "attention_mask" in given else np.ones(tokens.shape, bool)
    positions = given.get("position_ids", np.arange(tokens.shape[1]))
    last = held.shape[1] - 1 - held[:, ::-1].argmax(axis=1)
    fed = held.copy()
    fed[np.arange(len(fed)), last] = False
    documents = np.where(fed, np.arange(len(fed))[:, None], PADDING)
    return Batch(
        tokens.reshape(-1),
        np.broadcast_to(positions, tokens.shape).reshape(-1).astype(np.int32),
        documents.reshape(-1).astype(np.int32),
        given["loss_mask"].reshape(-1).astype(np.bool_),
        width=tokens.shape[1],
        first=_first(given.get("unshifted"), tokens, np.flatnonzero(fed.any(axis=1))),
    )


def _first(unshifted: Array | None, tokens: Array, documents: Array) -> Array | None:
    """x_0 of each document, if the shift before this forward was seen."""
    if unshifted is None or unshifted.shape != tokens.shape:
        return None
    ids = unshifted.astype(np.int32)
    return ids[documents, 0] if np.array_equal(ids[:, 1:], tokens[:, :-1]) else None
