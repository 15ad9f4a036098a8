"""Record the golden traces: the demo pair on the real hosts, two short prompts, scrubbed of this machine.

    python tests/golden/make.py          # about two minutes; replaces tests/golden/*.trace

`train.trace` is speculators' forward on the tokens of `healthy.trace`; `broken.trace` is a server that feeds its draft
one target layer instead of three. bfloat16, the checkpoints' own dtype, keeps them small enough for git.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eagle_trace.demo import models_dir
from eagle_trace.demo.run import deploy
from eagle_trace.manifest import sealed_json
from eagle_trace.recording.hosts import find_host

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROMPTS = [{"id": "the", "prompt": "The "}, {"id": "if", "prompt": "If "}]
NEW_TOKENS = 10
DTYPE = "bfloat16"
NAMES = ("train", "healthy", "broken")


def record_all(folder: Path) -> None:
    """Record the three traces into `folder`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    target = models_dir() / "target"
    common: dict[str, Any] = {
        "target": target, "dtype": DTYPE, "device": "cpu", "level": "values", "max_bytes": None, "force": False,
        "argv": [], "progress": print,
    }  # fmt: skip
    serve, train = find_host("server", "sglang").record, find_host("trainer", "speculators").record
    for draft, name in zip(deploy(folder), ("healthy", "broken"), strict=True):
        serve(draft=draft, out=folder / f"{name}.trace", prompts=prompts, max_new_tokens=NEW_TOKENS, **common)
    train(
        draft=models_dir() / "draft", out=folder / "train.trace", prompts=None, replay=folder / "healthy.trace",
        features="compute", steps=None, **common,
    )  # fmt: skip


def scrub(trace: Path, folder: Path) -> None:
    """Take this machine's paths out of a manifest: what lies in the repository becomes relative to it."""
    path = trace / "manifest.json"
    text = path.read_text(encoding="utf-8")
    for place, neutral in ((f"{folder}/", "demo/"), (f"{ROOT}/", "")):
        text = text.replace(place, neutral)
    path.write_bytes(sealed_json(json.loads(text)))


def main() -> None:
    """Record, scrub, and replace what was there."""
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        folder = Path(temporary).resolve()
        record_all(folder)
        for name in NAMES:
            made, kept = folder / f"{name}.trace", HERE / f"{name}.trace"
            scrub(made, folder)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.move(made, kept)
            size = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
            print(f"Wrote {kept.relative_to(ROOT)} ({size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
