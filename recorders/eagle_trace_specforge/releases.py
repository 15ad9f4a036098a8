"""Whether the installed SpecForge has the forward that is recorded, with a place to hang a hook in at every site."""

from __future__ import annotations

import inspect
import warnings
from importlib.metadata import EntryPoint, version

from eagle_trace.errors import HostError

#: releases whose recording was compared with SGLang's and agreed (docs/support.md), newest first
TESTED = ("0.2.0",)
#: what recording replaces, wraps or looks at
NEEDED = (
    "specforge.algorithms.eagle3.model:OnlineEagle3Model._acc_and_loss",
    "specforge.algorithms.eagle3.model:_compute_target_p_padded",
    "specforge.core.eagle3_adapters:SdpaLikeAdapter.step_view",
    "specforge.modeling.auto:AutoDraftModel.from_config",
    "specforge.modeling.auto:AutoDraftModelConfig.from_file",
    "specforge.modeling.draft.llama3_eagle:LlamaForCausalLMEagle3.backbone",
    "specforge.modeling.draft.llama3_eagle:apply_rotary_pos_emb",
)
#: the forward's arguments that are given
ARGUMENTS = ("input_ids", "attention_mask", "target", "loss_mask", "hidden_states")


def check_release() -> list[str]:
    """What a recording with the installed SpecForge must be warned of: nothing for a release that was tested.

    Raises:
        HostError: it cannot be imported, or a place to hang a hook in is missing; the message says which.
    """
    way_out = f"supported is {', '.join(TESTED)}: pip install --no-deps 'specforge=={TESTED[0]}'"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that flash_attn is not there
            import specforge.modeling.draft  # noqa: F401 (registers the draft classes)
        lacking = [place for place in NEEDED if not _has(place)]
        if not lacking:
            from specforge.algorithms.eagle3.model import OnlineEagle3Model

            given = inspect.signature(OnlineEagle3Model.forward).parameters
            lacking = [f"the argument {name} of OnlineEagle3Model.forward" for name in ARGUMENTS if name not in given]
    except ImportError as error:
        raise HostError(f"SpecForge cannot be imported ({error}); {way_out}") from error
    name = version("specforge")
    if lacking:
        raise HostError(f"SpecForge {name} cannot be recorded, it lacks {', '.join(lacking)}; {way_out}")
    if name in TESTED:
        return []
    return [
        f"SpecForge {name} is not among the releases eagle-trace was tested with ({', '.join(TESTED)}); all that "
        "recording needs is there, so it went on"
    ]


def _has(place: str) -> bool:
    try:
        return EntryPoint("", place, "").load() is not None
    except AttributeError:
        return False
