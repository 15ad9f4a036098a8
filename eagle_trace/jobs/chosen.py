"""Whose forward is recorded of a draft, and why, in one sentence: a flat folder may be another trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError


def chosen(host: Any, draft: Path, *, named: bool) -> str:
    """What is said before a trainer's forward is recorded, and kept in the manifest.

    Args:
        host: the trainer, from `eagle_trace.recording.hosts.find_host`.
        draft: folder of the draft.
        named: whether it was named; else it was the only one installed, or the one that takes the folder.
    """
    own = getattr(host, "stands_in", False)
    # what a host of another package need not say
    form = getattr(host, "form", "the folder is in its format")
    if named:
        why = f"--host {host.name} says so"
    elif own:
        why = form
    elif host.takes(draft):
        why = f"{form} (--host takes another)"
    else:
        why = "no other trainer is installed here"
    return f"the forward is that of {host.title}, since {why}{_of_another(host.name, draft, own=own)}"


def _of_another(name: str, draft: Path, *, own: bool) -> str:
    """What a folder tells of the trainer that wrote it, if that is not the one whose forward is run."""
    from eagle_trace_analysis.checkpoint.origin import open_draft, origin_of

    try:
        origin = origin_of(open_draft(draft), None)
    except CheckpointError:
        return ""  # loading it says what is wrong
    if origin is None:
        return "" if own else "; nothing in the folder says who trained it"
    if name == origin.trainer.NAME:
        return ""
    title, seems = origin.trainer.TITLE, "" if origin.sure else ", it seems"
    by = f"; the folder was written by {title}{seems} ({', '.join(origin.why)})"
    return f"{by}, and what {title} computes otherwise is not seen"
