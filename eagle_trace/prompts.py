"""The prompts file: JSON lines with ``prompt``, ``messages`` or ``input_ids``; or the prompts of a trace."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_trace.errors import PromptsError


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file. Exactly one of `text`, `messages` and `input_ids` is set.

    `key` names the prompt on both sides: the line's own ``id``, or a digest of its content.
    """

    key: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input_ids: tuple[int, ...] | None = None


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompts file (empty lines are passed over), or the prompts of a trace, as token ids under their own keys.

    Raises:
        PromptsError: no such file, no prompt in it, or a bad line (named by number); or a trace whose prompts are not
            whole.
    """
    if path.is_dir():
        return _read_trace(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PromptsError(f"cannot read prompts from {path}: {why}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptsError(f'{path} holds no prompt: write JSON lines such as {{"prompt": "Hello"}}')
    seen: dict[str, int] = {}
    return [
        replace(prompt, key=unique_key(prompt.key, seen))
        for prompt in [_parse(line, f"{path}, line {number}") for number, line in lines]
    ]


def content_key(name: str, value: Any) -> str:
    """The key of a prompt that has no id of its own: a digest of what its line holds under `name`."""
    return hashlib.sha256(json.dumps([name, value], sort_keys=True).encode()).hexdigest()[:16]


def unique_key(key: str, seen: dict[str, int]) -> str:
    """`key`, with a suffix if it was `seen` before.

    The same prompt twice is legal: occurrences are told apart by a suffix, the same one on both sides.
    """
    count = seen[key] = seen.get(key, 0) + 1
    return key if count == 1 else f"{key}#{count}"


class LateKeys:
    """Keys of prompts that are known by their token ids, in the order they came.

    Each is made when it is first asked for: the digest of a long prompt takes time, which a host's thread has not.
    """

    def __init__(self) -> None:
        self._token_ids: list[Sequence[int]] = []
        self._keys: list[str] = []
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, token_ids: Sequence[int]) -> None:
        """The next prompt; nobody may change `token_ids` any more."""
        self._token_ids.append(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, number: int) -> str:
        """Key of a prompt by its number, from 0."""
        with self._lock:
            while len(self._keys) <= number:
                key = content_key("input_ids", [int(token) for token in self._token_ids[len(self._keys)]])
                self._keys.append(unique_key(key, self._seen))
            return self._keys[number]


def _read_trace(path: Path) -> list[Prompt]:
    # read as plain Parquet: the reader of traces is a layer above
    table = path / "prompts.parquet"
    if not (path / "manifest.json").is_file():
        raise PromptsError(f"{path} is a folder and no finished trace: give a prompts file, or a trace")
    try:
        columns = ["prompt_key", "token_ids", "num_prompt_tokens"]
        # a recording that saw no prompt has no such file
        rows = pq.read_table(table, columns=columns, use_threads=False).to_pylist() if table.exists() else []
    except (pa.ArrowException, OSError) as error:
        raise PromptsError(f"cannot read the prompts of the trace {path}: {str(error).splitlines()[0]}") from error
    prompts = [Prompt(str(row["prompt_key"]), input_ids=_given(row)) for row in rows]
    if not prompts:
        raise PromptsError(f"the trace {path} holds no prompt")
    if unknown := [prompt.key for prompt in prompts if min(prompt.input_ids or (-1,)) < 0]:
        raise PromptsError(
            f"{path} does not know the first token of prompt {unknown[0]} ({len(unknown)} of {len(prompts)} lack it), "
            "which training's shift drops: record it with dataset= or first_token="
        )
    return prompts


def _given(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple((row["token_ids"] or [])[: row["num_prompt_tokens"]])


def _parse(line: str, where: str) -> Prompt:
    try:
        data = json.loads(line)
        # what JSON can say and UTF-8 cannot (half a surrogate pair) would fail in the tokenizer, without its place
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PromptsError(f"{where} holds half a surrogate pair, which is no text: {error.reason}") from error
    except ValueError as error:
        raise PromptsError(f"{where} is not JSON: {error}") from error
    except RecursionError as error:
        raise PromptsError(f"{where} is nested too deep to be a prompt") from error
    given = [name for name in ("prompt", "messages", "input_ids") if isinstance(data, dict) and name in data]
    if len(given) != 1:
        raise PromptsError(f'{where} needs exactly one of "prompt", "messages" and "input_ids", has {given or "none"}')
    name = given[0]
    value = data[name]
    key = str(data.get("id", content_key(name, value)))
    if name == "prompt":
        if not isinstance(value, str) or not value:
            raise PromptsError(f'{where}: "prompt" must be a text that is not empty')
        return Prompt(key, text=value)
    if name == "messages":
        if not _is_conversation(value):
            raise PromptsError(f'{where}: "messages" must be a list of {{"role": ..., "content": ...}}')
        if media := _media(value):
            raise PromptsError(
                f"{where} holds {media} beside its text, and only tokens are recorded and replayed: leave that part out"
            )
        return Prompt(key, messages=tuple(value))
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise PromptsError(f'{where}: "input_ids" must be a list of token ids that is not empty')
    return Prompt(key, input_ids=tuple(value))


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    )


def _media(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The kind of a part of these messages that is no text, as the line names it (``image_url``); None for text alone.

    A chat template would write a placeholder for it, and both sides would compute a prompt without its image.
    """
    for message in messages:
        parts = message["content"]
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict):
                continue
            kind = part.get("type", "text" if "text" in part else next(iter(part), "text"))
            if kind != "text":
                return f"a part of type {kind!s:.40}"
    return None


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of `prompt`; messages go through the chat template with a generation prompt.

    Raises:
        PromptsError: the prompt needs a tokenizer (or a chat template) and there is none, or it has no tokens.
    """
    if prompt.input_ids is not None:
        return list(prompt.input_ids)
    if tokenizer is None:
        raise PromptsError("the target folder has no tokenizer: give the prompts as input_ids")
    if prompt.messages is None:
        ids = list(tokenizer.encode(prompt.text or ""))
    else:
        try:
            ids = list(
                tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
            )
        except ValueError as error:
            raise PromptsError(f"the target's chat template refuses prompt {prompt.key}: {error}") from error
    if not ids:
        raise PromptsError(f"prompt {prompt.key} has no tokens")
    return ids


def check_tokens(key: str, token_ids: Sequence[int], config: Mapping[str, Any], new_tokens: int = 0) -> None:
    """Refuse a prompt that the target cannot take: `config` is the target's, `new_tokens` what is to be answered.

    Raises:
        PromptsError: a token id is outside the vocabulary, or prompt and answer are longer than the positions.
    """
    text = config.get("text_config") or config
    vocabulary, positions = text.get("vocab_size"), text.get("max_position_embeddings")
    if vocabulary is not None and max(token_ids) >= vocabulary:
        raise PromptsError(
            f"prompt {key} has token id {max(token_ids)}, the target's vocabulary ends at {vocabulary - 1}: "
            "is it another model's tokenizer?"
        )
    if positions is not None and len(token_ids) + new_tokens > positions:
        raise PromptsError(
            f"prompt {key} has {len(token_ids)} tokens, {len(token_ids) + new_tokens} with its answer, and the target "
            f"takes {positions}: shorten it or lower --max-new-tokens"
        )


def prompts_digest(keys: Sequence[str]) -> str:
    """One digest over the keys of all prompts, in order."""
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
