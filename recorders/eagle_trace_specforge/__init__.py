"""SpecForge as a host: records its own EAGLE-3 forward (`OnlineEagle3Model`), all steps of it.

`record.record` runs it on given prompts or on what a server did; `recording` takes it from a training of SpecForge's.
Here is what only SpecForge has, handed to `eagle_trace_training` as a `trainer`: how a draft is loaded (`load`,
`published`), where its sites are (`sites`), how its forward is run without the loss (`forward`), what a forward in
training is given and returns (`live`), which releases are known (`releases`), and what a training command imports
(`watch`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_specforge.trainer import recording
    from eagle_trace_training.live import Recording

__all__ = ["Recording", "recording"]


def __getattr__(name: str) -> Any:
    # torch and SpecForge are imported when something is recorded, so that arming a command costs it nothing
    if name == "recording":
        from eagle_trace_specforge import trainer

        return trainer.recording
    if name == "Recording":
        from eagle_trace_training import live

        return live.Recording
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
