"""What to keep is said in one way, whoever says it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle_trace.cli import main
from eagle_trace.cli import record as command
from eagle_trace.errors import UsageError
from eagle_trace.recording.wanted import CHOICES, KINDS, READERS, Wanted, parse_wanted
from eagle_trace.selection import Selection
from eagle_trace_serving.attached import order_of
from eagle_trace_serving.bodies import OwnStartBody, StartBody
from eagle_trace_serving.environment import variables
from eagle_trace_serving.orders import Order
from eagle_trace_training import arm
from eagle_trace_training.live_batches import LiveOptions
from eagle_trace_training.record import TrainOptions

#: another value than the default for every field, and how `record` is given it; None where no user of it says so
VALUES: dict[str, tuple[Any, list[str] | None]] = {
    "level": ("sketch", ["--level", "sketch"]),
    "max_bytes": (2000, ["--max-bytes", "2KB"]),
    "keep_cuda_graphs": (True, ["--keep-cuda-graphs"]),
    "seconds": (5.0, ["--seconds", "5"]),
    # of the host: a client that says it would let a server wait
    "max_wait": (0.5, None),
    "selection": (
        Selection.parse(sites="fc.*", roots="0:4", steps="1", prompts="2:"),
        ["--sites", "fc.*", "--roots", "0:4", "--only-steps", "1", "--only-prompts", "2:"],
    ),
}


def wanted(**values: Any) -> Wanted:
    return Wanted(**{name: value for name, (value, _) in VALUES.items()} | values)


@pytest.fixture(params=[one.name for one in fields(Wanted)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_field_has_a_value_here_and_says_of_what_kind_it_is(name: str) -> None:
    assert VALUES[name][0] != getattr(Wanted, name)
    assert name == "selection" or KINDS[name] in READERS
    assert set(CHOICES) == {one.name for one in fields(Selection)}


@pytest.mark.parametrize("kind", [Order, LiveOptions, TrainOptions])
def test_every_host_is_asked_for_the_same(kind: type) -> None:
    assert issubclass(kind, Wanted)


def test_what_is_said_is_read_again_as_it_was_meant() -> None:
    assert Wanted(**parse_wanted({name: str(text) for name, text in wanted().said().items()}, "X_")) == wanted()
    assert Wanted().said() == {}


def test_a_variable_says_each_field_to_a_server(name: str) -> None:
    said = {f"EAGLE_TRACE_{one.upper()}": str(text) for one, text in wanted().said().items()}
    assert set(said) <= variables(), "and a server that `record` starts is not told what was meant for others"
    order = order_of(said | {"EAGLE_TRACE_OUT": "d"})
    expected = VALUES[name][0]
    if name == "selection":
        expected = Selection.parse(sites="fc.*", roots="0:4", steps="1")  # a server knows no lines of a file
    assert getattr(order, name) == expected


def test_a_variable_says_each_field_to_a_training(name: str) -> None:
    told = arm.environment(wanted(), out="d", batches=3, first_token=None)
    assert arm._options(told)[name] == VALUES[name][0]
    assert arm._options(told)["batches"] == 3


@pytest.mark.parametrize("kind", [StartBody, OwnStartBody])
def test_a_body_says_each_field_but_what_is_the_servers_affair(kind: Any, name: str) -> None:
    said = Wanted(**{name: VALUES[name][0]}).said()
    said.pop("prompts", None)
    own = {"named": {"a": (0, "key")}, "out": "d"} if kind is OwnStartBody else {}
    if name == "max_wait":
        with pytest.raises(ValueError, match="max_wait"):
            StartBody(**said)
        return
    order = kind(**said, **own).order("d", 1 << 30, stranger=False)
    expected = VALUES[name][0]
    if name == "selection":
        expected = Selection.parse(sites="fc.*", roots="0:4", steps="1")
    assert getattr(order, name) == expected


def test_the_command_says_each_field_but_what_is_the_servers_affair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = VALUES[name][1]
    if words is None:
        assert name not in inspect.signature(command.record).parameters
        return
    asked: dict[str, Any] = {}

    def attach(**options: Any) -> None:
        asked.update(options)
        raise UsageError("far enough")

    monkeypatch.setattr("eagle_trace_serving.record.attach", attach)
    done = CliRunner().invoke(main.app, ["record", "--mode", "serve", "--out", "x", "--attach", "http://x", *words])
    assert "far enough" in done.output
    assert asked[name] == VALUES[name][0]


WRONG = {
    "level": ("all", "level must be one of"),
    "max_bytes": ("many", "a byte budget must be"),
    "seconds": ("soon", "X_SECONDS must be a number, not 'soon'"),
    "max_wait": ("-1", "X_MAX_WAIT must be a number of seconds"),
    "sites": ("nowhere", "no site is called"),
    "roots": ("a:b", "is no number and no range"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_makes_no_sense_is_said_in_one_sentence(wrong: str) -> None:
    text, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        Wanted(**parse_wanted({wrong: text}, "X_"))
