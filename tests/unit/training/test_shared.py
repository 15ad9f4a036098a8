"""What trainers' packages share: which releases are taken, when a trainer is imported, logging beside one."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle_trace.errors import HostError, UsageError
from eagle_trace_training.batches import padded
from eagle_trace_training.beside import Beside
from eagle_trace_training.entry import Trainer
from eagle_trace_training.numerics import rounded_tables
from eagle_trace_training.releases import Releases
from eagle_trace_training.twin import unwrapped
from eagle_trace_training.weights import target_tensor

#: a package that is there, in a trainer's place
PACKAGE, NOW = "pytest", version("pytest")


def releases(tested: str = NOW, *needed: str, **arguments: Any) -> Releases:
    return Releases("Trainer", PACKAGE, (tested,), needed, {f"json:{name}": value for name, value in arguments.items()})


def test_a_release_that_was_tested_is_taken_without_a_word_and_another_with_one() -> None:
    assert releases(NOW, "json:JSONDecoder.decode", dumps=("obj", "indent")).check() == []
    (said,) = releases("0.1", "json:dumps").check()
    assert said.startswith(f"Trainer {NOW} is not among the releases eagle-trace was tested with (0.1)")


@pytest.mark.parametrize(
    ("needed", "arguments", "said"),
    [
        (("json:JSONDecoder.sing",), {}, "is not supported: it lacks json:JSONDecoder.sing. Supported is"),
        ((), {"dumps": ("obj", "colour")}, "it lacks the argument colour of json:dumps"),
        (("no_such_module:thing",), {}, "cannot be imported .*no_such_module"),
    ],
)
def test_a_release_that_lacks_a_place_is_refused_with_the_way_out(needed: Any, arguments: Any, said: str) -> None:
    with pytest.raises(HostError, match=said) as refused:
        releases(NOW, *needed, **arguments).check()
    assert f"pip install '{PACKAGE}=={NOW}'" in str(refused.value)
    assert "\n" not in str(refused.value)


def trainer(module: str) -> Trainer:
    return Trainer(
        name="fake", title="Fake", module=module, install="pip install fake", package="fake_host",
        takes=lambda _: True, form="it is fake",
    )  # fmt: skip


def test_a_trainer_that_is_not_there_comes_with_what_installs_it() -> None:
    with pytest.raises(HostError, match="Fake is not installed here: pip install fake"):
        trainer("no_such_module").table()


def test_what_makes_no_sense_and_a_release_that_is_refused_are_said_before_the_trainer_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise HostError("too old")

    package, module = ModuleType("fake_host"), ModuleType("fake_host.releases")
    package.__path__ = []
    module.check_release = refuse  # type: ignore[attr-defined]
    for one in (package, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    # there is no module `trainer`
    asked = {"draft": tmp_path, "out": tmp_path / "out", "target": tmp_path, "device": "cpu"}
    with pytest.raises(UsageError, match="one of --prompts"):
        trainer("json").record(**asked)
    with pytest.raises(HostError, match="too old"):
        trainer("json").record(**asked, prompts=tmp_path / "prompts.jsonl")
    assert not (tmp_path / "out").exists()


class Tracker:
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, values))


def test_values_of_a_step_that_was_logged_go_along_with_the_next() -> None:
    tracker = Tracker()
    beside = Beside(tracker)
    beside.log({"own": 1.0, "words": "none"}, 0)
    tracker.log({"loss": 3.0}, step=2)
    beside.log({"own": 2.0}, 2)
    tracker.log({"loss": 2.5}, step=4)
    beside.log({"own": 3.0}, 4)
    beside.close()
    assert tracker.rows == [
        (0, {"own": 1.0}), (2, {"loss": 3.0}), (4, {"loss": 2.5, "own": 2.0}), (5, {"own": 3.0}),
    ]  # fmt: skip
    assert "log" not in vars(tracker)


def test_a_model_is_found_in_whatever_wraps_it_and_another_is_refused() -> None:
    inner, compiled, wrapped = torch.nn.Linear(2, 2), torch.nn.Module(), torch.nn.Module()
    # as torch.compile and DistributedDataParallel have them
    compiled._orig_mod, wrapped.module = inner, compiled
    assert unwrapped(inner, torch.nn.Linear, "a Linear") == (inner, False)
    assert unwrapped(wrapped, torch.nn.Linear, "a Linear") == (inner, True)
    with pytest.raises(UsageError, match=r"takes a Linear, or a wrapper around one, not ReLU"):
        unwrapped(torch.nn.ReLU(), torch.nn.Linear, "a Linear")


@pytest.mark.parametrize("rounded", ["", "frequencies", "angles"])
def test_what_of_a_rotary_table_was_rounded_is_seen_in_it(rounded: str) -> None:
    exact = 1 / 10000 ** (torch.arange(0, 32, 2) / 32)
    places = torch.arange(300)
    angles = {
        "": places[:, None] * exact,
        "frequencies": places[:, None] * exact.bfloat16().float(),
        "angles": (places.bfloat16()[:, None] * exact.bfloat16()).float(),
    }[rounded]
    assert rounded_tables(exact, torch.cat([angles, angles], -1).cos()[None, None]) == rounded


def test_padding_and_the_row_behind_a_document_are_no_data() -> None:
    ids = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    given = {
        # each row is shifted by one: its last token is followed by nothing
        "input_ids": np.array([[6, 7, 8, 0], [2, 3, 0, 0]]),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": np.ones((2, 4, 1)),
    }
    batch = padded(given, unshifted=np.array([[5, 6, 7, 8], [1, 2, 3, 0]]))
    assert [one.tolist() for one in batch.documents] == [[6, 7, 8], [2, 3]]
    assert batch.first is not None
    assert batch.first.tolist() == [5, 1]
    assert batch.index(1).tolist() == [0, 1, 4]
    assert padded(given, unshifted=ids).first is None, "another batch than the one that was shifted"


def test_what_a_target_holds_of_a_name_is_looked_for_in_all_its_files(tmp_path: Path) -> None:
    # the layer that a target drafts with itself stands in an earlier file, with an embedding of its own
    save_file({"model.layers.61.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert target_tensor(tmp_path, "embed_tokens.weight").tolist() == torch.ones(4, 2).tolist()
    assert target_tensor(tmp_path, "lm_head.weight") is None
