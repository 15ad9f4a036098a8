"""Whatever a config or a tensor holds, `check` gives findings or one sentence, for every kind of draft and engine."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import EagleTraceError
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.purpose import purpose_of
from eagle_trace_analysis.engines import ENGINES
from tests.support import checkpoints as make
from tests.support import latent
from tests.support import published_heads as published
from tests.support.checkpoints import Tensors, write_checkpoint

pytestmark = pytest.mark.slow

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
    10**400,
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


#: numbers that the engines read, and that the drafts' configs above do not all have
TOP = (
    "max_position_embeddings", "original_max_position_embeddings", "model_max_length", "max_sequence_length",
    "seq_length", "max_seq_len", "rope_theta", "rms_norm_eps", "partial_rotary_factor", "head_dim",
    "num_key_value_heads", "num_aux_hidden_states", "target_hidden_size", "draft_vocab_size", "initializer_range",
)  # fmt: skip
ROPE = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "attn_factor", "attention_factor", "extrapolation_factor", "alpha",
    "short_mscale", "long_mscale", "partial_rotary_factor",
)  # fmt: skip
FORM: dict[str, Any] = {
    "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "rope_theta": 1e4,
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_number_of_hundreds_of_digits_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    config, tensors = DRAFTS[kind]()
    folder = write_checkpoint(tmp_path, config, tensors)
    inner = config.get("transformer_layer_config", config)

    def judge(changes: Mapping[str, Any]) -> None:
        layer = {
            key: value for key, value in inner.items() if key != "rope_parameters" or "rope_scaling" not in changes
        }
        whole = layer | changes if inner is config else config | {"transformer_layer_config": layer | changes}
        (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
        _judge(folder)

    huge = 10**400
    for key in TOP:
        judge({key: huge})
    for form, key in itertools.product(("yarn", "longrope", "linear", "dynamic", "llama3"), ROPE):
        judge({"rope_scaling": {"rope_type": form, **FORM, key: huge}})


def test_a_configs_numbers_are_those_that_a_float_can_hold(tmp_path: Path) -> None:
    largest, huge, endless = ("1" + "0" * zeros for zeros in (308, 309, 9999))
    text = f'{{"a": [1, -7, 1.5, {largest}], "b": {{"c": -{huge}, "d": {endless}}}}}'
    (tmp_path / "config.json").write_text(text)
    inf = float("inf")
    assert read_config(tmp_path) == {"a": [1, -7, 1.5, 10**308], "b": {"c": -inf, "d": inf}}


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_shape_of_a_tensor_ends_in_a_traceback(kind: str, tmp_path: Path) -> None:
    config, tensors = DRAFTS[kind]()
    for name in tensors:
        for change in SHAPES.values():
            _judge(write_checkpoint(tmp_path, config, {**tensors, name: change(tensors[name])}))
