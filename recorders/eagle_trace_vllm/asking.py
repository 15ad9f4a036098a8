"""How vLLM is asked over HTTP, what it answers, and under which id its workers know a request."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from eagle_trace.prompts import Prompt
from eagle_trace_serving.host import Ask
from eagle_trace_serving.requests import Answer, Request, answer_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: turns off the random digits that vLLM appends to every id
PLAIN_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
#: an id that counts the prompts of its request from a number on: NAME+START
_COUNTED = re.compile(r"(.*)\+(\d{1,9})")


def ask(prompt: Prompt, rid: str, request: Request) -> Ask:
    """A text or token ids are completed; messages go where the server applies its own chat template."""
    body = _sampling(request) | {"request_id": rid}
    if prompt.messages is not None:
        return Ask(CHAT, body | {"messages": list(prompt.messages)})
    given = prompt.text if prompt.input_ids is None else list(prompt.input_ids)
    return Ask(COMPLETIONS, body | {"prompt": given})


def ask_all(rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
    """One request for all: its prompts reach the scheduler together. The ids count on from the first."""
    name, _, start = rids[0].rpartition("-")
    body = {"prompt": [list(ids) for ids in token_ids], "request_id": f"{name}+{start}"}
    return Ask(COMPLETIONS, _sampling(request) | body)


def request_id(internal: str) -> str:
    """The id that whoever asked gave a request, or was told of it, from the one that vLLM's workers have.

    A server makes ``cmpl-ID-N`` of prompt N of a completion and ``chatcmpl-ID`` of a chat, and appends eight random
    digits. The first prompt of a completion is called ID, the others ID-N.
    """
    given = internal if os.environ.get(PLAIN_IDS, "0") not in ("", "0") else re.sub(r"-[0-9a-f]{8}$", "", internal)
    if given.startswith("chatcmpl-"):
        return given.removeprefix("chatcmpl-")
    if not given.startswith("cmpl-"):
        return given
    name, _, number = given.removeprefix("cmpl-").rpartition("-")
    if counted := _COUNTED.fullmatch(name):
        return f"{counted[1]}-{int(counted[2]) + int(number)}"
    return name if number == "0" else f"{name}-{number}"


def answers(reply: Any, rids: Sequence[str]) -> list[Answer]:
    """What was answered; a choice of another form tells nothing of it.

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
    return {"temperature": request.temperature, "max_tokens": request.max_new_tokens, "return_token_ids": True}


def abort(_rid: str) -> None:
    """Nothing to ask: vLLM gives a request up when its connection ends."""
