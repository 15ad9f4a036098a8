"""A replay also keeps what training would draft along the true tokens, where the server drafted something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace.reader import Trace, open_trace
from tests.support.tiny_speculators import random_prompts, write_pair, write_serve_trace

pytestmark = pytest.mark.integration

(TOKENS,) = random_prompts([14])
#: a first token that is not the true one, so nothing below root 6 lies on the true path
CHAINS: dict[int, list[tuple[int, tuple[int, ...]]]] = {
    0: [(6, ((TOKENS[8] + 1) % 96, 5)), (9, (TOKENS[11], TOKENS[12]))]
}


def best(trace: Trace) -> dict[tuple[int, tuple[int, ...]], tuple[int, int]]:
    rows = trace.table("topk").to_pylist()
    return {(r["root"], tuple(r["path"])): (r["draft_id"], r["target_id"]) for r in rows if r["rank"] == 0}


def test_best_ids_along_the_true_tokens_are_those_of_teacher_forcing(tmp_path: Path) -> None:
    from eagle_trace_speculators.host import HOST

    pair = write_pair(tmp_path)
    serve = write_serve_trace(tmp_path / "serve", [TOKENS], CHAINS)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "key-0", "input_ids": TOKENS}))
    asked: dict[str, Any] = {
        "target": pair.target, "draft": pair.draft, "features": "compute", "dtype": "float32", "device": "cpu",
        "level": "values", "max_bytes": None, "force": False, "argv": [], "progress": lambda _: None,
    }  # fmt: skip
    forced = open_trace(HOST.record(out=tmp_path / "forced", prompts=prompts, replay=None, steps=3, **asked))
    replayed = open_trace(HOST.record(out=tmp_path / "replayed", prompts=None, replay=serve, steps=None, **asked))
    true, found = best(forced), best(replayed)
    # the tiny serve trace counts 2 prompt tokens, so guesses start at root 1
    wanted = {key: ids for key, ids in true.items() if not key[1] or key[0] >= 1}
    assert len(wanted) > 25
    assert {key: found[key] for key in wanted} == wanted
    # the guesses are in topk alone: rows and values stay those that the server has
    assert len(replayed.rows) == len(TOKENS) - 1 + 4
    assert len(replayed.keys("logits")) == len(replayed.rows)
