"""What is predicted of a healthy server is what it got, for chains and trees, greedy and at a temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eagle_trace import Trace
from eagle_trace.demo import prompts_file
from eagle_trace_analysis import diff

pytestmark = pytest.mark.integration

Make = Callable[..., Trace]
CHAIN: dict[str, Any] = {}
TREE = {"topk": 4, "draft_tokens": 8}
WIDE = {"topk": 2, "draft_tokens": 6, "steps": 4}
WARM = {"temperature": 0.8}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TREE, id="tree"),
        pytest.param(WIDE, id="narrow-tree"),
        pytest.param(CHAIN | WARM, id="chain-at-a-temperature"),
        pytest.param(TREE | WARM, id="tree-at-a-temperature"),
    ],
)
def test_the_predicted_accept_length_is_the_servers(serve: Make, train: Make, options: dict[str, Any]) -> None:
    served = serve(prompts=prompts_file(), max_new_tokens=48, **options)
    accept = diff(train(replay=served.path), served).accept_length
    counts = served.manifest.settings["server_counts"].values()
    verified = sum(one["spec_verify_ct"] for one in counts)
    own = sum(one.get("completion_tokens", 0) for one in counts) / verified if verified else 0.0
    low, high = accept.predicted_range or (accept.predicted, accept.predicted)
    print(f"{options}: observed {accept.observed:.3f}, server {own:.3f}, predicted {low:.3f} to {high:.3f}")
    print(f"  {accept.predicted_basis}, {accept.predicted_rounds} rounds, undecided {accept.undecided}, {accept}")
    assert accept.comparable
    assert (accept.better, accept.worse) == (0, 0), "every round comes out as the server's"
    assert low - 1e-9 <= accept.predicted <= high + 1e-9
    assert low == pytest.approx(accept.observed, rel=0.02)
    assert high == pytest.approx(accept.observed, rel=0.02)
