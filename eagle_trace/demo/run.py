"""The demo: two drafts, deployed right and deployed as in the story the tool was born from, and a diff of each.

One is of a small Llama, the other of the story's own kind of target, a Kimi-K2.5: latent attention and experts inside a
multimodal class. The broken deployment differs in one word of the draft's config: `use_aux_hidden_state: false`. The
server then feeds its draft one target layer's hidden state instead of three, the width equals the embedding's, and
SGLang skips the projection.
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
class DemoPair:
    """A target and its draft that ship with the package.

    Attributes:
        name: the folder of its traces, below the demo's; empty for the demo's own.
        folder: of `target/` and `draft/`.
        host_args: what SGLang is given for it.
        new_tokens: length of the answers.
    """

    name: str
    folder: Path
    host_args: tuple[str, ...] = ()
    new_tokens: int = 48

    @property
    def target(self) -> Path:
        """The target, Hugging Face format."""
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        """The draft as speculators saved it."""
        return self.folder / "draft"


LLAMA = DemoPair("", models_dir())
#: its processor comes as code, as the published checkpoint's does
KIMI = DemoPair("kimi", models_dir() / "kimi", ("--trust-remote-code",))


@dataclass(frozen=True)
class DemoTraces:
    """The three traces of a pair, by what they were made of."""

    train: Path
    healthy: Path
    broken: Path


def deploy(folder: Path, pair: DemoPair = LLAMA) -> tuple[Path, Path]:
    """The pair's draft as SGLang loads it, healthy and broken, in two folders below `folder`."""
    from eagle_trace_analysis.checkpoint.export import export

    healthy, broken = folder / "draft", folder / "draft-single-layer"
    export(pair.draft, healthy, target=pair.target)
    shutil.copytree(healthy, broken)
    config = json.loads((broken / "config.json").read_text(encoding="utf-8"))
    config["eagle_config"]["use_aux_hidden_state"] = False
    (broken / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return healthy, broken


def record_all(folder: Path, progress: Progress, pair: DemoPair = LLAMA) -> DemoTraces:
    """Record the healthy server, the training forward on the same tokens, and the broken server, into `folder`."""
    folder = folder / pair.name
    folder.mkdir(parents=True, exist_ok=True)
    healthy, broken = deploy(folder, pair)
    traces = DemoTraces(folder / "train.trace", folder / "healthy.trace", folder / "broken.trace")
    serve, train = find_host("server", "sglang").record, find_host("trainer", "speculators").record
    common: dict[str, Any] = {
        "target": pair.target,
        "device": "auto",
        "level": "values",
        "max_bytes": None,
        "force": False,
    }
    of = f" of the {pair.name} pair" if pair.name else ""

    def serve_one(draft: Path, out: Path, what: str) -> None:
        told = {"prompts": prompts_file(), "dtype": "float32", "max_new_tokens": pair.new_tokens}
        asked = told | {"host_args": pair.host_args}
        serve(draft=draft, out=out, **asked, **common, progress=lambda message: progress(f"{what}{of}: {message}"))

    serve_one(healthy, traces.healthy, "healthy server")
    train(
        draft=pair.draft, out=traces.train, prompts=None, replay=traces.healthy, features="compute",
        steps=None, dtype="auto", argv=[], **common, progress=lambda message: progress(f"training{of}: {message}"),
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
