"""An `OnlineEagle3Model` in training: what its forward is given and returns, and where recording hangs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specforge.algorithms.eagle3 import model as eagle3
from specforge.modeling.draft.llama3_eagle import LlamaAttention, LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead

from eagle_trace.capture import Array
from eagle_trace.errors import HostError, UsageError
from eagle_trace.recording.hooks import Hooks
from eagle_trace_specforge.load import ids_of, loaded
from eagle_trace_specforge.sites import SiteTap
from eagle_trace_training.batches import Batch, padded
from eagle_trace_training.host import HungTaps, LiveDraft, LoadedDraft, Receive
from eagle_trace_training.numerics import DTYPES
from eagle_trace_training.published import default_layers
from eagle_trace_training.twin import twin, unwrapped
from eagle_trace_training.weights import target_config

#: what the forward returns, a list of one value per step each
METRICS = ("ploss", "acceptance_rate", "acc", "correct", "denom", "loss", "loss_denom")
#: where the verifier's distribution over the draft vocabulary is computed
TEACHERS = ("_compute_target_p_padded", "compute_target_p_padded_from_hidden")


class LiveModel(LiveDraft):
    """The draft in a model that SpecForge trains; see `LiveDraft`.

    Args:
        model: an `Eagle3TrainStrategy` or its model, also inside DistributedDataParallel, FSDP or torch.compile.

    Raises:
        UsageError: there is no EAGLE-3 draft in it that can be recorded.
    """

    def __init__(self, model: Any) -> None:
        called = "SpecForge's Eagle3TrainStrategy or OnlineEagle3Model"
        module, _ = unwrapped(getattr(model, "eagle3_model", model), eagle3.OnlineEagle3Model, called)
        draft = module.draft_model
        if not isinstance(draft, LlamaForCausalLMEagle3):
            raise UsageError(f"recording() takes a LlamaForCausalLMEagle3, not a {type(draft).__name__}")
        if module.attention_backend == "usp":
            raise UsageError("recording() takes no draft whose sequences are split over ranks (attention usp)")
        super().__init__(draft, module, eagle3.OnlineEagle3Model.forward, int(draft.target_hidden_size))
        self._unshifted: Any = None

    def facts(self) -> dict[str, Any]:
        """What its config says of it."""
        # the features are whatever the data or the capturing server hold: these ids say what is deployed
        ids = ids_of(self.draft.config)
        return {"format": "specforge", "layer_ids": ids, "draft_vocab_size": self.draft.config.draft_vocab_size}

    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, with sdpa attention; see `eagle_trace_training.twin`."""
        model = twin(self.draft, DTYPES[dtype])
        # all kinds of attention have the same parameters
        model.midlayer.self_attn.__class__ = LlamaAttention
        ids = ids_of(model.config)
        if ids is None and target is not None:
            ids = [i + 1 for i in default_layers(int(target_config(target).num_hidden_layers))]
        return loaded(model, ids)

    def hang(self, hooks: Hooks, receive: Receive, targets: Callable[[Any], None]) -> tuple[HungTaps, list[str]]:
        """Hang the sites, the verifier's distribution, and the shift that drops each document's first token."""
        tap = SiteTap(hooks, self.draft, receive)
        for name in TEACHERS:
            hooks.wrap(eagle3, name, lambda result, _args, given: targets(result[0][:, : -given["length"]]))
        hooks.wrap(TargetHead, "preprocess", lambda _result, args, given: self._shifted(args, given))
        return tap, []

    def _shifted(self, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._unshifted = given["input_ids"] if "input_ids" in given else args[1]

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A document per row, padded on the right; and what the tokens were before the shift, where it was seen.

        Raises:
            HostError: the positions are not one number per token.
        """
        places = arguments.get("position_ids")
        if places is not None and places.ndim != 2:
            raise HostError("the forward was given positions of several axes: this draft's rotation is not recorded")
        found = {name: arguments.get(name) for name in ("input_ids", "attention_mask", "position_ids", "loss_mask")}
        found["unshifted"], self._unshifted = self._unshifted, None
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def batch(self, given: Mapping[str, Array]) -> Batch:
        """A document per row, padded."""
        return padded(given, unshifted=given.get("unshifted"))

    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 (the model itself holds them)
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
