"""`eagle-trace export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle_trace.printable import printable


def export(
    draft: Annotated[Path, typer.Argument(help="Draft checkpoint in speculators format.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the engine's form to.")],
    target: Annotated[
        Path | None, typer.Option(help="Target checkpoint (needed if the draft names no layer ids).")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="What is to serve the draft: sglang or vllm.")] = "sglang",
    force: Annotated[
        bool, typer.Option("--force", help="Export also what the engine cannot compute as trained.")
    ] = False,
) -> None:
    """Write a speculators draft as an engine loads it: config, layer ids and ties translated."""
    from eagle_trace_analysis.checkpoint.export import export as export_checkpoint
    from eagle_trace_analysis.engines import engine_named

    for reason in export_checkpoint(draft, out, target=target, force=force, engine=engine_named(engine)):
        typer.echo(printable(f"warning: {reason}"), err=True)
    typer.echo(printable(f"Wrote {out}"))
