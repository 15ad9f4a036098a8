"""The demo pair on the real vLLM, on a CPU, in an environment of its own (`make vllm`).

A start costs most of a minute, nearly all of it imports: within ``with warm():`` vLLM is forked from a process that has
imported it, one server answers and records for many tests, and recordings are shared.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.demo import prompts_file
from eagle_trace_serving.host import ServerOptions
from eagle_trace_serving.server import Server
from tests.support.pairs import DRAFT, TARGET
from tests.support.warm.start import Warm, warm_python

Serve = Callable[..., Trace]
Train = Callable[..., Trace]

SUPPORT = Path(__file__).parents[1] / "support"
V2_SITE, FAULT_SITE = SUPPORT / "vllm_v2_site", SUPPORT / "vllm_fault_site"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no vLLM, nothing here can be run; `make vllm` makes the environment that has it."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "tests/vllm" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment: make vllm"))


def warm_by(python: list[str], **variables: str) -> Warm:
    """A context in which servers are started by `python`, with these variables in their environment."""
    from eagle_trace_serving import process

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "PYTHON", python)
            for name, value in variables.items():
                patch.setenv(name, value)
            yield

    return context


@contextmanager
def with_path(ahead: Path, **variables: str) -> Iterator[None]:
    """A context in whose servers a folder comes first in PYTHONPATH, so that its ``sitecustomize`` is run."""
    path = filter(None, [str(ahead), os.environ.get("PYTHONPATH"), str(SUPPORT.parents[1])])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": os.pathsep.join(path), **variables}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A context in which vLLM starts in seconds."""
    with warm_python("vllm") as python:
        from tests.support.warm.client import ADDRESS

        yield warm_by(python, **{ADDRESS: os.environ[ADDRESS]})


@pytest.fixture(scope="session")
def warm_v2() -> Iterator[Warm]:
    """The same for model runner V2."""
    variables = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with warm_python("vllm", V2_SITE, **variables) as python:
        from tests.support.warm.client import ADDRESS

        path = os.pathsep.join(filter(None, [str(V2_SITE), os.environ.get("PYTHONPATH")]))
        yield warm_by(python, PYTHONPATH=path, **variables, **{ADDRESS: os.environ[ADDRESS]})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="session")
def four_prompts(folder: Path) -> Path:
    path = folder / "four.jsonl"
    path.write_text("\n".join(prompts_file().read_text().splitlines()[:4]))
    return path


@pytest.fixture(scope="session")
def server(warm: Warm) -> Iterator[Server]:
    """The demo pair in float32, for recordings that need no other options."""
    from eagle_trace_vllm.host import HOST

    with warm(), Server(ServerOptions(TARGET, DRAFT, dtype="float32"), host=HOST) as running:
        yield running


@pytest.fixture(scope="session")
def serve(folder: Path, four_prompts: Path, warm: Warm) -> Serve:
    """Record vLLM; the same options give the same trace again. `started` is the context it is started in."""
    from eagle_trace_vllm.host import HOST

    made: dict[str, Trace] = {}

    def run(started: Warm = warm, **options: Any) -> Trace:
        asked = {
            "target": TARGET,
            "draft": DRAFT,
            "prompts": four_prompts,
            "dtype": "float32",
            "max_new_tokens": 24,
        } | options
        name = json.dumps({key: str(value) for key, value in asked.items()} | {"started": id(started)}, sort_keys=True)
        if name not in made:
            with started():
                made[name] = open_trace(HOST.record(out=folder / f"serve{len(made)}.trace", **asked))
        return made[name]

    return run


@pytest.fixture(scope="session")
def train(folder: Path) -> Train:
    """Replay a serve trace through a trainer's forward, speculators' if none is named."""
    from eagle_trace.recording.hosts import find_host

    made: dict[tuple[str, str], Trace] = {}

    def run(served: Trace, host: str = "speculators", **options: Any) -> Trace:
        place = str(served.path)
        if (host, place) not in made:
            asked = {
                "target": TARGET,
                "draft": DRAFT,
                "prompts": None,
                "replay": place,
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
            recorded = find_host("trainer", host).record(out=folder / f"train{len(made)}.trace", **asked)
            made[host, place] = open_trace(recorded)
        return made[host, place]

    return run
