"""Whether the installed speculators computes the training forward on the attention that a recording uses."""

from __future__ import annotations

from importlib.metadata import version

from eagle_trace.errors import HostError

#: releases whose recording was compared with SGLang's and agreed (docs/support.md), newest first
TESTED = ("0.9.0",)


def check_release() -> list[str]:
    """What a recording with the installed speculators must be warned of: nothing for a release that was tested.

    Raises:
        HostError: it has no eager attention for EAGLE-3, or a wrong one; the message says so and the way out.
    """
    name = version("speculators")
    way_out = f"Supported is {', '.join(TESTED)}: pip install 'speculators=={TESTED[0]}'"
    try:
        from speculators.models.eagle3.attention import extend_dense_mask_for_draft_tokens
    except ImportError as error:
        raise HostError(
            f"speculators {name} is not supported: its EAGLE-3 forward has no eager attention ({error}). {way_out}"
        ) from error
    import torch

    # columns of a second step of two tokens: the first token must not see the second's
    extended = extend_dense_mask_for_draft_tokens(torch.zeros(1, 1, 2, 2), 2)
    if extended[0, 0, 0, 3] != -torch.inf:
        raise HostError(
            f"speculators {name} is not supported: in its eager attention a row of a later step sees all rows of that "
            f"step (repaired in 0.9.0). {way_out}"
        )
    if name in TESTED:
        return []
    return [
        f"speculators {name} is not among the releases eagle-trace was tested with ({', '.join(TESTED)}); its "
        "attention is as it should be, so the recording went on"
    ]
