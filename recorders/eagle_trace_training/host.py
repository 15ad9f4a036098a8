"""What a trainer hands in so that its draft forward can be recorded: `TrainingHost`, a table that its package fills.

The trainer's package knows how its draft is loaded, where the sites are, how documents are laid out for its forward,
and how that forward is called without its loss. Everything else about a recording is here, and knows no trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from eagle_trace.recording.names import canonical_name
from eagle_trace_training.documents import pack

if TYPE_CHECKING:
    from eagle_trace.capture import Array
    from eagle_trace.recording.hooks import Hooks
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

    model: Any
    layer_ids: list[int] | None
    stored: set[str]
    facts: dict[str, Any]
    fused_width: int
    hidden_size: int
    heads: int
    steps: int | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainingHost:
    """A trainer: how its draft is loaded, hooked, and run.

    Attributes:
        name: as the manifest has it.
        packages: whose versions the manifest holds.
        samples_are: how `--features FOLDER` is explained to whoever gives another folder.
        check: what a recording with the installed release must be warned of; raises HostError if it cannot be recorded.
        load: makes a draft of its folder, the target's folder (None if none was given), the on-disk name of a dtype,
            and ``cpu`` or ``cuda``, with what it lacks from the target; raises CheckpointError if one of them is not
            what is needed, or they do not fit each other.
        changes: in what the forward that is run, in a dtype, differs from the one that trains.
        sites: hangs a receiver into every site of a draft; it is given the host's own tensors, and copies what it
            keeps.
        forward: all steps of a pack, without the loss; the features are [T, n * G], zeros where a row has none.
        live: the draft in a model that trains; raises UsageError if there is none of this trainer's.
        packs: documents as they share a forward, of about so many rows.
        samples: the training data in a folder, none if there are none.
        not_draft: how names of the module's state begin that are no part of the draft, and never in a checkpoint.
    """

    name: str
    packages: tuple[str, ...]
    samples_are: str
    check: Callable[[], list[str]]
    load: Callable[[Path, Path | None, str, str], LoadedDraft]
    changes: Callable[[str], list[str]]
    sites: Callable[[Hooks, Any, Receive], HungTaps]
    forward: Callable[[Any, Pack, Any], None]
    live: Callable[[Any], LiveDraft]
    packs: Callable[[Iterable[Document], int], Iterator[Pack]] = pack
    samples: Callable[[Path], Sequence[Sample]] = lambda _: ()
    not_draft: tuple[str, ...] = ()


class LiveDraft(ABC):
    """A draft in training, as its trainer runs it; a trainer derives its own from it.

    Attributes:
        draft: the module that holds the draft's parameters, with a config of Hugging Face's kind.
        module: the module of which one forward is one batch.
        signature: of that forward, `self` included.
        hidden_size: the target's.
        interrupts: exceptions that the trainer has raised wherever it happens to be, to be stopped (a signal's): never
            ours to catch.
    """

    interrupts: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(self, draft: Any, module: Any, forward: Callable[..., Any], hidden_size: int) -> None:
        self.draft, self.module = draft, module
        self.signature = signature(forward)
        self.hidden_size = hidden_size

    def trained(self) -> list[str]:
        """Canonical names of the parameters that are trained."""
        return [canonical_name(name) for name, one in self.draft.named_parameters() if one.requires_grad]

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the manifest says of the draft beside its config: `format`, `layer_ids`, `draft_vocab_size`."""

    def target(self) -> dict[str, Any]:
        """What the manifest says of the target, as far as the training knows it."""
        return {"path": None}

    @abstractmethod
    def twin(self, dtype: str, target: Path | None) -> LoadedDraft:
        """The draft as it is now, to be run beside the training (`eagle_trace_training.twin`).

        Args:
            dtype: on-disk name of the dtype to compute in.
            target: folder of the target, which says the layers where the config does not; None if there is none.

        Raises:
            HostError: it cannot be run beside the training.
        """

    @abstractmethod
    def hang(self, hooks: Hooks, receive: Receive, targets: Callable[[Any], None]) -> tuple[HungTaps, list[str]]:
        """Hang the sites, and `targets` where the verifier's logits over the draft vocabulary are seen.

        Returns:
            The sites' tap, and what had to be changed in the training for it.
        """

    @abstractmethod
    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors, on whatever device, that say what a batch is; raises HostError for what they cannot be.

        Args:
            arguments: the forward's, by name.
        """

    @abstractmethod
    def batch(self, given: Mapping[str, Array]) -> Batch:
        """The batch that those tensors are, as arrays of plain numbers."""

    @abstractmethod
    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How training runs the draft: steps, attention."""

    @abstractmethod
    def metrics(self, output: Any) -> Iterator[tuple[str, Any, int | None]]:
        """(name, value, step or None) of what the forward returned; a value is a number, or a tensor of one."""


@dataclass(frozen=True)
class Training:
    """A training that goes on, seen from outside.

    Attributes:
        host: the trainer.
        live: the draft that it trains.
        called: the module that it calls once or more per step.
        step: optimizer steps done so far; None where nobody counts them.
        log: gives values, by name, and the step they belong to, to whatever the trainer logs its own metrics with.
        close: takes off what `log` hung into the trainer, and hands over what it still holds.
    """

    host: TrainingHost
    live: LiveDraft
    called: Any
    step: Callable[[], int] | None
    log: Callable[[Mapping[str, float | str], int], None]
    close: Callable[[], None] = lambda: None
