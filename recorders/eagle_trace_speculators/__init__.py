"""speculators as a host: records its own EAGLE-3 forward, all steps of it.

`record.record` runs it on given prompts or on what a server did; `recording` takes it from a model that trains. Here is
what only speculators has, handed to `eagle_trace_training` as a `trainer`: how a draft is loaded (`load`, `params`),
where its sites are (`hooks`), what a forward in training is given and returns (`live`), which releases are known
(`releases`), and what a training command imports (`watch`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_speculators.trainer import recording
    from eagle_trace_training.live import Recording

__all__ = ["Recording", "recording"]


def __getattr__(name: str) -> Any:
    # torch and speculators are imported when something is recorded, so that arming a command costs it nothing
    if name == "recording":
        from eagle_trace_speculators import trainer

        return trainer.recording
    if name == "Recording":
        from eagle_trace_training import live

        return live.Recording
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
