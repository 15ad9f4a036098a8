"""What a trainer hands in so that its draft forward can be recorded: `TrainingHost`.

The trainer's package knows how its draft is loaded, where the sites are, how documents are laid out for its forward,
and how that forward is called without its loss. Everything else about a recording is here, and knows no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import inspect

    from eagle_trace.capture import Array
    from eagle_trace.manifest import Manifest
    from eagle_trace.recording.hooks import Hooks
    from eagle_trace.recording.stage import Held
    from eagle_trace_training.batches import Batch
    from eagle_trace_training.documents import Document, Pack

#: receives (step, site, tensor [..., W] or ids [...] over the rows of a forward)
Receive = Callable[[int, str, Any], None]


class HungTaps(Protocol):
    """What hangs in the sites of one draft and counts its steps.

    Attributes:
        seen: what the forward was seen to compute, by the name of the config's flag: a flag may mean another thing in
            another release.
    """

    @property
    def seen(self) -> dict[str, Any]:
        """See above; empty before the first forward, or where nothing is observed."""
        ...

    def restart(self) -> None:
        """A new forward begins."""
        ...


class Sample(Protocol):
    """One sequence of a trainer's own training data, with the target features it was trained on."""

    @property
    def file(self) -> Path:
        """Where it is read from."""
        ...

    @property
    def token_ids(self) -> Array:
        """x_0, x_1, ...: int64 [T]."""
        ...

    def width(self) -> int:
        """n * G."""
        ...

    def features(self, count: int) -> Any:
        """Features [count, n * G] of the first positions, as stored."""
        ...


@dataclass
class LoadedDraft:
    """A draft as its trainer loaded it.

    Attributes:
        host: the trainer.
        model: the trainer's module, in evaluation mode; its `d2t` holds offsets or is None.
        layer_ids: target layers its features come from (Hugging Face `hidden_states[i]`), None if nothing says.
        stored: names of the tensors in the checkpoint.
        facts: what the manifest says about it.
        fused_width: width of the features it takes.
        hidden_size: width of one of them: the target's hidden size.
        heads: number of attention heads.
        steps: number of forwards it was trained with, None if nothing says.
        warnings: what is wrong with it without being an error.
    """

    host: TrainingHost
    model: Any
    layer_ids: list[int] | None
    stored: set[str]
    facts: dict[str, Any]
    fused_width: int
    hidden_size: int
    heads: int
    steps: int | None = None
    warnings: list[str] = field(default_factory=list)


class TrainingHost(Protocol):
    """A trainer: how its draft is loaded, hooked, and run.

    Attributes:
        name: as the manifest has it.
        packages: whose versions the manifest holds.
        samples_are: how `--features FOLDER` is explained to whoever gives another folder.
    """

    name: str
    packages: tuple[str, ...]
    samples_are: str

    def check(self) -> list[str]:
        """What a recording with the installed release must be warned of; raises HostError if it cannot be recorded."""
        ...

    def stored_dtype(self, draft: Path) -> str:
        """On-disk name of the dtype of a draft's weights; raises CheckpointError for what is not this trainer's."""
        ...

    def load(self, draft: Path, target: Path | None, dtype: str, device: str) -> LoadedDraft:
        """Load a draft, and what it lacks from the target.

        Raises:
            CheckpointError: the draft or the target is not what is needed, or they do not fit each other.
        """
        ...

    def changes(self, dtype: str) -> list[str]:
        """In what the forward that is run differs from the one that trains."""
        ...

    def params(self, model: Any, stored: Set[str] | None) -> Iterator[dict[str, Any]]:
        """Rows of params.parquet; `stored` is None for a model in training."""
        ...

    def sites(self, hooks: Hooks, model: Any, receive: Receive) -> HungTaps:
        """Hang `receive` into every site of a draft; it is given the host's own tensors, and copies what it keeps."""
        ...

    def packs(self, documents: Iterable[Document], rows: int) -> Iterator[Pack]:
        """Documents as they share a forward, of about so many rows."""
        ...

    def forward(self, model: Any, pack: Pack, hidden_states: Any) -> None:
        """All steps of a pack, without the loss; the features are [T, n * G], zeros where a row has none."""
        ...

    def samples(self, folder: Path) -> Sequence[Sample]:
        """The training data in a folder, none if there are none."""
        ...

    def live(self, model: Any) -> LiveDraft:
        """The draft in a model that trains; raises UsageError if there is none of this trainer's."""
        ...


class LiveDraft(Protocol):
    """A draft in training, as its trainer runs it.

    Attributes:
        host: the trainer.
        draft: the module that holds the draft's parameters.
        module: the module of which one forward is one batch.
        signature: of that forward, `self` included.
        hidden_size: the target's.
        interrupts: exceptions that the trainer has raised wherever it happens to be, to be stopped (a signal's): never
            ours to catch.
    """

    host: TrainingHost
    draft: Any
    module: Any
    signature: inspect.Signature
    hidden_size: int
    interrupts: tuple[type[BaseException], ...]

    def describe(self, manifest: Manifest) -> None:
        """Fill in what is known of draft and target before the first forward."""
        ...

    def trained(self) -> list[str]:
        """Canonical names of the parameters that are trained."""
        ...

    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, to be run beside the training (`eagle_trace_training.twin`).

        Args:
            dtype: on-disk name of the dtype to compute in.
            target: folder of the target, which says the layers where the config does not; None if there is none.

        Raises:
            HostError: it cannot be run beside the training.
        """
        ...

    def hang(self, hooks: Hooks, receive: Receive, targets: Callable[[Any], None]) -> tuple[HungTaps, list[str]]:
        """Hang the sites, and `targets` where the verifier's logits over the draft vocabulary are seen.

        Returns:
            The sites' tap, and what had to be changed in the training for it.
        """
        ...

    def batch(self, given: Mapping[str, Any], keep: Callable[[Any], Held]) -> Callable[[], Batch]:
        """The forward's arguments, by name; raises HostError for what they cannot be.

        They may lie on a device: `keep` takes a tensor along, and what is returned makes plain numbers of the arrays
        once they are there.
        """
        ...

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How training runs the draft: steps, attention."""
        ...

    def metrics(self, output: Any) -> Iterator[tuple[str, Any, int | None]]:
        """(name, value, step or None) of what the forward returned; a value is a number, or a tensor of one."""
        ...


@dataclass(frozen=True)
class Training:
    """A training that goes on, seen from outside.

    Attributes:
        live: the draft that it trains.
        called: the module that it calls once or more per step.
        step: optimizer steps done so far; None where nobody counts them.
        log: gives values, by name, and the step they belong to, to whatever the trainer logs its own metrics with.
        close: takes off what `log` hung into the trainer, and hands over what it still holds.
    """

    live: LiveDraft
    called: Any
    step: Callable[[], int] | None
    log: Callable[[Mapping[str, float | str], int], None]
    close: Callable[[], None] = lambda: None
