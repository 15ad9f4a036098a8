"""tokens-differ says in words where the two sides' templates part, where the target's folder names its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from eagle_trace_analysis.causes.tokens_differ import check
from eagle_trace_analysis.comparison.checks import check_prompts


def side(tokens: list[int]) -> Any:
    table = pa.table({
        "prompt_key": ["c1"], "prompt_id": [0], "token_ids": [[*tokens, 7]], "num_prompt_tokens": [len(tokens)],
    })  # fmt: skip
    return SimpleNamespace(prompts=table.to_pandas(), table=lambda _: table)


@pytest.mark.parametrize("named", [True, False])
def test_a_confirmed_difference_names_what_one_template_adds(named: bool, tmp_path: Path) -> None:
    if named:
        pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))
    train, serve = side(list(b"user: hi")), side(list(b"system: be brief\nuser: hi"))
    alignment: Any = SimpleNamespace(train=train, serve=serve, prompt_keys=["c1"])
    found = check_prompts(alignment)
    context: Any = SimpleNamespace(train=train, serve=serve, unequal_prompts=found, target_path=tmp_path)
    outcome = check(context)
    assert "prompt 'c1' differs at token 0: 117 in training, 115 in serving" in outcome.evidence
    assert ('serving has "system: be brief\\n" and training has not: a system prompt' in outcome.evidence) is named
