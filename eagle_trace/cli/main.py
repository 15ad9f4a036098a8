"""`eagle-trace`: exit status 0 when all is well, 1 when two traces diverge, 2 when the work could not be done."""

from __future__ import annotations

import sys

import typer

from eagle_trace.cli.demo import demo
from eagle_trace.cli.diff import diff
from eagle_trace.cli.export import export
from eagle_trace.cli.record import record
from eagle_trace.errors import EagleTraceError

app = typer.Typer(
    name="eagle-trace",
    help="Record the training and the serving forward of an EAGLE-3 draft, line them up, name the first place they part.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug keeps its plain traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(record)
app.command()(diff)
app.command()(demo)
app.command()(export)


@app.callback()
def version_option(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        from eagle_trace import __version__

        typer.echo(f"eagle-trace {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; errors raised on purpose become one sentence on stderr and an exit status."""
    try:
        app()
    except EagleTraceError as error:
        typer.echo(f"eagle-trace: {error}", err=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        typer.echo("eagle-trace: interrupted; nothing was sealed", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
