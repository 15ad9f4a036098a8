"""An `Eagle3DraftModel` in training: what its forward is given and returns, and where recording hangs in."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import speculators.models.attention
import torch
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.utils import resolve_target_layer_ids
from speculators.train.graceful_shutdown import TrainingInterruptedError

from eagle_trace.capture import Array
from eagle_trace.checkpoints import config_digest
from eagle_trace.errors import CheckpointError, HostError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.names import canonical_name
from eagle_trace.recording.stage import Held
from eagle_trace_speculators.hooks import SiteTap
from eagle_trace_speculators.load import config_facts, is_compiled, loaded, uncompiled
from eagle_trace_training.batches import Batch
from eagle_trace_training.host import HungTaps, LoadedDraft, Receive, TrainingHost
from eagle_trace_training.numerics import DTYPES
from eagle_trace_training.twin import eager, twin
from eagle_trace_training.weights import target_facts

FLEX = "simple_flex_attention"
#: speculators names a metric of step 2 ``full_acc_2_sum``
STEP_OF_METRIC = re.compile(r"_(\d+)_(?:sum|total)$")


class LiveModel:
    """The draft in a model that speculators trains; see `LiveDraft`.

    On CUDA speculators compiles its forward, which leaves no place for hooks. It then runs uncompiled while recording,
    with flex attention compiled on its own (uncompiled, that would need memory for every pair of rows): the same
    formulas, rounded in other places.

    Args:
        host: speculators.
        model: an `Eagle3DraftModel`, also inside DistributedDataParallel, FSDP or torch.compile.

    Raises:
        UsageError: there is no such draft in it.
    """

    interrupts: tuple[type[BaseException], ...] = (TrainingInterruptedError,)

    def __init__(self, host: TrainingHost, model: Any) -> None:
        self.host = host
        self.draft, self._compiled = unwrapped(model)
        self.module = self.draft
        self.hidden_size = int(self.draft.hidden_size)
        self.signature = inspect.signature(uncompiled(Eagle3DraftModel.forward))

    def describe(self, manifest: Manifest) -> None:
        """What its config says of it, and what is on disk of its target."""
        config = self.draft.config
        written = json.loads(config.to_json_string())
        layer_ids = config.eagle_aux_hidden_state_layer_ids
        manifest.draft = {
            # no path: what is on disk is not what is in training
            "path": None,
            "started_from": str(config.name_or_path or "") or None,
            "config_digest": config_digest(written),
            "config": written,
            **config_facts(config, list(layer_ids) if layer_ids else None),
        }
        manifest.target = _target(config)

    def trained(self) -> list[str]:
        """Canonical names of the parameters that are trained."""
        return [canonical_name(name) for name, one in self.draft.named_parameters() if one.requires_grad]

    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, with eager attention; see `eagle_trace_training.twin`."""
        model = twin(self.draft, DTYPES[dtype], eager(self.draft))
        model._attn_impl, model._create_mask_fn = "eager", create_float_mask
        layer_ids = model.config.eagle_aux_hidden_state_layer_ids
        if target is not None:
            layer_ids = resolve_target_layer_ids(layer_ids, str(target))
        return loaded(self.host, model, list(layer_ids) if layer_ids else None)

    def hang(self, hooks: Hooks, receive: Receive, targets: Callable[[Any], None]) -> tuple[HungTaps, list[str]]:
        """Hang the sites and the verifier's head; run uncompiled what is compiled."""
        model, changes = self.draft, []
        tap = SiteTap(hooks, model, receive)
        hooks.after(model.verifier_lm_head, lambda _module, _args, output: targets(output))
        if is_compiled():
            hooks.replace(model, "forward", partial(uncompiled(type(model).forward), model))
            changes.append("the forward was run uncompiled while recording (speculators compiles it on CUDA)")
            if model._attn_impl == FLEX:
                owner = speculators.models.attention
                hooks.replace(owner, "flex_attention", torch.compile(owner.flex_attention))
                changes.append("flex attention was compiled on its own while recording")
        if self._compiled:
            stance = torch.compiler.set_stance("force_eager")
            hooks.on_removal(lambda: stance.__exit__(None, None, None))
            changes.append("nothing was run compiled while recording (torch.compile was given the model)")
        return tap, changes

    def batch(self, given: Mapping[str, Any], keep: Callable[[Any], Held]) -> Callable[[], Batch]:
        """One packed row of tokens; raises HostError if it is not."""
        if given["input_ids"].shape[0] != 1:
            raise HostError(f"the forward was given {given['input_ids'].shape[0]} rows of tokens, not one packed row")
        names = ("input_ids", "document_ids", "position_ids", "loss_mask")
        held = {name: keep(given[name].reshape(-1)) for name in names if given.get(name) is not None}
        return lambda: batch_of({name: one.array for name, one in held.items()})

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How training runs the draft."""
        return {
            "steps": int(given.get("ttt_steps", self.signature.parameters["ttt_steps"].default)),
            "attention": self.draft._attn_impl,
        }

    def metrics(self, output: Any) -> Iterator[tuple[str, Any, int | None]]:
        """The loss and speculators' own metrics; none where no verifier was given, so that there is no loss."""
        if not (isinstance(output, tuple) and len(output) == 3):
            return
        _, loss, metrics = output
        yield "loss", loss, None
        for name, value in metrics.items():
            step = STEP_OF_METRIC.search(name)
            yield name, value, int(step.group(1)) if step else None


def unwrapped(model: Any) -> tuple[Any, bool]:
    """The `Eagle3DraftModel` inside DistributedDataParallel, torch.compile or nothing, and whether it was compiled.

    Raises:
        UsageError: there is none.
    """
    inner, compiled = model, False
    while not isinstance(inner, Eagle3DraftModel):
        original = getattr(inner, "_orig_mod", None)
        compiled = compiled or original is not None
        inner = original or getattr(inner, "module", None)
        if not isinstance(inner, torch.nn.Module):
            raise UsageError(
                f"recording() takes speculators' Eagle3DraftModel, or a wrapper around one, not {type(model).__name__}"
            )
    kind = getattr(inner.config, "speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UsageError(f"recording() takes an eagle3 draft, not a {kind} one: its forward has other sites")
    return inner, compiled


def _target(config: Any) -> dict[str, Any]:
    name = getattr(config.speculators_config.verifier, "name_or_path", None)
    if not name or not Path(name).is_dir():
        return {"path": name}
    try:
        return target_facts(Path(name))
    except CheckpointError:
        return {"path": name}


def batch_of(flat: Mapping[str, Array]) -> Batch:
    """The forward's arguments [T], by name."""
    tokens = flat["input_ids"].astype(np.int32)
    # without positions the forward counts rows from 1, over all documents
    positions = flat.get("position_ids", np.arange(1, len(tokens) + 1)).astype(np.int32)
    mask = flat["loss_mask"].astype(np.bool_) if "loss_mask" in flat else None
    return Batch(tokens, positions, flat["document_ids"].astype(np.int32), mask)
