"""Where two tokenizations of one prompt part, in words: a system prompt, thinking, a special token, the end.

Two chat templates of one model differ in little, and ids do not show in what. Texts of ids are read from the target's
`tokenizer.json` and `tokenizer_config.json`, without a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from eagle_trace.printable import printable

#: tokens of each side that are looked at, differences that are told, and letters of each that are quoted
MOST_TOKENS, MOST_PARTS, MOST_LETTERS = 4096, 3, 80
#: no tokenizer's file is larger
MOST_BYTES = 64 << 20
#: the turn that a model is to write, as templates call it
ASSISTANT = ("assistant", "model", "gpt", "bot", "ai")


@dataclass(frozen=True)
class Vocabulary:
    """Texts of token ids.

    Attributes:
        pieces: of the tokenizer's model, as it writes them.
        added: tokens added to it, special ones among them.
        specials: ids that stand for no text.
        byte_level: pieces are written in GPT-2's alphabet for bytes.
    """

    pieces: Mapping[int, str] = field(default_factory=dict)
    added: Mapping[int, str] = field(default_factory=dict)
    specials: frozenset[int] = frozenset()
    byte_level: bool = False

    @classmethod
    def of(cls, folder: Path | None) -> Vocabulary:
        """The texts that a target's folder has; none where it has no such files, or others than are known here."""
        if folder is None:
            return cls()
        whole, config = (_json(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
        listed = [one for one in whole.get("added_tokens") or () if isinstance(one, dict)]
        decoder = config.get("added_tokens_decoder")
        for key, one in decoder.items() if isinstance(decoder, dict) else ():
            if isinstance(one, dict) and str(key).isdigit():
                listed.append({**one, "id": int(key)})
        added = {one["id"]: str(one.get("content", "")) for one in listed if type(one.get("id")) is int}
        special = frozenset(one["id"] for one in listed if type(one.get("id")) is int and one.get("special"))
        model = whole.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict):
            pieces = {number: piece for piece, number in vocabulary.items() if type(number) is int}
        else:
            pairs = vocabulary if isinstance(vocabulary, list) else []
            pieces = {number: str(one[0]) for number, one in enumerate(pairs) if isinstance(one, list) and one}
        return cls(
            pieces, added, special, "ByteLevel" in json.dumps([whole.get("decoder"), whole.get("pre_tokenizer")])
        )

    def __bool__(self) -> bool:
        return bool(self.pieces or self.added)

    def text(self, ids: Sequence[int]) -> str:
        """What tokens stand for, special ones by their names."""
        data = b"".join(self._bytes(int(one)) for one in ids)
        return data.decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        piece = self.pieces.get(token)
        if piece is None:
            return f"<token {token}>".encode()
        if self.byte_level and all(one in _BYTES for one in piece):
            return bytes(_BYTES[one] for one in piece)
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _json(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # a folder without names for its tokens has none; whoever loads the tokenizer says why
        return {}
    return found if isinstance(found, dict) else {}


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others come behind 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in shown]
    return {chr(one): one for one in shown} | {chr(256 + at): one for at, one in enumerate(hidden)}


_BYTES = _alphabet()


@dataclass(frozen=True)
class _Part:
    """A stretch in which the two sides differ.

    Attributes:
        ours, theirs: ids of the first side and of the second.
        start: nothing is in front of it; `end`: nothing is behind it.
        before: text that both have in front of it.
    """

    ours: Sequence[int]
    theirs: Sequence[int]
    start: bool
    end: bool
    before: str


def where_templates_part(
    ours: Sequence[int], theirs: Sequence[int], vocabulary: Vocabulary, names: tuple[str, str] = ("training", "serving")
) -> str:
    """What one side's tokens of a prompt have and the other's have not, in a sentence; empty if nothing is known of it.

    Args:
        ours, theirs: token ids of the same prompt.
        vocabulary: texts of ids.
        names: of the sides.
    """
    if not vocabulary:
        return ""
    a, b = list(ours[:MOST_TOKENS]), list(theirs[:MOST_TOKENS])
    parts = [
        _Part(a[i:k], b[j:m], i == 0 and j == 0, k == len(a) and m == len(b), vocabulary.text(a[:i]))
        for kind, i, k, j, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        if kind != "equal"
    ]
    said = [_said(part, vocabulary, names, (a, b)) for part in parts[:MOST_PARTS]]
    more = f"; and {len(parts) - MOST_PARTS} further places" if len(parts) > MOST_PARTS else ""
    return "; ".join(said) + more


def _said(part: _Part, vocabulary: Vocabulary, names: tuple[str, str], whole: tuple[list[int], list[int]]) -> str:
    if part.ours and part.theirs:
        one, other = (_quoted(vocabulary.text(ids)) for ids in (part.ours, part.theirs))
        kind = _kind(part, vocabulary, part.ours) or _kind(part, vocabulary, part.theirs)
        return f"{names[0]} has {one} where {names[1]} has {other}{f' ({kind})' if kind else ''}"
    mine = bool(part.ours)
    ids, name, other = (part.ours, names[0], names[1]) if mine else (part.theirs, names[1], names[0])
    if part.start and len(ids) == 1 and ids[0] in vocabulary.specials:
        rest = whole[1 if mine else 0]
        twice = "twice" if rest[:1] == list(ids) else f"and {other} does not"
        return f"{name} begins with {_quoted(vocabulary.text(ids))} {twice}"
    kind = _kind(part, vocabulary, ids)
    return f"{name} has {_quoted(vocabulary.text(ids))} and {other} has not{f': {kind}' if kind else ''}"


def _kind(part: _Part, vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """What a stretch is of a chat template, if it looks like one of these."""
    text = vocabulary.text(ids)
    if re.search(r"<think>\s*</think>", text):
        return "thinking switched off"
    if "<think>" in text:
        return "thinking switched on"
    if re.search(r"\bsystem\b", text, re.IGNORECASE) and "user" not in part.before:
        return "a system prompt"
    if part.end and any(re.search(rf"\b{name}\b", text) for name in ASSISTANT):
        return "the opening of the answer's turn (add_generation_prompt)"
    if part.end and not (part.ours and part.theirs):
        return "the end of the prompt, which was cut off or not closed"
    if all(one in vocabulary.specials for one in ids):
        return "a special token" if len(ids) == 1 else "special tokens"
    return ""


def _quoted(text: str) -> str:
    shown = text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS // 2]} ... {text[-MOST_LETTERS // 2 :]}"
    return printable(json.dumps(shown, ensure_ascii=False))
