"""Whether the installed SpecForge has the forward that is recorded, with a place to hang a hook in at every site."""

from __future__ import annotations

import warnings

from eagle_trace_training.releases import Releases

#: releases whose recording was compared with SGLang's and agreed (docs/support.md), newest first
TESTED = ("0.2.0",)
_MODEL = "specforge.algorithms.eagle3.model"
_FORWARD = f"{_MODEL}:OnlineEagle3Model.forward"
RELEASES = Releases(
    "SpecForge",
    "specforge",
    TESTED,
    needed=(
        "specforge.modeling.draft.llama3_eagle:LlamaForCausalLMEagle3.backbone",
        "specforge.modeling.draft.llama3_eagle:apply_rotary_pos_emb",
        _FORWARD,
        f"{_MODEL}:OnlineEagle3Model._acc_and_loss",
        f"{_MODEL}:_compute_target_p_padded",
        "specforge.core.eagle3_adapters:SdpaLikeAdapter.step_view",
        "specforge.modeling.auto:AutoDraftModel.from_config",
        "specforge.modeling.auto:AutoDraftModelConfig.from_file",
    ),
    arguments={_FORWARD: ("input_ids", "attention_mask", "target", "loss_mask", "hidden_states")},
    install="pip install --no-deps",
)


def check_release() -> list[str]:
    """What a recording with the installed SpecForge must be warned of: nothing for a release that was tested.

    Raises:
        HostError: it cannot be imported, or a place to hang a hook in is missing; the message says which.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that flash_attn is not there
        return RELEASES.check()
