"""What to keep is said in one way, whoever says it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from eagle_trace.errors import UsageError
from eagle_trace.recording.wanted import CHOICES, TEXTS, Wanted, parse_wanted
from eagle_trace.selection import Selection
from eagle_trace_serving.attached import order_of
from eagle_trace_serving.orders import Order
from eagle_trace_training import arm
from eagle_trace_training.live_batches import LiveOptions
from eagle_trace_training.record import TrainOptions

SAID = {
    "LEVEL": "sketch", "MAX_BYTES": "2KB", "SITES": "fc.*", "ROOTS": "0:4", "STEPS": "1", "SECONDS": "5",
    "MAX_WAIT": "0.5", "KEEP_CUDA_GRAPHS": "1",
}  # fmt: skip


def test_every_field_can_be_said_by_a_variable() -> None:
    assert {one.name for one in fields(Wanted)} == {*TEXTS, "selection"}
    assert set(CHOICES) == {one.name for one in fields(Selection)}


@pytest.mark.parametrize("kind", [Order, LiveOptions, TrainOptions])
def test_every_host_is_asked_for_the_same(kind: type) -> None:
    assert issubclass(kind, Wanted)


def test_server_and_training_understand_the_same_variables() -> None:
    order = order_of({f"EAGLE_TRACE_{name}": value for name, value in (SAID | {"OUT": "d"}).items()})
    assert order is not None
    training = arm._options({f"EAGLE_TRACE_TRAIN_{name}": value for name, value in (SAID | {"OUT": "d"}).items()})
    for name in ("level", "max_bytes", "max_wait", "selection"):
        assert getattr(order, name) == training[name], name
    assert (order.level, order.max_bytes, order.seconds, order.keep_cuda_graphs) == ("sketch", 2000, 5.0, True)


WRONG = {
    "level": ("all", "level must be one of"),
    "max_bytes": ("many", "a byte budget must be"),
    "seconds": ("soon", "X_SECONDS must be a number, not 'soon'"),
    "max_wait": ("-1", "X_MAX_WAIT must be a number of seconds"),
    "sites": ("nowhere", "no site is called"),
    "roots": ("a:b", "is no number and no range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_said_in_one_sentence(name: str) -> None:
    text, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        Wanted(**parse_wanted({name: text}, "X_"))
