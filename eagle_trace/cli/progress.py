"""Progress of a long command, on stderr."""

from __future__ import annotations

import sys

from eagle_trace.printable import printable


class Progress:
    """Progress on stderr: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __call__(self, message: str) -> None:
        if self._quiet:
            return
        message = printable(message)
        self._shown = True
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K{message}")
        else:
            sys.stderr.write(f"{message}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the line off a terminal before something else is printed there."""
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
