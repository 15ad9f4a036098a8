"""Where two chat templates part, in words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eagle_trace_analysis.pairing.templates import Vocabulary, where_templates_part

SPECIALS = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Bytes, and special tokens behind them."""
    folder = tmp_path_factory.mktemp("target")
    added = [{"id": 256 + at, "content": name, "special": True} for at, name in enumerate(SPECIALS)]
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": pieces}}))
    return Vocabulary.of(folder)


def ids(text: str) -> list[int]:
    found: list[int] = []
    while text:
        name = next((one for one in SPECIALS if text.startswith(one)), None)
        found += [256 + SPECIALS.index(name)] if name else list(text[0].encode())
        text = text[len(name or text[0]) :]
    return found


USER = "<|im_start|>user\nHow are you?<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
PARTS = [
    (USER + OPEN, USER + OPEN, ""),
    (USER + OPEN, SYSTEM + USER + OPEN, "serving has .* and training has not: a system prompt"),
    (SYSTEM + USER + OPEN, USER + OPEN, "training has .* and serving has not: a system prompt"),
    (USER + OPEN, USER + OPEN + "<think>\n\n</think>\n\n", "serving has .*thinking switched off"),
    (USER + OPEN + "<think>\n", USER + OPEN, "training has .*thinking switched on"),
    (USER + OPEN, USER, r"training has .*the opening of the answer's turn \(add_generation_prompt\)"),
    ("<bos>Hello", "Hello", "training begins with \"<bos>\" and serving does not"),
    ("<bos>Hello", "<bos><bos>Hello", "serving .*\"<bos>\""),
    ("Hello there", "Hello", "training has \" there\" and serving has not: the end of the prompt"),
    ("Say yes", "Say no!", "training has .* where serving has"),
    ("a<eos>b", "ab", "training has \"<eos>\" and serving has not: a special token"),
    ("grüße 日本", "grüße 日", "本"),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "words"), PARTS)
def test_what_one_template_writes_and_another_does_not_is_said(
    ours: str, theirs: str, words: str, vocabulary: Vocabulary
) -> None:
    said = where_templates_part(ids(ours), ids(theirs), vocabulary)
    assert bool(said) == (ours != theirs)
    assert re.search(words, said), said
    assert "\n" not in said


def test_without_names_for_tokens_nothing_is_said(tmp_path: Path) -> None:
    assert where_templates_part([1, 2], [1, 3], Vocabulary.of(tmp_path)) == ""
    (tmp_path / "tokenizer.json").write_text("[" * 100000)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": [1], "x": null}')
    assert where_templates_part([1, 2], [1, 3], Vocabulary.of(tmp_path)) == ""


def test_many_differences_are_counted_and_not_listed(vocabulary: Vocabulary) -> None:
    said = where_templates_part(ids("axbxcxdxexfx" * 9), ids("aybyczdyeyfy" * 9), vocabulary)
    assert "further places" in said
    assert len(said) < 1000
