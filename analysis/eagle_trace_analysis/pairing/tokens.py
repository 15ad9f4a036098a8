"""Token ids as text, where the target's tokenizer can be found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_trace.reader import Trace

_REPLACEMENT = "�"
_SHARED = 12


class TokenNames:
    """Texts of token ids, read from ``tokenizer.json`` of the target that a trace names.

    Without that file, or without the `tokenizers` package, every token is named by its number (``#314``), so nothing
    that shows tokens depends on either.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @classmethod
    def of(cls, *traces: Trace) -> TokenNames:
        """The tokenizer of the first trace whose target folder is on this machine."""
        for trace in traces:
            path = Path(str(trace.manifest.target.get("path") or "")) / "tokenizer.json"
            if (tokenizer := _load(path)) is not None:
                return cls(tokenizer)
        return cls()

    @property
    def known(self) -> bool:
        """Whether texts can be given at all."""
        return self._tokenizer is not None

    def __call__(self, token: int) -> str:
        """One token, quoted so that spaces and line ends show (``" the"``), or ``#id``."""
        token = int(token)
        if token not in self._known:
            self._known[token] = self._name(token)
        return self._known[token]

    def _name(self, token: int) -> str:
        if self._tokenizer is None or token < 0:
            return f"#{token}"
        try:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            if not text or _REPLACEMENT in text:
                text = self._tokenizer.id_to_token(token)
        except (OverflowError, TypeError):
            text = None
        return json.dumps(text, ensure_ascii=False) if text else f"#{token}"

    def join(self, tokens: Iterable[int]) -> str:
        """A run of tokens as one text, or their numbers."""
        ids = [int(token) for token in tokens]
        if self._tokenizer is None:
            return " ".join(f"#{token}" for token in ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def prompt_names(trace: Trace, length: int = 40) -> dict[int, str]:
    """What to call each prompt: the beginning of its text, or its key, in at most `length` characters.

    What all texts begin with (a system prompt) is left out, since it tells none from another.
    """
    table = trace.table("prompts").select(["prompt_id", "prompt_key", "text"])
    rows = list(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
    texts = [" ".join(str(text or "").split()) for _, _, text in rows]
    shared = _common_start(texts)
    names = {}
    for (number, key, _), text in zip(rows, texts, strict=True):
        words = (f"…{text.removeprefix(shared)}" if len(shared) > _SHARED else text) or str(key)
        names[int(number)] = words if len(words) <= length else words[: length - 1] + "…"
    return names


def _common_start(texts: list[str]) -> str:
    """Whole words that all of several texts begin with; nothing if they are all the same."""
    first, last = min(texts, default=""), max(texts, default="")
    if first == last:
        return ""
    count = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind(" ", 0, count) + 1]


def _load(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  (the Rust side raises plain Exception for any file it cannot read)
        return None
