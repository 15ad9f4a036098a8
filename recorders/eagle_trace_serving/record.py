"""`eagle-trace record --mode serve`: start a server or attach to one, and keep what its draft computes."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_trace.errors import HostError, RecordingError, UsageError
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import open_trace
from eagle_trace.recording.hosts import find_host
from eagle_trace.recording.wanted import Wanted
from eagle_trace.selection import Selection, select_prompts
from eagle_trace.store import FOLDER_MODE, Place, is_url, reason
from eagle_trace.writer import check_output, prepare_output, remove_empty
from eagle_trace_serving.admission import DEFAULT_REQUESTS, Admission
from eagle_trace_serving.environment import OUT
from eagle_trace_serving.host import ServerOptions, ServingHost
from eagle_trace_serving.requests import Request

Progress = Callable[[str], None]


def record(
    *,
    target: Path,
    draft: Path,
    prompts: Path,
    out: Place,
    host: ServingHost | None = None,
    steps: int = 3,
    topk: int = 1,
    draft_tokens: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_new_tokens: int = 48,
    batch_size: int = 8,
    temperature: float = 0.0,
    force: bool = False,
    host_args: Sequence[str] = (),
    argv: Sequence[str] = (),
    progress: Progress = lambda _: None,
    **kept: Any,
) -> Place:
    """Start a server, record the serving forward and return the sealed trace's folder.

    Args:
        target: target checkpoint, Hugging Face format.
        draft: draft checkpoint as the server loads it.
        prompts: prompts file.
        out: folder of the trace, or its URL.
        host: the server's program; by default the one that is installed.
        steps: draft steps a round.
        topk: branches of the draft tree; 1 is a chain.
        draft_tokens: tokens verified at once; by default steps + 1 for a chain, 8 for a tree.
        dtype: `auto` (the checkpoint's), `float32`, `float16` or `bfloat16`.
        device: `auto`, `cpu` or `cuda`.
        max_new_tokens: tokens to answer to each prompt.
        batch_size: prompts sent at once.
        temperature: 0 for greedy answers.
        force: replace a trace at `out`.
        host_args: the server's own arguments; they win over ours.
        argv: the command line, for the manifest.
        progress: told what is going on.
        kept: fields of `Wanted`: level, max_bytes, selection, keep_cuda_graphs and others.

    Raises:
        CheckpointError, PromptsError, UsageError: the input does not make sense.
        OutputExistsError: `out` is taken.
        HostError: the server did not start, or died.
        RecordingError: the recording failed.
    """
    from eagle_trace_serving.server import Server

    wanted = Wanted(**kept)
    host = host or find_host("server")
    options = ServerOptions(
        target, draft, steps, topk, draft_tokens, dtype, device, tuple(host_args),
        keep_cuda_graphs=wanted.keep_cuda_graphs,
    )  # fmt: skip
    request = _request(prompts, wanted.selection, max_new_tokens, batch_size, temperature)
    options.check()
    host.check(options)
    check_output(out, force=force)
    texts = any(prompt.input_ids is None for prompt in request.prompts)
    with _no_empty_folder(out), Server(options, progress, host, texts=texts) as server:
        # only now: an old trace is not given up for a server that never starts
        prepare_output(out, force=force)
        # the prompts are chosen already
        server.record(request, out, argv=argv, **(kept | {"selection": replace(wanted.selection, prompts=())}))
    _require_rows(out)
    return out


def attach(
    *,
    url: str,
    out: Place,
    host: str | None = None,
    prompts: Path | None = None,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    timeout: float = 600.0,
    requests: int = DEFAULT_REQUESTS,
    match: str = "",
    sample: float = 1.0,
    max_new_tokens: int = 48,
    batch_size: int = 8,
    temperature: float = 0.0,
    force: bool = False,
    argv: Sequence[str] = (),
    progress: Progress = lambda _: None,
    **kept: Any,
) -> Place:
    """Record in a server that runs already, and return where the trace is.

    That is `out`, to which the trace is fetched, or the place where the server keeps it if that is not a folder of its
    machine. Such a place is what the server says; nobody opened it.

    Args:
        url: the server, started with ``EAGLE_TRACE_OUT`` in its environment.
        out: folder of the trace.
        host: the server's program; by default what it says.
        prompts: prompts file; None to record what others ask.
        api_key: the server's, or None.
        admin_api_key: the server's, or None; where it has one, this is what recording takes.
        timeout: seconds that an answer may take.
        requests, match, sample: without prompts, which requests of others to record (`Admission`).
        max_new_tokens, batch_size, temperature: with prompts, how to ask (`Request`).
        force: replace a trace at `out`.
        argv: the command line, for the manifest.
        progress: told what is going on.
        kept: fields of `Wanted` that a client may say.

    Raises:
        PromptsError, UsageError: the input does not make sense.
        OutputExistsError: `out` is taken.
        HostError: the server cannot be reached, or was not armed.
        RecordingError: the recording failed.
    """
    from eagle_trace_serving.client import record_attached
    from eagle_trace_serving.remote import Remote

    wanted = Wanted(**kept)
    selection = wanted.selection
    known = None if host is None else find_host("server", host, program=False)
    request = None
    body = wanted.said() | {"argv": list(argv)}
    if prompts is not None:
        request = _request(prompts, selection, max_new_tokens, batch_size, temperature)
        # the prompts are chosen already
        body.pop("prompts", None)
        # nobody can guess them: without a key, a server records these and no others (`bodies.OWN_ID`)
        request = replace(request, name=f"eagle-trace-{secrets.token_hex(16)}")
    elif selection.prompts:
        raise UsageError("--only-prompts chooses lines of a prompts file: give --prompts, or --requests for others'")
    else:
        body |= {"requests": requests, "match": match, "sample": sample}
    Admission(None, requests, match, sample)  # refused here, not by the server
    if not timeout > 0:
        raise UsageError(f"--timeout must be a positive number of seconds, not {timeout:g}")
    if is_url(out):
        raise UsageError(f"--attach fetches into a local folder; for traces there, start the server with {OUT}={out}")
    remote = Remote(url, api_key, timeout, admin_api_key)
    check_output(out, force=force)
    remote.status()
    place = Path(out).resolve()
    with _hidden_beside(place) as folder:
        remote, recorded = record_attached(remote, folder, host=known, request=request, options=body, progress=progress)
        if recorded.url is None:
            ended = recorded.ended
            _require(
                ended.prompts, ended.rows, ended.stopped, f"the recording at {remote.url}", bool(selection.to_text())
            )
            # only now: an old trace is not given up for one that did not come
            prepare_output(out, force=force)
            folder.rename(place)
    if recorded.url is not None:
        return recorded.url
    try:
        remote.remove(recorded.name)
    except (HostError, RecordingError) as error:
        progress(f"the server keeps its copy: {error}")
    return out


@contextlib.contextmanager
def _hidden_beside(out: Path) -> Iterator[Path]:
    """An empty folder on the disk of `out`, which goes unless it was renamed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.parent))
        try:
            (hidden / "trace").mkdir(mode=FOLDER_MODE)
            yield hidden / "trace"
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        raise RecordingError(f"cannot write beside {out}: {reason(error)}") from error


