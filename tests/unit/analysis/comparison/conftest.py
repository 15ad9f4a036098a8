"""Synthetic traces to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace
from tests.support.synthetic import Prompt, Side, make_prompts, write_trace

CHAINS = make_prompts()


@pytest.fixture(scope="module")
def healthy_train(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_trace(tmp_path_factory.mktemp("train") / "train.trace", Side("train", noise_seed=1), CHAINS)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Trace]:
    def make(
        side: str, prompts: list[Prompt] = CHAINS, *, draft: Any = None, rounds: Any = (), **options: Any
    ) -> Trace:
        path = tmp_path / f"{side}{len(list(tmp_path.iterdir()))}.trace"
        return write_trace(path, Side(side, **options), prompts, draft=draft, rounds=rounds)

    return make
