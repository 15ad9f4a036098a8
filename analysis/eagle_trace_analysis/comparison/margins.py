"""What the routers of a train trace's target came near to: the rows of routing.parquet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import erfc
from typing import Any

from eagle_trace.reader import Trace

#: a row of the features: prompt_id of training, root
Row = tuple[int, int]

#: gaps up to this many times their noise may tip
TIPS = 4.0


@dataclass(frozen=True)
class Margins:
    """What the routers of a train trace's target came near to.

    Attributes:
        cuts: of each row its cuts that are narrow, and its narrowest: (layer, gap / noise).
        unread: layers that choose experts in a way the recorder does not read.
        layer_ids: of the features, in their order: i is the input of decoder layer i.
    """

    cuts: Mapping[Row, Sequence[tuple[int, float]]]
    unread: tuple[int, ...]
    layer_ids: tuple[int, ...]

    @classmethod
    def read(cls, train: Trace) -> Margins | None:
        """Those of a trace; None if it measured none, or has no layer with experts below its features."""
        said, ids = train.manifest.settings.get("routers"), _numbers(train.manifest.draft.get("layer_ids"))
        unread = _numbers(said.get("unread")) if isinstance(said, Mapping) else ()
        if not isinstance(said, Mapping) or not ids or not (said.get("read") or unread):
            return None
        table = train.table("routing")
        prompt, root, layer, gap, noise = (
            table.column(name).to_pylist() for name in ("prompt_id", "root", "layer", "gap", "noise")
        )
        cuts: dict[Row, list[tuple[int, float]]] = {}
        for p, r, n, g, s in zip(prompt, root, layer, gap, noise, strict=True):
            cuts.setdefault((p, r), []).append((n, g / s if s > 0 else float("inf")))
        return cls(cuts, unread, ids)

    def tipping(self, row: Row, since: int, below: int) -> int | None:
        """The lowest layer from `since` on and below `below` at which a row may have tipped."""
        return min((n for n, ratio in self.cuts.get(row, ()) if since <= n < below and ratio <= TIPS), default=None)

    def narrowest(self, row: Row, since: int, below: int) -> tuple[int, float] | None:
        """The narrowest cut of a row that was kept of these layers: its layer, and gap / noise."""
        mine = (one for one in self.cuts.get(row, ()) if since <= one[0] < below)
        return min(mine, key=lambda one: one[1], default=None)

    def expected(self, rows: Iterable[Row], below: int) -> float:
        """How many of `rows` rounding tips below a layer, two implementations rounding alike."""
        return sum(0.5 * erfc(ratio / 2) for row in rows for n, ratio in self.cuts.get(row, ()) if n < below)


def _numbers(value: Any) -> tuple[int, ...]:
    """A list of a manifest that should hold whole numbers; none if it is something else."""
    found = tuple(value) if isinstance(value, list) else ()
    return found if all(isinstance(one, int) for one in found) else ()