def _request(prompts: Path, selection: Selection, max_new_tokens: int, batch_size: int, temperature: float) -> Request:
    lines = read_prompts(prompts)
    chosen = [lines[number] for number in select_prompts(len(lines), selection)]
    if not chosen:
        raise UsageError(f"--only-prompts leaves none of the {len(lines)} prompts of {prompts}")
    return Request(chosen, max_new_tokens, batch_size, temperature)


@contextlib.contextmanager
def _no_empty_folder(out: Place) -> Any:
    """Where nothing was recorded, leave no empty folder behind for the next try to stumble over."""
    try:
        yield
    except BaseException:
        remove_empty(out)
        raise


def _require_rows(place: Place) -> None:
    trace = open_trace(place)
    stopped, selected = trace.manifest.stopped or "", "selection" in trace.manifest.settings
    _require(len(trace.prompts), len(trace.rows), stopped, str(place), selected)


def _require(prompts: int, rows: int, stopped: str, place: str, selected: bool) -> None:
    """Refuse a recording that holds nothing, and say why it may."""
    if not prompts:
        why = f" ({stopped})" if stopped else ""
        raise HostError(
            f"no request came that was asked for{why}: {place} is empty; do --match and --sample leave any?"
        )
    if not rows and selected:
        raise RecordingError(f"{place} holds no rows: --roots and --only-steps left none of what was computed")
    if not rows:
        raise HostError(f"the server answered, but its draft was never run: {place} holds no rows; is speculation on?")
