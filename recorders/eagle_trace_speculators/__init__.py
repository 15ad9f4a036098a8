"""speculators as a host: records its own EAGLE-3 forward, all steps of it.

`host.HOST.record` runs it on given prompts or on what a server did; `recording` takes it from a model that trains. Here
is what only speculators has, in the table `trainer.TRAINER`: how a draft is loaded (`load`), where its sites are
(`sites`), what a forward in training is given and returns (`live`); which releases are known (`releases`), and what a
training command imports (`watch`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_training.live import Recording

__all__ = ["recording"]


def recording(model: Any, **options: Any) -> "Recording":
    """Record the next forwards of a model that speculators trains: ``with recording(model, out="train.trace"): ...``.

    Args:
        model: an `Eagle3DraftModel`, also inside DistributedDataParallel, FSDP or torch.compile.
        options: those of `eagle_trace_training.live.recording`: out, batches, level, dataset and others.
    """
    from eagle_trace_speculators.host import HOST

    return HOST.recording(model, **options)
