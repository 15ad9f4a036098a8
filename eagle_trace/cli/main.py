"""`eagle-trace`: exit status 0 when all is well, 1 when two traces diverge, 2 when the work could not be done,
3 for a bug (with its traceback), 130 after Ctrl-C, 141 when whoever read its output went away, 143 after a SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eagle_trace.cli.check import check
from eagle_trace.cli.compare import compare
from eagle_trace.cli.demo import demo
from eagle_trace.cli.diff import diff
from eagle_trace.cli.export import export
from eagle_trace.cli.options import described
from eagle_trace.cli.record import record
from eagle_trace.cli.said import say
from eagle_trace.cli.show import show
from eagle_trace.cli.tokens import tokens
from eagle_trace.errors import EagleTraceError, Terminated
from eagle_trace.printable import printable

BUG = 3  # with its traceback; 1 would mean "diverged"
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C; 1 would mean "diverged"
TERMINATED = 143
UNREAD = 141  # what shells report for a program that writes into a pipe which nobody reads any more
#: the last lines of a host that failed are quoted as lines
LINES = "\n\t"


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clearing up
    raise Terminated


class _Commands(TyperGroup):
    """Turns errors raised on purpose into one sentence and an exit status; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EagleTraceError as error:
            say(f"eagle-trace: {error}", err=True)
            ctx.exit(error.exit_status)
        except Exception as error:
            if type(error).__module__.split(".")[0] in ("click", "typer") or (
                isinstance(error, BrokenPipeError) and _is_unread()
            ):
                raise  # how the parser itself ends, and what `main` knows
            typer.echo(printable(traceback.format_exc(), keep=LINES), err=True, nl=False)
            ctx.exit(BUG)
        except KeyboardInterrupt as error:
            terminated = isinstance(error, Terminated)
            words = ["terminated" if terminated else "interrupted", *getattr(error, "__notes__", ())]
            say(f"eagle-trace: {'; '.join(words)}", err=True)
            ctx.exit(TERMINATED if terminated else INTERRUPTED)


app = typer.Typer(
    name="eagle-trace",
    cls=_Commands,
    help="Record the training and the serving forward of an EAGLE-3 draft, and name the first place they part.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (compare, record, diff, show, check, demo, export, tokens):
    app.command(help=described(_command))(_command)


def _print_version(asked: bool) -> None:
    if asked:
        from eagle_trace import __version__

        typer.echo(f"eagle-trace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Record both forwards of a draft model and name the first place where they part."""


def _is_unread() -> bool:
    """Whether standard output is a pipe that nobody reads any more (``eagle-trace ... | head``)."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # the parser and rich leave with 1 where a pipe is broken, which would mean "diverged"
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the flush at the end fails again, with a traceback
        sys.exit(UNREAD)


if __name__ == "__main__":
    main()
