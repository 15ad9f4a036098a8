"""`eagle-trace record`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from eagle_trace.cli.options import option
from eagle_trace.cli.progress import Progress
from eagle_trace.cli.said import next_line, say
from eagle_trace.errors import UsageError
from eagle_trace.printable import printable
from eagle_trace.store import Place, as_place

API_KEY, ADMIN_KEY = "EAGLE_TRACE_API_KEY", "EAGLE_TRACE_ADMIN_API_KEY"
#: how ``--help`` groups the options
RUN, KEEP = "What to run", "What to keep"
TRAIN, SERVE, ATTACH = "With --mode train", "With --mode serve", "With --mode serve --attach"


class Mode(StrEnum):
    """Which forward to record."""

    train = "train"
    serve = "serve"


class Level(StrEnum):
    """How much to keep of each row."""

    shapes = "shapes"
    stats = "stats"
    sketch = "sketch"
    values = "values"


def record(
    mode: Annotated[Mode, option(RUN, "Which forward: of a draft in training, or of one that is served.")],
    out: Annotated[str, option(RUN, "Folder to write the trace to, or its URL (s3://bucket/run.trace).")],
    host: Annotated[
        str | None,
        option(
            RUN,
            "The program: speculators, sglang, ... Default: the one installed, or that takes the draft.",
        ),
    ] = None,
    env: Annotated[
        Path | None,
        option(RUN, "Python of another environment that has the program and eagle-trace: record there.", "--env"),
    ] = None,
    draft: Annotated[Path | None, option(RUN, "Draft checkpoint in the host's own format.")] = None,
    target: Annotated[Path | None, option(RUN, "Target checkpoint, Hugging Face format.")] = None,
    prompts: Annotated[Path | None, option(RUN, "JSON lines with prompt, messages or input_ids.")] = None,
    steps: Annotated[int | None, option(RUN, "Draft steps. Default: 3, or the replayed trace's.")] = None,
    dtype: Annotated[str, option(RUN, "float32, float16, bfloat16, or auto: the checkpoint's own.")] = "auto",
    device: Annotated[str, option(RUN, "auto, cpu or cuda.")] = "auto",
    force: Annotated[bool, option(RUN, "Replace the trace at --out.", "--force")] = False,
    quiet: Annotated[bool, option(RUN, "Show no progress.", "--quiet")] = False,
    level: Annotated[
        Level, option(KEEP, "How much of each row: shapes, stats, sketch or values.", metavar="LEVEL")
    ] = Level.values,
    max_bytes: Annotated[str | None, option(KEEP, "Stop recording after so much, e.g. 500MB or 4GB.")] = None,
    sites: Annotated[str | None, option(KEEP, "Keep only these sites, e.g. 'fc.*,logits'.")] = None,
    roots: Annotated[str | None, option(KEEP, "Keep only rows from these prompt positions, e.g. 0:64,100.")] = None,
    only_steps: Annotated[str | None, option(KEEP, "Keep only these draft steps, e.g. 0:2.")] = None,
    only_prompts: Annotated[str | None, option(KEEP, "Only these lines of --prompts, from 0, e.g. 0:4.")] = None,
    replay: Annotated[str | None, option(TRAIN, "Take tokens and draft chains from this serve trace.")] = None,
    features: Annotated[
        str | None, option(TRAIN, "compute (run the target), serve (those the server fed), or a folder.")
    ] = None,
    batches: Annotated[int, option(TRAIN, "With -- COMMAND: batches of the training to record.")] = 2,
    topk: Annotated[int, option(SERVE, "Branches of the draft tree (1: a chain).")] = 1,
    draft_tokens: Annotated[int | None, option(SERVE, "Tokens verified at once. Default: steps + 1.")] = None,
    temperature: Annotated[float, option(SERVE, "0 for greedy answers.")] = 0.0,
    max_new_tokens: Annotated[int, option(SERVE, "Tokens to answer to each prompt.")] = 48,
    batch_size: Annotated[int, option(SERVE, "Prompts sent at once.")] = 8,
    keep_cuda_graphs: Annotated[
        bool, option(SERVE, "Record at the boundaries of the server's CUDA graphs only.", "--keep-cuda-graphs")
    ] = False,
    attach: Annotated[
        str | None,
        option(ATTACH, "URL of a server started with EAGLE_TRACE_OUT=FOLDER, instead of starting one."),
    ] = None,
    api_key: Annotated[
        str | None, option(ATTACH, "The server's API key; its admin key if it has that alone.", envvar=API_KEY)
    ] = None,
    admin_api_key: Annotated[
        str | None,
        option(ATTACH, "The server's admin key, which recording takes where there is one.", envvar=ADMIN_KEY),
    ] = None,
    requests: Annotated[
        int | None, option(ATTACH, "Without --prompts: record the next so many requests. Default: 8.")
    ] = None,
    match: Annotated[str, option(ATTACH, "Without --prompts: only request ids of this form (eval-*).")] = "",
    sample: Annotated[float, option(ATTACH, "Without --prompts: only this share (0 to 1) of the requests.")] = 1.0,
    timeout: Annotated[float, option(ATTACH, "Seconds an answer may take.")] = 600.0,
    seconds: Annotated[float | None, option(ATTACH, "Seal after so many seconds, whatever is still going on.")] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="serve: after --, arguments for the server itself. train: after --, a training command to run and "
            "record.",
            metavar="-- SERVER ARGS | COMMAND",
        ),
    ] = None,
) -> None:
    """Record one side of a draft model into a trace."""
    if env is not None:
        _record_there(env)
    from eagle_trace.manifest import without_secrets
    from eagle_trace.selection import Selection, parse_bytes

    _refuse(out.startswith("memory:"), "memory:// ends with this process: give --out a folder, or a URL that lasts")
    kept = {
        "level": level.value, "max_bytes": parse_bytes(max_bytes) if max_bytes else None,
        "keep_cuda_graphs": keep_cuda_graphs, "seconds": seconds,
        "selection": Selection.parse(sites=sites, roots=roots, steps=only_steps, prompts=only_prompts),
    }  # fmt: skip
    common: dict[str, Any] = kept | {
        "prompts": prompts, "out": as_place(out), "force": force, "argv": tuple(without_secrets(sys.argv)),
    }  # fmt: skip
    asking = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "temperature": temperature}
    if attach is not None:
        _refuse(mode is Mode.train, "--attach belongs to record --mode serve")
        _refuse(bool(target or draft or command), "a server at --attach has its target, draft and arguments already")
        from eagle_trace_serving.record import attach as run_attached

        run: Callable[..., Place] = partial(run_attached, host=host)
        common |= asking | {
            "url": attach, "api_key": api_key, "admin_api_key": admin_api_key, "timeout": timeout, "match": match,
            "sample": sample,
        }  # fmt: skip
        if requests is not None:
            common["requests"] = requests
    elif mode is Mode.serve:
        if target is None or draft is None or prompts is None:
            raise UsageError("record --mode serve needs --target, --draft, --prompts and --out, or --attach URL")
        _refuse(replay is not None or features is not None, "--replay and --features belong to record --mode train")
        _refuse(seconds is not None, "--seconds belongs to --attach")
        run = _recorder(mode, host, draft)
        common |= asking | {
            "target": target, "draft": draft, "dtype": dtype, "device": device, "topk": topk,
            "steps": 3 if steps is None else steps, "draft_tokens": draft_tokens, "host_args": tuple(command or ()),
        }  # fmt: skip
    else:
        _refuse(seconds is not None or keep_cuda_graphs, "--seconds and --keep-cuda-graphs belong to --mode serve")
        if command:
            own = (draft, target, prompts, replay, features, steps)
            _record_command(command, own, out=out, batches=batches, force=force, **kept)
        if draft is None:
            raise UsageError("record --mode train needs --draft")
        _refuse(
            (prompts is None) == (replay is None), "record --mode train needs exactly one of --prompts and --replay"
        )
        run, why = _trainer(host, draft)
        common |= {
            "chosen": why, "target": target, "draft": draft, "dtype": dtype, "device": device,
            "replay": None if replay is None else as_place(replay),
            "features": features or ("compute" if target else "serve"), "steps": steps,
        }  # fmt: skip

    path = _run(run, common, quiet=quiet)
    typer.echo(printable(f"Wrote {path}"))
    _say_early(path)
    typer.echo(next_line(_next_command(mode, path, replay, target)))


def _trainer(name: str | None, draft: Path) -> tuple[Callable[..., Place], Any]:
    """What records a training, and why it is that one."""
    from eagle_trace.checkpoints import check_folder
    from eagle_trace.jobs.chosen import chosen
    from eagle_trace.recording.hosts import find_host

    check_folder(draft)  # one that is not there has no trainer
    trainer = find_host("trainer", name, draft=draft)
    return trainer.record, chosen(trainer, draft, named=name is not None)


def _run(run: Callable[..., Place], options: dict[str, Any], *, quiet: bool) -> Place:
    """Record, and say of an interruption what it leaves; a server that runs already says that itself."""
    from eagle_trace.output import is_sealed

    with Progress(quiet) as progress:
        try:
            return run(**options, progress=progress)
        except KeyboardInterrupt as error:
            if "url" not in options and not is_sealed(options["out"]):
                error.add_note("nothing was sealed")
            raise


def _recorder(mode: Mode, host: str | None, draft: Path | None) -> Callable[..., Place]:
    """What records the host called `host`, or the one that is installed and takes the draft."""
    from eagle_trace.recording.hosts import KINDS, find_host

    record: Callable[..., Place] = find_host(KINDS[mode.value], host, draft=draft).record
    return record


def _record_there(python: Path) -> NoReturn:
    """Go on as the same command in another environment, which takes this process over."""
    from eagle_trace.jobs.environments import Environment

    there = Environment(python)
    there.installed()
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)
    words, skip = [], False
    for word in own[:end]:
        if not skip and word != "--env" and not word.startswith("--env="):
            words.append(word)
        skip = word == "--env" and not skip
    command = there.command([*words, *own[end:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _refuse(wrong: bool, sentence: str) -> None:
    if wrong:
        raise UsageError(sentence)


def _record_command(command: list[str], own: tuple[object, ...], *, out: str, **options: Any) -> NoReturn:
    """Run and record a training command, which has options of its `own`; leave with its exit status."""
    _refuse(
        any(one is not None for one in own),
        "a training command after -- brings its own draft, target and data: --draft, --target, --prompts, "
        "--replay, --features and --steps do not go with it",
    )
    from eagle_trace_training.command import record_command

    recorded = record_command(command, out=as_place(out), **options)
    if recorded.trace:
        typer.echo(printable(f"Wrote {recorded.trace}"), err=True)
    if recorded.trace and not recorded.problem:
        _say_early(recorded.trace)
    if recorded.problem:
        say(f"eagle-trace: {recorded.problem}", err=True)
    elif recorded.trace:
        typer.echo(next_line(f"eagle-trace show {recorded.trace}"), err=True)
    raise typer.Exit(recorded.status)


def _say_early(path: Place) -> None:
    """A recording that ended before it was done says so right away."""
    from eagle_trace.reader import open_trace

    if early := open_trace(path).manifest.ended_early:
        say(f"eagle-trace: {early}", err=True)


def _next_command(mode: Mode, path: Place, replay: str | None, target: Path | None) -> str:
    if mode is Mode.serve:
        return (
            f"eagle-trace record --mode train --target {target or 'TARGET'} --draft SPECULATORS_DRAFT "
            f"--replay {path} --out train.trace"
        )
    return f"eagle-trace diff {path} {replay or 'SERVE_TRACE'}"
