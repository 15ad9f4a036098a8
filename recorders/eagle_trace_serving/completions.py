"""How a server with OpenAI's routes is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_trace_serving.host import Ask
from eagle_trace_serving.requests import Answer, Request, answer_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(prompt: object, request: Request, **more: Any) -> Ask:
    """Have a text or token ids, or a list of these, go on; `more` are fields of the server's own."""
    return Ask(COMPLETIONS, _sampling(request) | more | {"prompt": prompt})


def chat(messages: Sequence[Any], request: Request, **more: Any) -> Ask:
    """Have messages answered, to which the server applies its own chat template."""
    return Ask(CHAT, _sampling(request) | more | {"messages": list(messages)})


def choices_of(reply: Any, rids: Sequence[str]) -> list[Answer]:
    """What was answered, in the order of the prompts; a choice of another form tells nothing of it.

    Raises:
        ValueError: it answers more or fewer prompts than were asked.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    several = [one for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    if len(several) != len(rids):
        raise ValueError(f"{len(several)} answers to {len(rids)} prompts")
    in_order = sorted(several, key=lambda one: str(one.get("index", 0)).zfill(9))
    return [answer_of(one.get("token_ids"), one.get("text")) for one in in_order]


def _sampling(request: Request) -> dict[str, Any]:
    return {"temperature": request.temperature, "max_tokens": request.max_new_tokens}
