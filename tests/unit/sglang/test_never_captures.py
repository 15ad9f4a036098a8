"""A target class that was asked for several layers and fed one: the manifest and the fix say whose fault it is."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.errors import TraceDamagedError
from eagle_trace.manifest import Manifest
from eagle_trace_analysis import diff
from eagle_trace_analysis.diagnosis.diagnose import diagnose
from eagle_trace_serving.facts import target_facts
from eagle_trace_sglang.worker import CAPTURES

GOLDEN = Path(__file__).parents[2] / "golden"


class Loaded(SimpleNamespace):
    """A target model as SGLang holds it."""


@pytest.mark.parametrize(
    ("model", "captures", "inputs"),
    [
        (Loaded(capture_aux_hidden_states=True, model=Loaded(layers_to_capture=[2, 3, 4])), True, [2, 3, 4]),
        (Loaded(capture_aux_hidden_states=False, model=Loaded(layers_to_capture=[])), False, []),
        # a multimodal class: the flag and the list are those of the language model
        (
            Loaded(language_model=Loaded(capture_aux_hidden_states=True, model=Loaded(layers_to_capture=[4, 2]))),
            True,
            [2, 4],
        ),
        # a class whose wrapper holds a flag that nobody sets, beside the one that counts
        (
            Loaded(
                capture_aux_hidden_states=False, model=Loaded(capture_aux_hidden_states=True, layers_to_capture=[1])
            ),
            True,
            [1],
        ),
        (Loaded(), None, None),
    ],
)
def test_the_facts_of_a_target_are_found_wherever_its_class_keeps_them(
    model: Any, captures: bool | None, inputs: list[int] | None
) -> None:
    assert target_facts(model, *CAPTURES) == {"architecture": "Loaded", "captures": captures, "captured_inputs": inputs}


def test_models_that_hold_one_another_end(capsys: pytest.CaptureFixture[str]) -> None:
    one = Loaded(capture_aux_hidden_states=True)
    one.model = Loaded(language_model=one)
    assert target_facts(one, *CAPTURES)["captures"] is True
    assert capsys.readouterr().out == ""


def asked_for_three(facts: dict[str, Any]) -> Trace:
    """The golden trace of one layer, as if its config had asked for three of a target with these `facts`."""
    broken = open_trace(GOLDEN / "broken.trace")
    draft = copy.deepcopy(broken.manifest.draft)
    draft["config"]["eagle_config"]["use_aux_hidden_state"] = True
    manifest = replace(broken.manifest, draft=draft, target=broken.manifest.target | facts)
    broken.manifest = manifest
    return broken


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"architecture": "KimiK25ForConditionalGeneration", "captures": False, "captured_inputs": []},
            "the target class KimiK25ForConditionalGeneration in SGLang 0.5.23 was never told to capture",
        ),
        (
            {"architecture": "KimiK25ForConditionalGeneration", "captures": True, "captured_inputs": [2, 4, 5]},
            "was told to capture the inputs of layers [2, 4, 5] and fed one all the same",
        ),
        # a trace of an older recorder
        ({}, "in SGLang 0.5.23 fed one"),
    ],
)
def test_the_fix_names_the_class_and_the_release_and_no_flag_that_is_set(facts: dict[str, Any], words: str) -> None:
    train, serve = open_trace(GOLDEN / "train.trace"), asked_for_three(facts)
    (cause,) = diagnose(diff(train, serve), train, serve).confirmed
    assert cause.cause == "single-layer-features"
    assert "the config asks for 3 layers" in str(cause.fix)
    assert words in str(cause.fix)
    assert "use_aux_hidden_state to true" not in str(cause.fix)


def read(facts: dict[str, Any]) -> Manifest:
    seal = {"format_version": 1, "side": "serve", "level": "values", "host": "sglang", "target": facts}
    return Manifest.from_json(json.dumps(seal), "here")


def test_a_manifest_that_says_it_otherwise_is_damaged() -> None:
    facts = {"captures": True, "captured_inputs": [2, 3]}
    assert read(facts).target == facts
    for wrong in ({"captures": "yes"}, {"captured_inputs": [1, "2"]}, {"captured_inputs": 3}):
        with pytest.raises(TraceDamagedError):
            read(wrong)
