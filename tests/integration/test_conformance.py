"""The promises of the trace format, asked of the real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_trace.demo import prompts_file
from eagle_trace.prompts import read_prompts
from eagle_trace.testing import conformance
from tests.support.pairs import DRAFT, TARGET
from tests.support.warm.start import Warm

pytestmark = pytest.mark.integration


def test_sglang_keeps_every_promise(deployed: Path, four_prompts: Path, tmp_path: Path, warm: Warm) -> None:
    from eagle_trace_serving.host import ServerOptions
    from eagle_trace_serving.requests import Request
    from eagle_trace_serving.server import Server
    from eagle_trace_serving.testing import Served

    request = Request(read_prompts(four_prompts), max_new_tokens=24)
    with warm(), Server(ServerOptions(TARGET, deployed, dtype="float32")) as server:
        assert conformance(Served("sglang", server, request), tmp_path) == []


@pytest.mark.parametrize("name", ["speculators", "specforge"])
def test_a_trainer_keeps_every_promise(name: str, deployed: Path, tmp_path: Path) -> None:
    from eagle_trace.recording.hosts import find_host
    from eagle_trace_training.testing import Trained

    # more than one pack of documents: a budget is looked at behind each
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts_file().read_text() * 6)
    draft = DRAFT if name == "speculators" else deployed
    subject = Trained(find_host("trainer", name), draft=draft, target=TARGET, prompts=prompts, device="cpu")
    assert conformance(subject, tmp_path / "traces") == []
