"""A healthy draft in both formats, and how to ask a check's result what it complained of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding, Status
from tests.support import checkpoints as make

Config = dict[str, Any]
Harm = Callable[[Config, make.Tensors], None]


@dataclass(frozen=True)
class Folders:
    """A healthy draft in both formats, and its target."""

    draft: Path
    flat: Path
    target: Path


def write_healthy(root: Path) -> Folders:
    """The draft in speculators format, its export, and its target."""
    draft = make.write_checkpoint(root / "draft", make.speculators_config(), make.draft_tensors())
    target = make.write_checkpoint(root / "target", make.decoder_config(make.LAYERS), make.target_tensors())
    export(draft, root / "flat")
    return Folders(draft, root / "flat", target)


def flat_config(healthy: Folders) -> Config:
    config: Config = json.loads((healthy.flat / "config.json").read_text())
    return config


def troubles(result: CheckResult) -> dict[str, Finding]:
    return {f.name: f for f in result.findings if f.status in (Status.WARN, Status.FAIL)}


def only(result: CheckResult, name: str, status: Status = Status.FAIL) -> Finding:
    """The finding `name`, which must be the only one that warns or fails, and must say what to do."""
    found = troubles(result)
    assert list(found) == [name], {n: f.evidence for n, f in found.items()}
    assert found[name].status is status
    assert found[name].fix
    assert result.exit_status == (status is Status.FAIL)
    return found[name]


def named(result: CheckResult, name: str) -> Finding:
    return next(f for f in result.findings if f.name == name)


def rename(old: str, new: str) -> Harm:
    def harm(_: Config, tensors: make.Tensors) -> None:
        for name in [n for n in tensors if old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return harm


def drop(name: str) -> Harm:
    return lambda _, tensors: tensors.__delitem__(name)


def put(name: str, value: Callable[[Any], Any]) -> Harm:
    def harm(_: Config, tensors: make.Tensors) -> None:
        tensors[name] = value(tensors.get(name))

    return harm


def both(*harms: Harm) -> Harm:
    def harm(config: Config, tensors: make.Tensors) -> None:
        for one in harms:
            one(config, tensors)

    return harm


def setting(**changes: Any) -> Harm:
    return lambda config, _: config.update(changes)


def eagle(**changes: Any) -> Harm:
    def harm(config: Config, _: make.Tensors) -> None:
        config["eagle_config"] = {k: v for k, v in {**config["eagle_config"], **changes}.items() if v != "gone"}

    return harm
