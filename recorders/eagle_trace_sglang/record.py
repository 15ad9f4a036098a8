"""`eagle-trace record --mode serve`: start SGLang, send it the prompts, keep what its draft computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from eagle_trace.errors import HostError
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import open_trace
from eagle_trace.store import Place
from eagle_trace.writer import check_output, prepare_output, remove_empty
from eagle_trace_sglang.server import Request, Server, ServerOptions


def record(
    *,
    target: Path,
    draft: Path,
    prompts: Path,
    out: Place,
    steps: int = 3,
    topk: int = 1,
    draft_tokens: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_new_tokens: int = 48,
    batch_size: int = 8,
    level: str = "values",
    max_bytes: int | None = None,
    force: bool = False,
    sglang_args: Sequence[str] = (),
    argv: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Place:
    """Record the serving forward and return the sealed trace's folder.

    Args:
        target: target checkpoint, Hugging Face format.
        draft: draft checkpoint as SGLang loads it.
        prompts: prompts file.
        out: folder of the trace, or its URL.
        steps: draft steps a round.
        topk: branches of the draft tree; 1 is a chain.
        draft_tokens: tokens verified at once; by default steps + 1 for a chain, 8 for a tree.
        dtype: `auto` (the checkpoint's), `float32`, `float16` or `bfloat16`.
        device: `auto`, `cpu` or `cuda`.
        max_new_tokens: tokens to answer to each prompt.
        batch_size: prompts sent at once.
        level: how much to keep of each row.
        max_bytes: stop recording, not the server, after so many bytes.
        force: replace a trace at `out`.
        sglang_args: SGLang's own arguments; they win over ours.
        argv: the command line, for the manifest.
        progress: told what is going on.

    Raises:
        CheckpointError, PromptsError, UsageError: the input does not make sense.
        OutputExistsError: `out` is taken.
        HostError: SGLang did not start, or died.
        RecordingError: the recording failed.
    """
    options = ServerOptions(target, draft, steps, topk, draft_tokens, dtype, device, tuple(sglang_args))
    request = Request(read_prompts(prompts), max_new_tokens, batch_size)
    options.check()
    check_output(out, force=force)
    try:
        with Server(options, progress) as server:
            # only now: an old trace is not given up for a server that never starts
            prepare_output(out, force=force)
            server.record(request, out, level=level, max_bytes=max_bytes, argv=argv)
    except BaseException:
        remove_empty(out)
        raise
    if not len(open_trace(out).rows):
        raise HostError(f"SGLang answered, but its draft was never run: {out} holds no rows; is speculation on?")
    return out
