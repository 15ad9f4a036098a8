"""The demo: one draft, deployed right and deployed as in the story the tool was born from, and a diff of each.

The broken deployment differs in one word of its config: `use_aux_hidden_state: false`. The server then feeds its draft
one target layer's hidden state instead of three, the width equals the embedding's, and SGLang skips the projection.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.demo import models_dir, prompts_file
from eagle_trace.recording.hosts import find_host

if TYPE_CHECKING:
    from eagle_trace_analysis import Diff

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DemoTraces:
    """The three traces of the demo, by what they were made of."""

    train: Path
    healthy: Path
    broken: Path


def deploy(folder: Path) -> tuple[Path, Path]:
    """The demo draft as SGLang loads it, healthy and broken, in two folders below `folder`."""
    from eagle_trace_analysis.checkpoint.export import export

    healthy, broken = folder / "draft", folder / "draft-single-layer"
    export(models_dir() / "draft", healthy, target=models_dir() / "target")
    shutil.copytree(healthy, broken)
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    config["eagle_config"]["use_aux_hidden_state"] = False
    (broken / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return healthy, broken


def record_all(folder: Path, progress: Progress) -> DemoTraces:
    """Record the healthy server, the training forward on the same tokens, and the broken server, into `folder`."""
    target = models_dir() / "target"
    healthy, broken = deploy(folder)
    traces = DemoTraces(folder / "train.trace", folder / "healthy.trace", folder / "broken.trace")
    serve, train = find_host("server", "sglang").record, find_host("trainer", "speculators").record
    common: dict[str, Any] = {
        "target": target,
        "device": "auto",
        "level": "values",
        "max_bytes": None,
        "force": False,
    }

    def serve_one(draft: Path, out: Path, what: str) -> None:
        told = {"prompts": prompts_file(), "dtype": "float32", "max_new_tokens": 48}
        serve(draft=draft, out=out, **told, **common, progress=lambda message: progress(f"{what}: {message}"))

    serve_one(healthy, traces.healthy, "healthy server")
    train(
        draft=models_dir() / "draft", out=traces.train, prompts=None, replay=traces.healthy, features="compute",
        steps=None, dtype="auto", argv=[], **common, progress=lambda message: progress(f"training: {message}"),
    )  # fmt: skip
    serve_one(broken, traces.broken, "broken server")
    return traces


def diff_all(traces: DemoTraces) -> tuple[Diff, Diff]:
    """The training forward against the healthy and against the broken server."""
    from eagle_trace import open_trace
    from eagle_trace_analysis import diff
    from eagle_trace_analysis.diagnosis.diagnose import diagnosed

    train, healthy, broken = (open_trace(path) for path in (traces.train, traces.healthy, traces.broken))
    return diagnosed(diff(train, healthy), train, healthy), diagnosed(diff(train, broken), train, broken)
