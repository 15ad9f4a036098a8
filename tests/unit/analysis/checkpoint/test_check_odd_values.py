"""Whatever a config or a tensor holds, `check` gives findings or one sentence, for every kind of draft and engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.errors import EagleTraceError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.purpose import purpose_of
from eagle_trace_analysis.engines import ENGINES
from tests.support import checkpoints as make
from tests.support import latent
from tests.support import published_heads as published
from tests.support.checkpoints import Tensors, write_checkpoint

Draft = tuple[dict[str, Any], Tensors]

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "yarn",
    [],
    [1],
    [2, 15, -1],
    [[1]],
    {},
    {"a": 1},
]
SHAPES: dict[str, Callable[[Any], Any]] = {
    "scalar": lambda one: np.array(1, one.dtype),
    "no rows": lambda one: one[:0],
    "flat": lambda one: one.reshape(-1),
    "one axis more": lambda one: one[..., None],
    "integers": lambda one: np.zeros(one.shape, np.int64),
}


def latent_draft() -> Draft:
    config = latent.draft_config()
    return config, latent.draft_tensors(config)


DRAFTS: dict[str, Callable[[], Draft]] = {
    "speculators": lambda: (make.speculators_config(), make.draft_tensors()),
    "flat": lambda: (published.flat(**published.eagle([1, 14, 26])), published.tensors()),
    "latent": latent_draft,
}


def _places(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from _places(value, (*above, key))


def _judge(folder: Path) -> None:
    """Check for the engine that is chosen and for all others; every finding is worded."""
    with suppress(EagleTraceError):
        assert purpose_of(folder).why
    for engine in ENGINES.values():
        with suppress(EagleTraceError):
            assert all(one.evidence for one in check(folder, engine=engine).findings)


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_value_of_a_config_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    config, tensors = DRAFTS[kind]()
    folder = write_checkpoint(tmp_path, config, tensors)
    for place in _places(config):
        for value in ODD:
            changed = copy.deepcopy(config)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
            _judge(folder)


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_shape_of_a_tensor_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    config, tensors = DRAFTS[kind]()
    for name in tensors:
        for change in SHAPES.values():
            _judge(write_checkpoint(tmp_path, config, {**tensors, name: change(tensors[name])}))
