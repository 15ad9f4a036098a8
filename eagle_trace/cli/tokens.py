"""`eagle-trace tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle_trace.printable import printable


def tokens(
    target: Annotated[Path, typer.Option(help="Target checkpoint, with the tokenizer that training uses.")],
    prompts: Annotated[Path, typer.Option(help="Prompts file: JSON lines with prompt or messages.")],
    url: Annotated[str, typer.Option(metavar="URL", help="A server that answers, SGLang or vLLM.")],
    api_key: Annotated[
        str | None, typer.Option(envvar="EAGLE_TRACE_API_KEY", show_default=False, help="The server's API key.")
    ] = None,
) -> None:
    """Compare what a server makes of prompts with what training's tokenizer makes of them; no draft is needed.

    Exit status 0: all are equal, 1: some are not, 2: not compared.
    """
    from eagle_trace.jobs.tokens import compare_tokens

    count = unequal = 0
    for one in compare_tokens(target, prompts, url, api_key):
        count += 1
        if one.at is None:
            continue
        unequal += 1
        where = f"prompt {one.key!r}, token {one.at} ({one.training} in training, {one.serving} in serving)"
        typer.echo(printable(f"differs: {where}{f': {one.why}' if one.why else ''}"))
    if unequal:
        typer.echo(f"tokens: {unequal} of {count} prompts differ: use one chat template and one BOS rule on both sides")
        raise typer.Exit(1)
    typer.echo(f"tokens: all {count} prompts have the same tokens in training and in serving")
