"""What two targets' configs tell of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle_trace_analysis.causes.target_differs import TELLING, _static
from eagle_trace_analysis.evidence.context import Context


def context(train: dict[str, Any], serve: dict[str, Any]) -> Context:
    def trace(config: dict[str, Any]) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(target={"config": config}, settings={}))

    return cast("Context", SimpleNamespace(train=trace(train), serve=trace(serve), train_target=None, target=None))


@pytest.mark.parametrize("within", [None, "text_config", "language_config"])
@pytest.mark.parametrize("key", TELLING)
def test_an_entry_that_differs_is_named_also_within_the_config_of_a_model_of_images(
    key: str, within: str | None
) -> None:
    train, serve = {"model_type": "x", key: 1}, {"model_type": "x", key: 2}
    if within is not None:
        train, serve = {within: train}, {within: serve}
    assert _static(context(train, serve)) == (f"the targets' configs differ in {key}", True)
    assert _static(context(train, train))[1] is None
