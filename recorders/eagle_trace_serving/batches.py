"""What a server's own package tells a recording: requests, forwards and verify rounds, as neutral as they come.

Tensors are the server's own, on any device; they are copied as they are taken, and read when they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eagle_trace_serving.draft_rows import CallKind, Index


class ServedRequest(Protocol):
    """A request, as long as it is answered and after that."""

    @property
    def rid(self) -> str:
        """Its id; its client chose it, so it may be anything."""
        ...

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of its prompt, which nobody changes any more."""
        ...

    @property
    def answer_ids(self) -> Sequence[int]:
        """Tokens of its answer so far."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Why its answer ended: ``length``, ``stop``, ``abort`` or such; None as long as it goes on."""
        ...

    @property
    def has_media(self) -> bool:
        """Whether its prompt has an image, a video or sound."""
        ...

    def text(self, prompt_ids: list[int], answer_ids: list[int]) -> str:
        """Both as text; nothing where the server runs without a tokenizer."""
        ...


@dataclass(frozen=True)
class Batch:
    """What one forward of the draft is given.

    Attributes:
        kind: whether it extends what the draft has seen, or drafts one step further.
        mode: the server's own name of that, for the table of calls.
        rids: request ids [B].
        rows: rows of the forward, T.
        tensors: the arrays of `draft_rows.DraftCall` by name (``input_ids`` [T], ...), on any device or numpy's; None
            for what it has not.
        features: target features that the draft is fed [T, n * G]; None in a step.
        lengths: rows of each request as far as that is known without asking a device [B].
        picked: rows of which there are logits where that is not all [B]; None for the last row of each request.
    """

    kind: CallKind
    mode: str
    rids: Sequence[str]
    rows: int
    tensors: Mapping[str, Any]
    features: Any = None
    lengths: Sequence[int] | None = None
    picked: Index | None = None


@dataclass(frozen=True)
class Verified:
    """A verify round of a batch: what was proposed, and what the target made of it. N tokens per request.

    Attributes:
        rids: request ids [B].
        count: N.
        tokens: the token that the round started from, and the proposed ones [B * N].
        predicted: tokens that were committed, at the beginning of each row [B, N].
        accepted: how many that are [B].
        lengths: tokens of each request before the round [B].
        best: makes the target's own choice behind each token [B * N]; asked for on rank 0 only.
        tree: first child and next sibling of each token, -1 for none [B, N] each; None for a chain.
    """

    rids: Sequence[str]
    count: int
    tokens: Any
    predicted: Any
    accepted: Any
    lengths: Any
    best: Callable[[], Any]
    tree: tuple[Any, Any] | None = None
