"""What is read off SGLang's own arguments before it is started."""

from __future__ import annotations

import pytest

from eagle_trace.errors import UsageError
from eagle_trace_sglang.deployment import check_parallelism, tensor_parallel_size


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ([], 1),
        (["--log-requests"], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4", "--log-requests"], 4),
        (["--tensor-parallel-size", "2", "--tp", "8"], 8),
        (["--tp"], 1),
        (["--tp", "many"], 1),
        (["--tp-extra", "3"], 1),
    ],
)
def test_the_last_word_on_ranks_counts(words: list[str], size: int) -> None:
    assert tensor_parallel_size(words) == size


@pytest.mark.parametrize(
    "words",
    [["--dp", "2"], ["--data-parallel-size=2"], ["--attn-dp-size", "2"], ["--tp", "2", "--enable-dp-attention"]],
)
def test_replicas_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="each replica answers other requests"):
        check_parallelism(words)
    check_parallelism(["--dp", "1", "--tp", "2"])
