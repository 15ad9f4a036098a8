"""Faults planted in the numpy pair: what is deployed, what the server does, and what should be confirmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from eagle_trace.reader import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support.numpy_pair import Doing, write_side
from tests.support.numpy_target import read_tensors
from tests.support.pairs import DRAFT, TARGET

Edit = Callable[[Any], object]
Change = dict[str, Any]


@dataclass(frozen=True)
class Planted:
    """One fault.

    Attributes:
        name: of the test case.
        cause: what should be confirmed, None for nothing.
        site: first divergence, None if the two sides should agree.
        config, stored: edits of the deployed config and tensors.
        trained, trained_stored: edits of the trained ones.
        serve, train: what the side does; values may be functions of the side's tensors.
        serve_tensors, train_tensors: edits of the tensors as used.
        loaded: parameters as loaded are those of the deployed checkpoint, not those used.
        serve_write, train_write: options of `write_side`.
    """

    name: str
    cause: str | None
    site: str | None
    config: Edit | None = None
    stored: Edit | None = None
    trained: Edit | None = None
    trained_stored: Edit | None = None
    serve: Change = field(default_factory=dict)
    train: Change = field(default_factory=dict)
    serve_tensors: Edit | None = None
    train_tensors: Edit | None = None
    loaded: bool = False
    serve_write: Change = field(default_factory=dict)
    train_write: Change = field(default_factory=dict)


def copy_checkpoint(source: Path, out: Path, config: Edit | None, tensors: Edit | None) -> tuple[Path, dict[str, Any]]:
    """A copy of a checkpoint with its config and tensors edited; the folder and the config."""
    out.mkdir(parents=True)
    data = json.loads((source / "config.json").read_text())
    held = load_file(source / "model.safetensors")
    for edit, what in ((config, data), (tensors, held)):
        if edit is not None:
            edit(what)
    (out / "config.json").write_text(json.dumps(data))
    save_file({name: np.ascontiguousarray(one) for name, one in held.items()}, out / "model.safetensors")
    return out, data


def serving(planted: Planted, folder: Path, dtype: str = "float32") -> Trace:
    """Record the server with the fault; the healthy folder it was deployed from is ``exported`` in `folder`."""
    if not (folder / "exported").exists():
        export(DRAFT, folder / "exported", target=TARGET)
    deployed, flat = copy_checkpoint(folder / "exported", folder / "deployed", planted.config, planted.stored)
    side = _side(flat, planted.serve_tensors, planted.serve, DRAFT)
    params = {"params": read_tensors(DRAFT)} if planted.loaded else {}
    options = {**params, **planted.serve_write}
    return write_side(folder / "serve.trace", "serve", side, dtype=dtype, draft=deployed, **options)


def _side(config: dict[str, Any], edit: Edit | None, change: Change, source: Path) -> Doing:
    tensors = read_tensors(source)
    if edit is not None:
        edit(tensors)
    return Doing(config, tensors, **change)


def run(planted: Planted, folder: Path, dtype: str = "float32") -> tuple[Diff, Trace, Trace]:
    """Record both sides with the fault, compare them and look for the cause."""
    serve = serving(planted, folder, dtype)
    trained, nested = copy_checkpoint(DRAFT, folder / "trained", planted.trained, planted.trained_stored)
    side = _side(nested, planted.train_tensors, planted.train, trained)
    train = write_side(
        folder / "train.trace", "train", side, dtype=dtype, draft=trained, replay=serve, **planted.train_write
    )
    return diagnosed(diff(train, serve), train, serve), train, serve
