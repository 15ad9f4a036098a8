"""`eagle-trace show`: what a trace holds."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from eagle_trace.errors import TraceDamagedError, UsageError


class ShowFormat(StrEnum):
    """How to print what a trace holds."""

    text = "text"
    json = "json"


def show(
    trace: Annotated[str, typer.Argument(help="The trace: a folder, or a URL.", show_default=False)],
    site: Annotated[
        str | None, typer.Option(help="Print one row of this site (with --root).", show_default=False)
    ] = None,
    prompt: Annotated[str, typer.Option(help="The row's prompt, by number or key.")] = "0",
    root: Annotated[int | None, typer.Option(help="The row's root.", show_default=False)] = None,
    step: Annotated[int, typer.Option(help="The row's draft step.")] = 0,
    format: Annotated[ShowFormat, typer.Option("--format", help="text, or json for programs.")] = ShowFormat.text,
    limit: Annotated[int, typer.Option(min=0, help="How many prompts and verify rounds to list.")] = 8,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file in full and compare its checksum first.")
    ] = False,
    allow_partial: Annotated[bool, typer.Option("--allow-partial", help="Read what is whole of a trace.")] = False,
) -> None:
    """Show what was recorded, by whom and how; or one row of one site."""
    from eagle_trace.reader import open_trace
    from eagle_trace_analysis.report import show as report
    from eagle_trace_analysis.report import show_text

    if (site is None) != (root is None):
        raise UsageError("one row needs both: --site fc.out --root 12 (and --prompt, --step)")
    opened = open_trace(trace, allow_partial=allow_partial)
    if verify and (altered := opened.verify()):
        raise TraceDamagedError(f"{trace} is damaged: {'; '.join(altered)}. Record it again")
    if site is not None and root is not None:
        data, render = report.row(opened, site, prompt, root, step), show_text.render_row
    else:
        data, render = report.summary(opened, prompts=limit, rounds=limit), show_text.render_summary
    text = report.to_json_text(data) if format is ShowFormat.json else render(data)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
