"""The routes of an armed server give away and remove traces, and nothing else that lies there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_trace.manifest import OPEN_SEAL, SEAL

pytest.importorskip("httpx")
fastapi = pytest.importorskip("fastapi")


@pytest.fixture
def client(tmp_path: Path) -> Any:
    """A server whose folder holds two traces, one of them being recorded, and somebody's models beside and inside."""
    from fastapi.testclient import TestClient

    from eagle_trace_sglang.routes import add_routes

    folder = tmp_path / "traces"
    for name, seal in (("done.trace", SEAL), ("open.trace", OPEN_SEAL)):
        (folder / name).mkdir(parents=True)
        (folder / name / seal).write_text("{}")
    for models in (tmp_path / "models", folder / "models"):
        models.mkdir()
        (models / "weights").write_text("precious")
    (tmp_path / SEAL).write_text("{}")
    (folder / "link.trace").symlink_to(folder / "done.trace")
    app = fastapi.FastAPI()
    status = {"state": "recording", "out": str(folder / "open.trace"), "last": {}}
    add_routes(app, SimpleNamespace(status=lambda: status), str(folder))  # type: ignore[arg-type]
    return TestClient(app)


@pytest.mark.parametrize("name", ["%2e%2e", "%2e", "models", "link.trace", "absent.trace", "..%2fmodels"])
def test_nothing_but_traces_is_given_away_or_removed(client: Any, tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for method in ("GET", "DELETE"):
        answer = client.request(method, f"/eagle_trace/traces/{name}")
        assert answer.status_code in (404, 409), (method, answer.status_code)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_trace_is_removed_once_it_is_not_recorded_any_more(client: Any, tmp_path: Path) -> None:
    refused = client.delete("/eagle_trace/traces/open.trace")
    assert refused.status_code == 409
    assert "is being recorded" in refused.json()["error"]
    assert client.get("/eagle_trace/traces/done.trace").status_code == 200
    assert client.delete("/eagle_trace/traces/done.trace").status_code == 200
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["link.trace", "models", "open.trace"]
