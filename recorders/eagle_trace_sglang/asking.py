"""How SGLang is asked over HTTP, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_trace.prompts import Prompt
from eagle_trace_serving.completions import chat
from eagle_trace_serving.host import Ask
from eagle_trace_serving.requests import Answer, Request, answer_of

#: counts that are kept of an answer: more than any SGLang has
MOST_COUNTS, LONGEST_COUNT = 32, 64


def ask(prompt: Prompt, rid: str, request: Request) -> Ask:
    """A text or token ids go to ``/generate``; messages where the server applies its own chat template."""
    if prompt.messages is not None:
        return chat(prompt.messages, request, model="default", rid=rid)
    given = {"text": prompt.text} if prompt.input_ids is None else {"input_ids": list(prompt.input_ids)}
    return Ask("/generate", given | {"rid": rid, "sampling_params": _sampling(request)})


def ask_all(rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
    """One request for all: its prompts reach the scheduler together."""
    body = {
        "input_ids": [list(ids) for ids in token_ids],
        "rid": list(rids),
        "sampling_params": [_sampling(request) for _ in rids],
    }
    return Ask("/generate", body)


def answers(reply: Any, rids: Sequence[str]) -> list[Answer]:
    """What was answered; a reply of another form tells nothing of it.

    Raises:
        ValueError: it answers more or fewer prompts than were asked.
    """
    several = reply if isinstance(reply, list) else [reply]
    if len(several) != len(rids):
        raise ValueError(f"{len(several)} answers to {len(rids)} prompts")
    return [_answer(one) for one in several]


def _answer(reply: Any) -> Answer:
    if not isinstance(reply, dict):
        return Answer()
    meta = reply.get("meta_info")
    return answer_of(reply.get("output_ids"), reply.get("text"), speculation(meta) if isinstance(meta, dict) else {})


def abort(rid: str) -> Ask:
    """Give a request up."""
    return Ask("/abort_request", {"rid": rid}, admin=True)


def speculation(meta_info: dict[str, Any]) -> dict[str, float]:
    """SGLang's counts of speculative decoding, of everything it says about an answer."""
    counts = {name: value for name, value in meta_info.items() if name.startswith("spec_") and _is_number(value)}
    return {name: counts[name] for name in sorted(counts)[:MOST_COUNTS] if len(name) <= LONGEST_COUNT}


def _sampling(request: Request) -> dict[str, Any]:
    return {"temperature": request.temperature, "max_new_tokens": request.max_new_tokens}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
