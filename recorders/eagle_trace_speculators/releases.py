"""Whether the installed speculators computes the training forward on the attention that a recording uses."""

from __future__ import annotations

from eagle_trace_training.releases import Releases

#: releases whose recording was compared with SGLang's and agreed (docs/support.md), newest first
TESTED = ("0.9.0",)
RELEASES = Releases(
    "speculators",
    "speculators",
    TESTED,
    needed=("speculators.models.eagle3:Eagle3DraftModel.forward",),
)


def check_release() -> list[str]:
    """What a recording with the installed speculators must be warned of: nothing for a release that was tested.

    Raises:
        HostError: it has no eager attention for EAGLE-3, or a wrong one; the message says so and the way out.
    """
    try:
        from speculators.models.eagle3.attention import extend_dense_mask_for_draft_tokens
    except ImportError as error:
        raise RELEASES.refused(f"its EAGLE-3 forward has no eager attention ({error})") from error
    import torch

    # columns of a second step of two tokens: the first token must not see the second's
    extended = extend_dense_mask_for_draft_tokens(torch.zeros(1, 1, 2, 2), 2)
    if extended[0, 0, 0, 3] != -torch.inf:
        raise RELEASES.refused(
            "in its eager attention a row of a later step sees all rows of that step (repaired in 0.9.0)"
        )
    return RELEASES.check()
