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
    rounds = sum(one["spec_verify_ct"] for one in counts)
    own = sum(one["spec_accept_length"] * one["spec_verify_ct"] for one in counts) / rounds
    low, high = accept.predicted_range or (accept.predicted, accept.predicted)
    print(f"{options}: server {own:.3f}, observed {accept.observed:.3f}, predicted {low:.3f} to {high:.3f}")
    assert accept.comparable
    assert (accept.predicted_range is None) == (options.get("topk", 1) == 1)
    assert accept.undecided == 0
    # round by round as the server's, as far as the rows of training decide it
    assert (accept.better, accept.worse) == (0, 0)
    assert high - low <= 0.1 * high
    # the walk ends a round before the answer does, so the two means are not over the same rounds
    for figure in (accept.observed, own):
        assert low * 0.98 <= figure <= high * 1.02
