"""Counts the operations that make the host's thread wait for the GPU, as torch itself reports them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

#: what `torch.cuda.set_sync_debug_mode("warn")` says of each
WAITED = "called a synchronizing CUDA operation"


def count_waits(file: str) -> None:
    """Write to `file`, behind every draft of a batch, how many drafts there were and how often they waited."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_trace_serving.recording import Recording
    from eagle_trace_sglang.plugin import WORKER

    counts = {"drafts": 0, "waits": 0}

    def counted(draft: Any, *args: Any, drafts: int = 1, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                return draft(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            counts["drafts"] += drafts
            counts["waits"] += sum(WAITED in str(one.message) for one in said)
            Path(file).write_text(f"{counts['drafts']} {counts['waits']}", encoding="utf-8")

    # a round is told to the recorder behind the server's own code
    verified = Recording.verified
    Recording.verified = lambda *args: counted(verified, *args, drafts=0)  # type: ignore[method-assign]
    for name in ("draft", "_draft_extend_for_prefill", "_draft_extend_for_decode"):
        HookRegistry.register(f"{WORKER}.EagleDraftWorker.{name}", counted, HookType.AROUND)
