"""Rows of one site as a host computes them, and what a recording keeps of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eagle_trace.capture import Shard
from eagle_trace.gather import row_bytes


@dataclass(frozen=True)
class Kind:
    """Rows of one site, and what is kept of them.

    Attributes:
        site: its name.
        level: of the trace.
        dtype: on-disk name.
        width: elements of a row, of this rank's part of it.
        shard: which part that is.
        wanted: whether anything is kept that is made of them.
        kept: whether they are kept themselves.
        cut: the target layers' features that are made of them.
    """

    site: str
    level: str
    dtype: str
    width: int
    shard: Shard | None
    wanted: bool
    kept: bool
    cut: tuple[tuple[str, slice], ...]

    @property
    def whole_width(self) -> int:
        """Elements of a row that all ranks have together."""
        return self.width * (self.shard.count if self.shard else 1)

    @cached_property
    def row_bytes(self) -> int:
        """What a row takes in the traces of all ranks together: all of them must stop before the same forward."""
        if self.level == "shapes" or not self.kept:
            return 0
        return row_bytes(self.dtype, self.width, self.level, self.shard) * (self.shard.count if self.shard else 1)

    @cached_property
    def cut_bytes(self) -> int:
        """What the target layers' features of a row take."""
        widths = [columns.stop - columns.start for _, columns in self.cut]
        return sum(row_bytes(self.dtype, width, self.level) for width in widths)
