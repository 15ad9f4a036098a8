"""What is asked of a server, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from eagle_trace.errors import UsageError
from eagle_trace.prompts import Prompt
from eagle_trace_serving.admission import Admission


@dataclass(frozen=True)
class Request:
    """Prompts to answer, `batch_size` at a time.

    Attributes:
        prompts: the prompts.
        max_new_tokens: tokens to answer to each.
        batch_size: prompts sent at once.
        temperature: 0 for greedy answers.
        name: begins every request id, so that several may ask one server.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int = 48
    batch_size: int = 8
    temperature: float = 0.0
    name: str = "eagle-trace"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature must be 0 or more, not {self.temperature}")

    @property
    def rids(self) -> list[str]:
        """Request ids, one a prompt: what the recorder knows them by."""
        return [f"{self.name}-{number}" for number in range(len(self.prompts))]

    @property
    def admission(self) -> Admission:
        """These requests and no others, each under its prompt's number and key."""
        keys = [prompt.key for prompt in self.prompts]
        return Admission({rid: (number, keys[number]) for number, rid in enumerate(self.rids)})

    @property
    def settings(self) -> dict[str, Any]:
        """What a manifest says was asked for."""
        names = ("max_new_tokens", "batch_size", "temperature")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt, as far as it says it; `speculation` is its own count of rounds and such."""

    output_ids: Sequence[int] = ()
    text: str = ""
    speculation: Mapping[str, float] = field(default_factory=dict)


def answer_of(ids: Any, text: Any, speculation: Mapping[str, float] = MappingProxyType({})) -> Answer:
    """What a server's reply says of an answer; what has another form than token ids and a text tells nothing."""
    known = [one for one in ids if type(one) is int] if isinstance(ids, list) else ()
    return Answer(known, text if isinstance(text, str) else "", speculation)


Answers = dict[str, Answer]


def counts_of(answers: Answers) -> dict[str, dict[str, float]]:
    """The server's own counts of each request that it told some of, as a manifest has them."""
    return {rid: dict(answer.speculation) for rid, answer in answers.items() if answer.speculation}
