"""Sentences in a terminal: wrapped at its width, with whole commands."""

from __future__ import annotations

import re

import pytest

from eagle_trace.cli.said import next_line, say, wrapped

COMMAND = "eagle-trace export /a/folder/with/a/long/name/of-a-draft OUT --target /a/folder/with/a/long/name/of-a-target"
SENTENCES = [
    "eagle-trace: short",
    "eagle-trace: this draft is in speculators format, which SGLang does not read, so convert it with "
    f"`{COMMAND}` and give OUT",
    "eagle-trace: vLLM is not installed here: pip install -e '/a/check out/of it[vllm]' in an environment of its own, "
    "and run this command there or with --env PYTHON",
    "eagle-trace: the server ended. Its last lines:\n" + "word " * 40 + "\n\tan indented line",
]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_words_stay_and_no_line_is_too_wide_but_one_command_alone(sentence: str, width: int) -> None:
    text = wrapped(sentence, width)
    assert text.split() == sentence.split()
    commands = re.findall(r"`[^`]+`|pip install -e '[^']+'", sentence)
    assert all(command in text for command in commands), "whole, to be copied"
    assert all(len(line) <= width or line.rstrip(".,:") in commands for line in text.split("\n"))


def test_nothing_that_is_said_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("one line\n\tand \x1b]0;another\x07", err=True)
    assert capsys.readouterr().err == "one line\n\tand \\u001b]0;another\\u0007\n"
    assert next_line("eagle-trace show \x1b[2J") == "Next: eagle-trace show \\u001b[2J"
