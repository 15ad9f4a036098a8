"""`eagle-trace record`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from eagle_trace.cli.progress import Progress
from eagle_trace.errors import UsageError


class Mode(StrEnum):
    """Which forward to record."""

    train = "train"
    serve = "serve"


class Level(StrEnum):
    """How much to keep of each row."""

    shapes = "shapes"
    stats = "stats"
    values = "values"


def record(
    mode: Annotated[Mode, typer.Option(help="Which forward: speculators' training forward, or SGLang's draft worker.")],
    out: Annotated[Path, typer.Option(help="Folder to write the trace to.")],
    draft: Annotated[
        Path | None, typer.Option(help="Draft checkpoint: speculators format for train, SGLang's for serve.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Target checkpoint, Hugging Face format.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt, messages or input_ids.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="train: take tokens and draft chains from this serve trace.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="train: compute (run the target), serve (those the server fed), or a folder."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Draft steps. Default: 3, or the replayed trace's.")] = None,
    topk: Annotated[int, typer.Option(help="serve: branches of the draft tree (1: a chain).")] = 1,
    draft_tokens: Annotated[
        int | None, typer.Option(help="serve: tokens verified at once. Default: steps + 1.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or auto: the checkpoint's own.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="serve: tokens to answer to each prompt.")] = 48,
    batch_size: Annotated[int, typer.Option(help="serve: prompts sent at once.")] = 8,
    batches: Annotated[int, typer.Option(help="train -- COMMAND: batches of the training to record.")] = 2,
    level: Annotated[Level, typer.Option(help="How much to keep of each row.")] = Level.values,
    max_bytes: Annotated[str | None, typer.Option(help="Stop recording after so much, e.g. 500MB or 4GB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the trace at --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    sglang_args: Annotated[
        list[str] | None,
        typer.Argument(
            help="serve: after --, arguments for SGLang itself. train: after --, a training command to run and record.",
            metavar="-- SGLANG ARGS | COMMAND",
        ),
    ] = None,
) -> None:
    """Record one side of a draft model into a trace."""
    budget = None if max_bytes is None else parse_bytes(max_bytes)
    if mode is Mode.train and sglang_args:
        if any(one is not None for one in (draft, target, prompts, replay, features, steps)):
            raise UsageError(
                "a training command after -- brings its own draft, target and data: --draft, --target, --prompts, "
                "--replay, --features and --steps do not go with it"
            )
        _record_command(sglang_args, out=out, batches=batches, level=level.value, max_bytes=budget, force=force)
    if draft is None:
        raise UsageError(f"record --mode {mode.value} needs --draft")
    common = {
        "target": target, "draft": draft, "out": out, "prompts": prompts, "dtype": dtype, "device": device,
        "level": level.value, "max_bytes": budget, "force": force,
    }  # fmt: skip
    if mode is Mode.serve:
        if target is None or prompts is None:
            raise UsageError("record --mode serve needs --target, --draft, --prompts and --out")
        if replay is not None or features is not None:
            raise UsageError("--replay and --features belong to record --mode train")
        own: dict[str, Any] = {
            "steps": steps or 3, "topk": topk, "draft_tokens": draft_tokens, "max_new_tokens": max_new_tokens,
            "batch_size": batch_size, "sglang_args": tuple(sglang_args or ()), "argv": tuple(sys.argv),
        }  # fmt: skip
    else:
        if (prompts is None) == (replay is None):
            raise UsageError("record --mode train needs exactly one of --prompts and --replay")
        own = {
            "replay": replay, "features": features or ("compute" if target else "serve"), "steps": steps,
            "argv": list(sys.argv),
        }  # fmt: skip
    from eagle_trace.recorder import find_recorder

    with Progress(quiet) as progress:
        path = find_recorder(mode.value)(**common, **own, progress=progress)
    typer.echo(f"Wrote {path}")
    typer.echo(_next_command(mode, path, replay, target))


def _record_command(command: list[str], *, out: Path, **options: Any) -> NoReturn:
    """Run and record a training command; leave with its exit status."""
    from eagle_trace_speculators.command import record_command

    recorded = record_command(command, out=out, **options)
    for path in recorded.traces:
        typer.echo(f"Wrote {path}", err=True)
    if recorded.problem:
        typer.echo(f"eagle-trace: {recorded.problem}", err=True)
    elif recorded.traces:
        typer.echo(f"Next: eagle-trace show {recorded.traces[0]}", err=True)
    raise typer.Exit(recorded.status)


def _next_command(mode: Mode, path: Path, replay: Path | None, target: Path | None) -> str:
    if mode is Mode.serve:
        return (
            f"Next: eagle-trace record --mode train --target {target} --draft SPECULATORS_DRAFT "
            f"--replay {path} --out train.trace"
        )
    return f"Next: eagle-trace diff {path} {replay or 'SERVE_TRACE'}"


def parse_bytes(text: str) -> int:
    """A number of bytes with an optional decimal unit (KB, MB, GB, TB).

    Raises:
        UsageError: not a positive amount.
    """
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
    upper = text.strip().upper()
    for unit, factor in units.items():
        if upper.endswith(unit):
            try:
                amount = float(upper.removesuffix(unit)) * factor
            except ValueError:
                break
            if amount >= 1:
                return int(amount)
            break
    raise UsageError(f"--max-bytes must be a positive amount such as 500MB or 4GB, not {text!r}")
