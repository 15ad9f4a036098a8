"""What a server makes of prompts, against what training's tokenizer makes of them; nothing is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import HostError, PromptsError
from eagle_trace.prompts import Prompt, read_prompts, tokenize
from eagle_trace_analysis.pairing.templates import Vocabulary, where_templates_part
from eagle_trace_serving.exchange import RefusedError, check_address, check_key, exchange, quoted, read_json
from eagle_trace_training.record import load_tokenizer

#: SGLang and vLLM both have it, for a text and for messages
PATH = "/tokenize"
#: an answer, and how long it may take [s]
MOST_BYTES, SECONDS = 16 << 20, 60.0


@dataclass(frozen=True)
class Compared:
    """One prompt on both sides.

    Attributes:
        key: of the prompt.
        training, serving: how many tokens it has there.
        at: the first token that differs; None if all are equal.
        why: where the two part, in words.
    """

    key: str
    training: int
    serving: int
    at: int | None = None
    why: str = ""


def compare_tokens(target: Path, prompts: Path, url: str, api_key: str | None = None) -> Iterator[Compared]:
    """Each prompt of a file with a text or messages, tokenized on both sides; those given as ids are passed over.

    Args:
        target: its folder, with the tokenizer that training uses.
        prompts: a prompts file.
        url: a server that answers.
        api_key: the server's, if it has one.

    Raises:
        CheckpointError: there is no target.
        HostError: the server does not answer, or has no such endpoint.
        PromptsError: there is no tokenizer, or no prompt with a text or messages.
        UsageError: the address is none.
    """
    address, key = check_address(url), check_key(api_key)
    read_config(target)
    asked = [prompt for prompt in read_prompts(prompts) if prompt.input_ids is None]
    if not asked:
        raise PromptsError(f"{prompts} gives token ids alone: there is nothing to tokenize")
    tokenizer, vocabulary = load_tokenizer(target), Vocabulary.of(target)
    for prompt in asked:
        ours, theirs = tokenize(prompt, tokenizer), _asked(address, key, prompt)
        yield _compared(prompt.key, ours, theirs, vocabulary)


def _compared(key: str, ours: Sequence[int], theirs: Sequence[int], vocabulary: Vocabulary) -> Compared:
    if list(ours) == list(theirs):
        return Compared(key, len(ours), len(theirs))
    short = min(len(ours), len(theirs))
    at = next((place for place in range(short) if ours[place] != theirs[place]), short)
    return Compared(key, len(ours), len(theirs), at, where_templates_part(ours, theirs, vocabulary))


def _asked(address: str, key: str | None, prompt: Prompt) -> list[int]:
    """The server's tokens of one prompt."""
    body: dict[str, Any] = {"prompt": prompt.text} if prompt.messages is None else {"messages": list(prompt.messages)}
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with exchange("POST", address, PATH, body, headers, SECONDS) as response:
            answer = _read(response)
    except RefusedError as error:
        raise HostError(_refused(address, error)) from error
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(one) is int and one >= 0 for one in tokens):
        raise HostError(f"{address} answers {PATH} with something that is no list of tokens")
    return tokens


def _read(response: Any) -> Any:
    try:
        return read_json(response, MOST_BYTES)
    except ValueError:
        return None


def _refused(address: str, error: RefusedError) -> str:
    if error.code == 404:
        return f"{address} has no {PATH}: SGLang and vLLM have one"
    if error.code in (401, 403):
        return f"{address} wants a key: give --api-key"
    said = quoted(error.text.decode("utf-8", errors="replace"))
    return f"{address} refuses {PATH} with status {error.code}: {said}"
