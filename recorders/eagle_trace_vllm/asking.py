"""How vLLM is asked over HTTP, what it answers, and under which id its workers know a request."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from eagle_trace.prompts import Prompt
from eagle_trace_serving.completions import chat, choices_of, completion
from eagle_trace_serving.host import Ask
from eagle_trace_serving.requests import Request

#: turns off the random digits that vLLM appends to every id
PLAIN_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
#: an id that counts the prompts of its request from a number on: NAME+START
_COUNTED = re.compile(r"(.*)\+(\d{1,9})")


#: what an answer is
answers = choices_of


def ask(prompt: Prompt, rid: str, request: Request) -> Ask:
    """A text or token ids are completed; messages go where the server applies its own chat template."""
    if prompt.messages is not None:
        return chat(prompt.messages, request, request_id=rid, return_token_ids=True)
    given = prompt.text if prompt.input_ids is None else list(prompt.input_ids)
    return completion(given, request, request_id=rid, return_token_ids=True)


def ask_all(rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
    """One request for all: its prompts reach the scheduler together. The ids count on from the first."""
    name, _, start = rids[0].rpartition("-")
    together = [list(ids) for ids in token_ids]
    return completion(together, request, request_id=f"{name}+{start}", return_token_ids=True)


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


def abort(_rid: str) -> None:
    """Nothing to ask: vLLM gives a request up when its connection ends."""
