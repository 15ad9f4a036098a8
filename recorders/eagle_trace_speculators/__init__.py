"""Train side: records speculators' own EAGLE-3 forward, all steps of it.

`record.record` runs it on given prompts or on what a server did; `recording` takes it from a model that trains.
The rest is split by concern: what is fed (`documents`, `replay`, `features`; `batches`, `first_tokens` in training),
the models (`load`, `params`), where the sites are (`hooks`), one forward of them (`forward`, `live`), how much of a
difference is rounding (`floors`), and recording somebody else's training command (`command`, `arm`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_speculators.live import Recording, recording

__all__ = ["Recording", "recording"]


def __getattr__(name: str) -> Any:
    # torch and speculators are imported when something is recorded, so that arming a command costs it nothing
    if name in __all__:
        from eagle_trace_speculators import live

        return getattr(live, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
