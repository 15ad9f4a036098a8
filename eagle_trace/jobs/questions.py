"""Eight prompts of our own, for whoever gives none: different in length, language and form."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config, text_config

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how long it takes.",
    "Summarise in two sentences why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Translate into German: the weather is beautiful today, so we are going to the lake.",
    "List five differences between a list and a tuple in Python.",
    "The following is the beginning of a story. Continue it.\n\nThe lighthouse keeper had not spoken to anyone for",
    "Explain speculative decoding to somebody who knows what a language model is but has never served one. "
    "Say what a draft model is, what the target model verifies, why the answer does not change, and what decides how "
    "much faster it gets.",
)
#: tokens of each prompt where the target has no tokenizer
LENGTHS = (9, 13, 16, 21, 24, 28, 33, 40)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tiktoken.model")


def write_prompts(target: Path, path: Path) -> str:
    """Write eight prompts for `target` as a prompts file, and say in a few words what they are.

    Questions in the target's chat template where it has one, as plain text where it has a tokenizer, and random tokens
    where it has none, which a draft guesses badly but computes as it computes any others.

    Raises:
        CheckpointError: the target's folder has no config.
    """
    config = text_config(read_config(target))
    if not any((target / name).is_file() for name in TOKENIZERS):
        chosen = random.Random(0)
        most = max(2, int(config.get("vocab_size") or 2))
        lines: list[dict[str, Any]] = [
            {"id": f"random-{length}", "input_ids": [chosen.randrange(most) for _ in range(length)]}
            for length in LENGTHS
        ]
        said = "eight prompts of random tokens, since the target's folder has no tokenizer"
    elif _has_template(target):
        lines = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
        said = "eight prompts of our own, in the target's chat template"
    else:
        lines = [{"prompt": text} for text in QUESTIONS]
        said = "eight prompts of our own"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return said


def _has_template(target: Path) -> bool:
    """Whether the tokenizer's folder says how a conversation is written."""
    file = target / "chat_template.jinja"
    if file.is_file() and file.read_text(encoding="utf-8", errors="replace").strip():
        return True
    try:
        config = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(isinstance(config, dict) and config.get("chat_template"))
