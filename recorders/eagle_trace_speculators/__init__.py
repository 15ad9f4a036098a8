"""speculators as a host: records its own EAGLE-3 forward, all steps of it.

`record.record` runs it on given prompts or on what a server did; `recording` takes it from a model that trains. Here is
what only speculators has: the models (`load`, `params`, `live_facts`), where the sites are (`hooks`), one forward of
them (`forward`) and which releases are known (`releases`). What any trainer needs is `eagle_trace_training`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_training.live import Recording, recording

__all__ = ["Recording", "recording"]


def __getattr__(name: str) -> Any:
    # torch and speculators are imported when something is recorded, so that arming a command costs it nothing
    if name in __all__:
        from eagle_trace_training import live

        return getattr(live, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
