"""SpecForge as a host: records its own EAGLE-3 forward (`OnlineEagle3Model`), all steps of it.

`host.HOST.record` runs it on given prompts or on what a server did; `recording` takes it from a training of
SpecForge's. Here is what only SpecForge has, in the table `trainer.TRAINER`: how a draft is loaded (`load`,
`published`), where its sites are (`sites`), how its forward is run without the loss (`forward`), what a forward in
training is given and returns (`live`); which releases are known (`releases`), and what a training command imports
(`watch`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace_training.live import Recording

__all__ = ["recording"]


def recording(model: Any, **options: Any) -> "Recording":
    """Record the next forwards of a model that SpecForge trains: ``with recording(model, out="train.trace"): ...``.

    Args:
        model: an `Eagle3TrainStrategy` or its `OnlineEagle3Model`, also inside DistributedDataParallel or FSDP.
        options: those of `eagle_trace_training.live.recording`: out, batches, level, dataset and others.
    """
    from eagle_trace_specforge.host import HOST

    return HOST.recording(model, **options)
