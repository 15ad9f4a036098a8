"""`eagle-trace check`."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from eagle_trace_analysis.checkpoint.finding import CheckResult


class CheckFormat(StrEnum):
    """How to print the result."""

    text = "text"
    json = "json"
    junit = "junit"
    sarif = "sarif"


def check(
    draft: Annotated[
        str,
        typer.Argument(help="Draft checkpoint as it was trained or as it is served: a folder, or hf://owner/name."),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Target checkpoint: layers, width and vocabulary are compared with it."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Another checkpoint of this draft: the one before a fix, or what it was trained as (the speculators "
            "folder, SpecForge's draft_config.json or run-stepN folder).",
        ),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(metavar="NAME[==RELEASE]", help="Who trained it, such as specforge==0.2.0; told by the folder."),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|KEY=VALUE",
            help="What the training was run with: a YAML file, or data.max_length=4096. Repeat.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="text: only what failed or warned, and the counts.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What is to serve the draft: sglang or vllm. Default: what loads the folder as it is.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        CheckFormat,
        typer.Option("--format", metavar="FORMAT", help="text, json for programs, junit or sarif for a build."),
    ] = CheckFormat.text,
) -> None:
    """Check a draft without running it. Exit status 0: nothing failed, 1: something did, 2: not checked."""
    from eagle_trace.terminal import PlainConsole
    from eagle_trace_analysis.checkpoint.check import check as check_checkpoint
    from eagle_trace_analysis.checkpoint.purpose import Purpose, purpose_of
    from eagle_trace_analysis.checkpoint.recipe import read_recipe
    from eagle_trace_analysis.checkpoint.remote import folder_of
    from eagle_trace_analysis.engines import engine_named
    from eagle_trace_analysis.report.check import render_brief, render_text

    place = folder_of(draft)
    purpose = purpose_of(place) if engine is None else Purpose(engine_named(engine))
    result = check_checkpoint(
        place,
        target=target,
        reference=reference,
        engine=purpose.engine,
        trainer=trainer,
        recipe=read_recipe(recipe or ()),
    )
    if purpose.why:
        result = replace(result, why=f"{purpose.why}; for another give {purpose.others}")
    if format is not CheckFormat.text:
        typer.echo(render_check_as(result, format), nl=False)
    else:
        (render_brief if quiet else render_text)(result, PlainConsole())
    if result.exit_status:
        raise typer.Exit(result.exit_status)


def render_check_as(result: CheckResult, format: CheckFormat) -> str:
    """A check in one of the formats for programs."""
    if format is CheckFormat.json:
        from eagle_trace_analysis.report.check import render_json

        return render_json(result) + "\n"
    from eagle_trace_analysis.report.cases import cases_of_check
    from eagle_trace_analysis.report.junit import to_junit
    from eagle_trace_analysis.report.sarif import to_sarif

    suite = cases_of_check(result)
    return to_junit(suite) if format is CheckFormat.junit else to_sarif(suite, exit_status=result.exit_status)
