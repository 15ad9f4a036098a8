"""What is asked of a server, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_trace.errors import UsageError
from eagle_trace.prompts import Prompt
from eagle_trace_serving.admission import Admission

#: counts that are kept of an answer: more than any SGLang has
MOST_COUNTS, LONGEST_COUNT = 32, 64


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
    def sampling(self) -> dict[str, Any]:
        """SGLang's sampling parameters."""
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    @property
    def settings(self) -> dict[str, Any]:
        """What a manifest says was asked for."""
        names = ("max_new_tokens", "batch_size", "temperature")
        return {name: getattr(self, name) for name in names}


@dataclass
class Answers:
    """What the server answered, by request id; `speculation` is its own count of rounds and accepted tokens."""

    output_ids: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    speculation: dict[str, dict[str, float]] = field(default_factory=dict)


def speculation(meta_info: dict[str, Any]) -> dict[str, float]:
    """SGLang's counts of speculative decoding, of everything it says about an answer."""
    counts = {name: value for name, value in meta_info.items() if name.startswith("spec_") and _is_number(value)}
    return {name: counts[name] for name in sorted(counts)[:MOST_COUNTS] if len(name) <= LONGEST_COUNT}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
