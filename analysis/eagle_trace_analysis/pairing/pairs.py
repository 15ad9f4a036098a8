"""Pairs of rows, the fate of every row, and counts that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace_analysis.pairing.roles import Roles

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

#: why a row is skipped: counted, not compared, and not held against either side
SKIP_REASONS = {
    "other-branch": "the server lets the row see another branch of its draft tree, as training never does",
    "recomputed": "the same row was computed again; its first computation is compared",
    "other-tokens": "the other side fed other tokens below this root",
    "answers-part": "the two sides' answers part before this row: replay this very serve trace to pair it",
    "not-given": "the other side was given fewer tokens of this prompt and ends before this root",
    "prefix-cache": "the server took this position from its prefix cache and computed nothing for it",
    "not-materialised": "the other side never computes the site for this row",
    "position-offset": "positions differ by a constant, so rotated vectors differ and attention does not",
    "not-drafted": "the other side drafted nothing there: its rounds begin at other roots, or take fewer steps",
    "router-tipped": "it follows from a row that the target sent to other experts, by rounding",
}
#: what some of them mean between two traces of one side
_OF_ONE_SIDE = {
    "other-branch": "the row sees another branch of a draft tree, so it is no chain's",
    "answers-part": "the two answers part before this row",
    "prefix-cache": "a server took this position from its prefix cache and computed nothing for it",
}


def skipped_because(reason: str, roles: Roles) -> str:
    """Why rows were skipped, in words for these two traces."""
    return SKIP_REASONS[reason] if roles.usual else _OF_ONE_SIDE.get(reason, SKIP_REASONS[reason])


MATCHED, UNMATCHED = 0, 1
CODE_OF = {reason: code for code, reason in enumerate(SKIP_REASONS, start=2)}


@dataclass(frozen=True)
class Coverage:
    """How many rows of each side were matched, found no partner, or were skipped (by reason).

    Attributes:
        train_rows: rows of the train side.
        serve_rows: rows of the serve side.
        matched: pairs.
        unmatched_train: train rows without a partner.
        unmatched_serve: serve rows without a partner.
        skipped_train: train rows skipped, by reason (`SKIP_REASONS`).
        skipped_serve: serve rows skipped, by reason.
    """

    train_rows: int
    serve_rows: int
    matched: int
    unmatched_train: int
    unmatched_serve: int
    skipped_train: dict[str, int]
    skipped_serve: dict[str, int]

    def __post_init__(self) -> None:
        train = self.matched + self.unmatched_train + sum(self.skipped_train.values())
        serve = self.matched + self.unmatched_serve + sum(self.skipped_serve.values())
        if (train, serve) != (self.train_rows, self.serve_rows):
            raise ValueError(f"coverage does not add up: {self}")

    @classmethod
    def total(cls, parts: Iterable[Coverage]) -> Coverage:
        """The sum of several."""
        numbers: Counter[str] = Counter()
        skipped: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        names = ("train_rows", "serve_rows", "matched", "unmatched_train", "unmatched_serve")
        for part in parts:
            numbers.update({name: getattr(part, name) for name in names})
            skipped[0].update(part.skipped_train)
            skipped[1].update(part.skipped_serve)
        return cls(
            **{name: numbers[name] for name in names},
            skipped_train=dict(skipped[0]),
            skipped_serve=dict(skipped[1]),
        )

    @property
    def share(self) -> float:
        """Matched rows over the serve rows that could have been matched (skipped ones could not); 0 if there
        are none.
        """
        comparable = self.matched + self.unmatched_serve
        return self.matched / comparable if comparable else 0.0

    @property
    def per_cent(self) -> str:
        """The share as it is printed: 100 % of all rows only."""
        return f"{self.share:.0%}" if self.share == 1 else f"{min(round(100 * self.share), 99)}%"


@dataclass(frozen=True)
class Pairs:
    """Row numbers that belong together, sorted by train row, and the fate of every row.

    Row numbers count through `Trace.site_data(site)` in order (one entry, unless the site changes its shape).

    Attributes:
        train: row numbers on the train side, int64 [P].
        serve: row numbers on the serve side, int64 [P].
        train_keys: keys of all train rows.
        serve_keys: keys of all serve rows.
        train_fate: 0 matched, 1 unmatched, else a reason for skipping, int8 [train rows].
        serve_fate: the same for the serve side.
    """

    train: Int
    serve: Int
    train_keys: Rows
    serve_keys: Rows
    train_fate: NDArray[np.int8]
    serve_fate: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.train)

    @property
    def steps(self) -> list[int]:
        """Steps that either side has rows of."""
        both = np.concatenate([np.unique(self.train_keys.step), np.unique(self.serve_keys.step)])
        return [int(step) for step in np.unique(both)]

    def coverage(self, step: int | None = None) -> Coverage:
        """Coverage of one step, or of all."""
        kinds = 2 + len(SKIP_REASONS)

        def counts(fate: NDArray[np.int8], keys: Rows) -> Int:
            picked = fate if step is None else fate[keys.step == step]
            return np.bincount(picked, minlength=kinds)

        train, serve = counts(self.train_fate, self.train_keys), counts(self.serve_fate, self.serve_keys)
        return Coverage(
            train_rows=int(train.sum()),
            serve_rows=int(serve.sum()),
            matched=int(train[MATCHED]),
            unmatched_train=int(train[UNMATCHED]),
            unmatched_serve=int(serve[UNMATCHED]),
            skipped_train={name: int(train[code]) for name, code in CODE_OF.items() if train[code]},
            skipped_serve={name: int(serve[code]) for name, code in CODE_OF.items() if serve[code]},
        )

    def without(self, dropped: Bool, reason: str) -> Pairs:
        """Pairs where `dropped` [P] moved from matched to skipped."""
        if not dropped.any():
            return self
        train_fate, serve_fate = self.train_fate.copy(), self.serve_fate.copy()
        train_fate[self.train[dropped]] = serve_fate[self.serve[dropped]] = CODE_OF[reason]
        return replace(
            self,
            train=self.train[~dropped],
            serve=self.serve[~dropped],
            train_fate=train_fate,
            serve_fate=serve_fate,
        )

    def excusing(self, *, train: Bool | None, serve: Bool | None) -> Pairs:
        """Unmatched rows of a side that are marked count as skipped: the *other* side never computes them."""
        changed: dict[str, NDArray[np.int8]] = {}
        for excused, name in ((train, "train_fate"), (serve, "serve_fate")):
            if excused is not None:
                fate = getattr(self, name)
                changed[name] = np.where((fate == UNMATCHED) & excused, np.int8(CODE_OF["not-materialised"]), fate)
        return replace(self, **changed) if changed else self  # type: ignore[arg-type]
