"""The console of all reports: it reads no markup in what it is given, and shows what cannot be printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from eagle_trace.printable import printable


class PlainConsole(Console):
    """A console for text that comes from outside; our own styles are given as `rich.text.Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is drawn: all text passes here on its way out, that of cells and padding too."""
        if isinstance(renderable, str):
            renderable = Text(renderable)
        if isinstance(renderable, Text) and (shown := printable(renderable.plain, keep="\n")) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)
