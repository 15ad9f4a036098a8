"""An `Eagle3DraftModel` in training: what its forward is given and returns, and where recording hangs in."""

from __future__ import annotations

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
from eagle_trace.errors import CheckpointError, HostError, UsageError
from eagle_trace.recording.hooks import Hooks
from eagle_trace_speculators.load import config_facts, is_compiled, loaded, uncompiled
from eagle_trace_speculators.sites import SiteTap
from eagle_trace_training.batches import Batch
from eagle_trace_training.host import HungTaps, LiveDraft, LoadedDraft, Receive
from eagle_trace_training.numerics import DTYPES
from eagle_trace_training.twin import eager, twin, unwrapped
from eagle_trace_training.weights import target_facts

FLEX = "simple_flex_attention"
#: speculators names a metric of step 2 ``full_acc_2_sum``
STEP_OF_METRIC = re.compile(r"_(\d+)_(?:sum|total)$")


class LiveModel(LiveDraft):
    """The draft in a model that speculators trains; see `LiveDraft`.

    On CUDA speculators compiles its forward, which leaves no place for hooks. It then runs uncompiled while recording,
    with flex attention compiled on its own (uncompiled, that would need memory for every pair of rows): the same
    formulas, rounded in other places.

    Args:
        model: an `Eagle3DraftModel`, also inside DistributedDataParallel, FSDP or torch.compile.

    Raises:
        UsageError: there is no such draft in it.
    """

    interrupts = (TrainingInterruptedError,)

    def __init__(self, model: Any) -> None:
        draft, self._compiled = unwrapped(model, Eagle3DraftModel, "speculators' Eagle3DraftModel")
        kind = getattr(draft.config, "speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise UsageError(f"recording() takes an eagle3 draft, not a {kind} one: its forward has other sites")
        super().__init__(draft, draft, uncompiled(Eagle3DraftModel.forward), int(draft.hidden_size))

    def facts(self) -> dict[str, Any]:
        """See `config_facts`."""
        layer_ids = self.draft.config.eagle_aux_hidden_state_layer_ids
        return config_facts(self.draft.config, list(layer_ids) if layer_ids else None)

    def target(self) -> dict[str, Any]:
        """What is on disk of the verifier."""
        name = getattr(self.draft.config.speculators_config.verifier, "name_or_path", None)
        try:
            return target_facts(Path(name)) if name and Path(name).is_dir() else {"path": name}
        except CheckpointError:
            return {"path": name}

    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, with eager attention; see `eagle_trace_training.twin`."""
        model = twin(self.draft, DTYPES[dtype], eager(self.draft))
        model._attn_impl, model._create_mask_fn = "eager", create_float_mask
        layer_ids = model.config.eagle_aux_hidden_state_layer_ids
        if target is not None:
            layer_ids = resolve_target_layer_ids(layer_ids, str(target))
        return loaded(model, list(layer_ids) if layer_ids else None)

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

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One packed row of tokens; raises HostError if it is not."""
        if (rows := arguments["input_ids"].shape[0]) != 1:
            raise HostError(f"the forward was given {rows} rows of tokens, not one packed row")
        names = ("input_ids", "document_ids", "position_ids", "loss_mask")
        return {name: arguments[name].reshape(-1) for name in names if arguments.get(name) is not None}

    def batch(self, given: Mapping[str, Array]) -> Batch:
        """The forward's arguments [T], by name."""
        tokens = given["input_ids"].astype(np.int32)
        # without positions the forward counts rows from 1, over all documents
        positions = given.get("position_ids", np.arange(1, len(tokens) + 1)).astype(np.int32)
        mask = given["loss_mask"].astype(np.bool_) if "loss_mask" in given else None
        return Batch(tokens, positions, given["document_ids"].astype(np.int32), mask)

    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How training runs the draft."""
        return {
            "steps": int(arguments.get("ttt_steps", self.signature.parameters["ttt_steps"].default)),
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
