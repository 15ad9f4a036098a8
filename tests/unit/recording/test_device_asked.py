"""Which device is taken for what was asked for."""

from __future__ import annotations

import pytest

from eagle_trace.errors import EagleTraceError
from eagle_trace.recording.device import device_for


def test_auto_takes_what_is_there() -> None:
    assert [device_for("auto", lambda there=there: there) for there in (True, False)] == ["cuda", "cpu"]
    assert device_for("cuda", lambda: True) == "cuda"


def test_a_cpu_that_is_asked_for_is_taken_without_a_look_for_another_device() -> None:
    assert device_for("cpu", lambda: pytest.fail("looked for CUDA")) == "cpu"


@pytest.mark.parametrize(
    ("asked", "said"), [("cuda", "there is no CUDA device here"), ("tpu", "must be auto, cpu or cuda, not 'tpu'")]
)
def test_a_device_that_is_not_there_is_refused_in_one_sentence(asked: str, said: str) -> None:
    with pytest.raises(EagleTraceError, match=said) as refused:
        device_for(asked, lambda: False)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2
