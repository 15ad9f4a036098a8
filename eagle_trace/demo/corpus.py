"""What the demo models are trained on: text out of CPython, and a tokenizer of bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: ids of the special tokens, which follow those of the bytes
BOS, EOS, PAD = 256, 257, 258


def corpus() -> list[list[str]]:
    """The topics of the Python reference: lists of ASCII paragraphs, one line each, in a fixed order."""
    from pydoc_data.topics import topics

    ascii_of = str.maketrans("“”‘’–—\xa0", "\"\"''-- ")
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        blocks = re.split(r"\n\s*\n", topics[name].translate(ascii_of))
        texts = [" ".join(block.split()).removeprefix("* ") for block in blocks]
        documents.append([t for t in dict.fromkeys(texts) if _is_prose(t) and t not in seen])
        seen.update(texts)
    return [paragraphs for paragraphs in documents if paragraphs]


def _is_prose(text: str) -> bool:
    if not text.isascii() or not 60 <= len(text) <= 2000 or "::=" in text or ">>>" in text:
        return False
    words = sum(c.isalpha() or c == " " for c in text)
    return text[0].isupper() and text[-1] in ".:" and words >= 0.85 * len(text)


def write_tokenizer(folder: Path, further: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: byte b is id b, then the special tokens; no merges, nothing added on encode."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    names = [*specials.values(), *further]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=1024, **specials
    )
    fast.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (the GPT-2 table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
