"""The demo pair on the real hosts.

A start of SGLang costs half a minute, most of it imports: recordings are shared by all tests, and within
``with warm():`` SGLang is forked from a process that has imported it (`tests.support.warm`). Tests of the command line,
and one server and one engine as their users start them, run SGLang as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.demo import prompts_file
from tests.support.pairs import DRAFT, TARGET
from tests.support.warm.start import Warm, warm_python

Serve = Callable[..., Trace]
Train = Callable[..., Trace]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A context in which SGLang starts in seconds."""
    from eagle_trace_serving import process

    with warm_python() as python:

        @contextmanager
        def context() -> Iterator[None]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(process, "PYTHON", python)
                yield

        yield context


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="session")
def deployed(folder: Path) -> Path:
    """The demo draft as SGLang loads it."""
    from eagle_trace_analysis.checkpoint.export import export

    export(DRAFT, folder / "deployed", target=TARGET)
    return folder / "deployed"


@pytest.fixture(scope="session")
def four_prompts(folder: Path) -> Path:
    lines = prompts_file().read_text().splitlines()[:4]
    path = folder / "four.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def one_prompt_as_ids(folder: Path) -> Path:
    path = folder / "ids.jsonl"
    path.write_text(json.dumps({"id": "the prompt", "input_ids": list(b"The return statement ")}))
    return path


@pytest.fixture(scope="session")
def serve(folder: Path, deployed: Path, four_prompts: Path, warm: Warm) -> Serve:
    """Record SGLang; the same options give the same trace again."""
    from eagle_trace_serving.record import record

    made: dict[str, Trace] = {}

    def run(**options: Any) -> Trace:
        asked = {
            "target": TARGET,
            "draft": deployed,
            "prompts": four_prompts,
            "dtype": "float32",
            "max_new_tokens": 24,
        } | options
        name = json.dumps({key: str(value) for key, value in asked.items()}, sort_keys=True)
        if name not in made:
            with warm():
                made[name] = open_trace(record(out=folder / f"serve{len(made)}.trace", **asked))
        return made[name]

    return run


@pytest.fixture(scope="session")
def train(folder: Path) -> Train:
    """Record a trainer's forward, speculators' if none is named; the same options give the same trace again."""
    from eagle_trace.recording.hosts import find_host

    made: dict[str, Trace] = {}

    def run(host: str = "speculators", **options: Any) -> Trace:
        asked = {
            "target": TARGET,
            "draft": DRAFT,
            "prompts": None,
            "replay": None,
            "features": "compute",
            "steps": None,
            "dtype": "auto",
            "device": "cpu",
            "level": "values",
            "max_bytes": None,
            "force": False,
            "argv": [],
            "progress": lambda _: None,
        } | options
        name = host + json.dumps({key: str(value) for key, value in asked.items() if key != "progress"}, sort_keys=True)
        if name not in made:
            record = find_host("trainer", host).record
            made[name] = open_trace(record(out=folder / f"train{len(made)}.trace", **asked))
        return made[name]

    return run
