"""`eagle-trace export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle_trace.printable import printable


def export(
    draft: Annotated[Path, typer.Argument(help="Draft checkpoint in speculators format; for vLLM also in SGLang's.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the engine's form to.")],
    target: Annotated[
        Path | None, typer.Option(help="Target checkpoint (needed if the draft names no layer ids).")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What is to serve the draft: sglang or vllm. Default: the one that does not load the folder as it is.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an exported draft at OUT; export also what the engine cannot compute."),
    ] = False,
) -> None:
    """Write a draft as an engine loads it: config, layer ids and ties translated."""
    from eagle_trace_analysis.checkpoint.purpose import Purpose, purpose_of_export, write_for
    from eagle_trace_analysis.engines import engine_named

    purpose = purpose_of_export(draft) if engine is None else Purpose(engine_named(engine))
    for reason in write_for(purpose.engine, draft, out, target=target, force=force):
        typer.echo(printable(f"warning: {reason}"), err=True)
    why = f" ({purpose.why})" if purpose.why else ""
    typer.echo(printable(f"Wrote {out} for {purpose.engine.ENGINE}{why}"))
