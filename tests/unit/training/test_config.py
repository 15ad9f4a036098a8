"""Which numbers of a config and which maps of a vocabulary are refused, whoever trained the draft."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_trace.errors import CheckpointError
from eagle_trace_training.config import (
    COUNT,
    FLAG,
    KEYS,
    NOT_NEGATIVE,
    OBJECT,
    POSITIVE,
    ROPE_KEYS,
    check_config,
    check_map,
)

FOLDER = Path("draft")
ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
#: for each judge what it must take and what it must not
TAKEN = {
    COUNT: [1, 4096],
    FLAG: [True, False, 0, 1],
    NOT_NEGATIVE: [0, 0.0, 1e-6],
    POSITIVE: [1, 1e-9],
    OBJECT: [{}, 0],
}
REFUSED: dict[Any, list[Any]] = {
    COUNT: [0, -1, 1.5, True, "8", [8], 10**30],
    FLAG: ["no", "true", 2, [], {"a": 1}],
    NOT_NEGATIVE: [-1e-9, 1e39, "1e-5", float("nan"), float("inf"), True, []],
    POSITIVE: [0, 10**400, -2.0, "4", float("inf"), {}],
    OBJECT: ["yarn", 3, [4.0]],
}
PLACES = [((key,), judge) for key, judge in KEYS.items()] + [
    ((name, key), judge) for name in ("rope_scaling", "rope_parameters") for key, judge in ROPE_KEYS.items()
]


def config_with(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {place[0]: value} if len(place) == 1 else {place[0]: {place[1]: value}}


@pytest.mark.parametrize(("place", "judge"), PLACES, ids=[".".join(place) for place, _ in PLACES])
def test_a_value_that_nothing_can_be_computed_with_is_named_with_its_key(place: tuple[str, ...], judge: Any) -> None:
    for value in [*TAKEN[judge], None]:
        check_config(FOLDER, config_with(place, value))
    for value in REFUSED[judge]:
        with pytest.raises(CheckpointError) as refused:
            check_config(FOLDER, config_with(place, value))
        said = str(refused.value)
        assert said.startswith(f"{'.'.join(place)} in the config of draft is "), said
        assert "\n" not in said
        assert len(said) < 160


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "rope_scaling", "other"]), ANY | st.dictionaries(st.text(), ANY)))
def test_whatever_a_config_holds_is_judged_without_a_traceback(config: dict[str, Any]) -> None:
    with suppress(CheckpointError):
        check_config(FOLDER, config)


@pytest.mark.parametrize("form", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_a_form_without_what_it_scales_by_is_refused(form: str, name: str) -> None:
    given = {name: form, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    check_config(FOLDER, {"rope_scaling": given})
    with pytest.raises(CheckpointError, match=f"rope_scaling of the form {form} has no factor"):
        check_config(FOLDER, {"rope_scaling": {name: form}})


OFFSETS = torch.tensor([0, 0, 3, 3])


@pytest.mark.parametrize("d2t", [OFFSETS, OFFSETS.int(), OFFSETS.short(), OFFSETS + 4])
def test_offsets_that_lead_to_target_ids_are_taken(d2t: Any) -> None:
    check_map(FOLDER, d2t, 4, 11)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (OFFSETS.float(), r"is stored as float32 \[4\]"),
        (OFFSETS.bool(), "is stored as bool"),
        (OFFSETS[None], r"is stored as int64 \[1, 4\]"),
        (OFFSETS[0], r"is stored as int64 \[\]"),
        (OFFSETS[:3], "has 3 entries for a draft vocabulary of 4"),
        (OFFSETS + 5, "makes 3 of 4 target ids in range, of 11"),
        (OFFSETS - 1, "makes 3 of 4 target ids in range"),
    ],
)
def test_a_map_to_nowhere_is_refused(d2t: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_map(FOLDER, d2t, 4, 11)


def test_without_a_map_draft_ids_must_be_the_targets_but_for_padding() -> None:
    check_map(FOLDER, None, 320, 320)
    check_map(FOLDER, None, 151_669, 151_936)
    with pytest.raises(CheckpointError, match="there is no d2t in draft, but the draft has 80 ids for 320 target ids"):
        check_map(FOLDER, None, 80, 320)
