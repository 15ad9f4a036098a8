"""One forward of a draft on its way into a trace: opened before it runs, given what its sites show, handed over whole.

All recorders go this way. The host's thread copies rows where they are (`stage`); what is made of them (target layers'
features, best ids, target ids, the choice of rows) is made by the thread that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace import tensors
from eagle_trace.capture import Array, Rows, Shard
from eagle_trace.recording.best import best_ids, best_on_device
from eagle_trace.recording.kinds import Kind
from eagle_trace.recording.stage import TRANSFER_BYTES, Held, Stage
from eagle_trace.selection import Selection
from eagle_trace.sites import fused_slices
from eagle_trace.sketch import Reduced, reduce_on_device, reduced_of
from eagle_trace.streams import Part
from eagle_trace.writer import ROW_BYTES, TraceWriter

Index = NDArray[np.intp]
#: keys of the rows of a forward that are data, and their index into all its rows
Keys = Callable[[], tuple[Rows, Index]]
#: columns of `schema.TRAINING` [rows] of rows and their index
Training = Callable[[Rows, Index], Mapping[str, Array]]

TOPK = 10
#: made of the logits
BEST_SITES = ("topk.draft_id", "topk.target_id")


@dataclass
class _Taken:
    """What was copied of one site."""

    held: Held
    kind: Kind
    #: they are the rows `picked`, not the forward's own choice
    picked: bool
    #: rows of `held` that they are, where they were reduced on their device, together with others
    reduced: slice | None = None


@dataclass
class Forwards:
    """Opens the forwards of one recording, one after the other.

    Attributes:
        writer: takes them.
        selection: which sites and rows to keep.
        target_width: width of one target layer's features.
        target_ids: target id of each draft id (d2t, applied) [draft vocabulary]; None where they are the same.
        shard_of: which part of a site's last axis this rank computes; None where it computes all of it.
        in_full: bring all rows of all sites over as they are, whatever the trace keeps of them.
        stage: brings over what is kept.
        calls: forwards handed over so far.
        rows: rows of them, as far as that is known.
    """

    writer: TraceWriter
    selection: Selection
    target_width: int
    target_ids: Array | None = None
    shard_of: Callable[[str], Shard | None] = lambda _site: None
    in_full: bool = False
    stage: Stage = field(default_factory=Stage)
    calls: int = 0
    rows: int = 0
    _kinds: dict[tuple[str, int, str], Kind] = field(default_factory=dict)

    def open(
        self,
        tokens: int,
        keys: Keys,
        *,
        candidates: Index | None = None,
        picked: Callable[[], Index] | None = None,
        call: int | None = None,
    ) -> Forward:
        """A forward of `tokens` rows begins.

        Args:
            tokens: rows of the forward, T.
            keys: says which rows are data, as soon as what was kept so far is known.
            candidates: rows that may be data, ascending; None for all. Only where the keys are not known at once.
            picked: rows of the forward of which there are logits, where that is not all of them.
            call: its number; None for that of the next to be handed over.
        """
        return Forward(self, self.calls if call is None else call, tokens, keys, candidates, picked)

    def send(self, call: int | None = None, size: int = 0, kept: int = 0, *, settle: bool = False) -> None:
        """Hand over what was kept since the last time.

        Args:
            settle: wait for the device first: for another thread than the host's.
            call: the forward it belongs to, if to one.
            size: bytes it takes beside what was kept.
            kept: bytes of it that count for the budget.
        """
        load = self.stage.send(settle=settle)
        if not load.empty:
            self.writer.put_late(load.parts, load.nbytes + size, call=call, kept=kept)

    def kind_of(self, site: str, width: int, dtype: str) -> Kind:
        """What becomes of rows of a site, which a host always computes alike."""
        key = site, width, dtype
        if key not in self._kinds:
            wants, shard = self.selection.wants, self.shard_of(site)
            cut = fused_slices(width, self.target_width) if site == "fused" else []
            cut = [(name, columns) for name, columns in cut if wants(name)]
            wanted = self.in_full or wants(site) or bool(cut) or (site == "logits" and self.keeps_best)
            self._kinds[key] = Kind(site, self.level, dtype, width, shard, wanted, wants(site), tuple(cut))
        return self._kinds[key]

    @property
    def level(self) -> str:
        """How much is kept of each row."""
        return self.writer.manifest.level

    @property
    def leads(self) -> bool:
        """Whether this rank writes what all ranks of its group know."""
        return not self.writer.manifest.tp_rank

    @property
    def keeps_best(self) -> bool:
        """Whether the best ids of rows (topk.parquet) are kept."""
        return any(map(self.selection.wants, BEST_SITES))

    def best(self, rows: Rows, found: tuple[Array, Array, Array]) -> Part:
        """Best ids of rows, their logits and log-probabilities [T, K]: here a draft id becomes a target id."""
        draft_ids, logits, logprobs = found
        target_ids = draft_ids if self.target_ids is None else self.target_ids[draft_ids]
        return "topk", (rows, draft_ids, target_ids, logits, logprobs)


def offsets_to_ids(d2t: Array) -> Array:
    """Target id of each draft id, from the offsets that a checkpoint stores [draft vocabulary]."""
    return np.arange(len(d2t)) + d2t


class Forward:
    """One forward; see `Forwards.open`.

    Attributes:
        call: its number.
        tokens: rows of it, T.
        picked: rows of the forward that a tensor of fewer rows holds.
    """

    def __init__(
        self,
        forwards: Forwards,
        call: int,
        tokens: int,
        keys: Keys,
        candidates: Index | None,
        picked: Callable[[], Index] | None,
    ) -> None:
        self._all = forwards
        self._stage = forwards.stage
        self._level = forwards.level
        self.call = call
        self.tokens = tokens
        self._keys, self.picked = keys, picked
        self._rows: Rows | None = None
        self._index: Index | None = None
        self._shapes: dict[str, tuple[list[int], str]] = {}
        self._taken: dict[str, _Taken] = {}
        self._best: tuple[Held, Held, Held] | None = None
        self._best_picked = False
        self._more: list[Callable[[], Part | None]] = []
        #: rows to be reduced on their device, by width, dtype and part
        self._unreduced: dict[tuple[int, str, Shard | None], list[tuple[Kind, bool, Any]]] = {}
        self._unreduced_bytes = 0
        self._kept = 0
        #: rows that are kept, as soon as that is known
        self._known: int | None = None
        self._on_device: Any = None
        self._stage.then(self._place)
        # rows to copy of a tensor that has all of them; None where all are
        self._late = self._rows is None
        self._choice = candidates if self._late else self._index
        if self._choice is not None and len(self._choice) == tokens:
            self._choice = None

    def _place(self) -> None:
        self._rows, self._index = self._keys()
        if self._all.selection.all_rows:
            self._known = len(self._rows)
        else:
            self._known = int(self._all.selection.mask(self._rows).sum())
            if not self._all.in_full:
                self._select()

    def _select(self) -> None:
        """Keep only the rows that the selection does."""
        if not self._all.selection.all_rows:
            rows, index = self.keys
            kept = np.flatnonzero(self._all.selection.mask(rows))
            self._rows, self._index = rows.take(kept), index[kept]

    # ---- what the sites show ----------------------------------------------------------------------------------

    def take(self, site: str, tensor: Any) -> None:
        """Keep the rows of a site: the host's own tensor [..., W] with T rows, or with those of `picked`."""
        rows = tensor if len(tensor.shape) == 2 else tensor.reshape(-1, tensor.shape[-1])
        count, width = rows.shape
        kind = self._all.kind_of(site, width, tensors.dtype_of(tensor))
        self._shapes[site] = ([count, kind.whole_width], kind.dtype)
        if not kind.wanted or (self._level == "shapes" and not self._all.in_full):
            return
        picked = count != self.tokens
        if self._level == "values" or self._all.in_full or tensors.accelerator_of(tensor) is None:
            if picked or self._choice is None:
                held = self._stage.keep(rows)
            else:
                held = self._stage.keep_rows(rows, self._choice, lambda: self._beside(tensor))
            self._taken[site] = _Taken(held, kind, picked)
            rows_held = count if picked or self._choice is None else len(self._choice)
            self._count(kind.row_bytes + kind.cut_bytes, rows_held, picked)
            return
        fresh = not picked and self._choice is not None
        if fresh:
            rows = rows.index_select(0, self._beside(tensor))
        for name, columns in kind.cut:
            self._reduce(
                self._all.kind_of(name, columns.stop - columns.start, kind.dtype), rows[:, columns], picked, fresh=False
            )
        if site == "logits" and self._all.keeps_best and self._all.leads:
            ids, scores, logprobs = (self._stage.keep(one, fresh=True) for one in best_on_device(rows, TOPK))
            self._best, self._best_picked = (ids, scores, logprobs), picked
        if kind.kept:
            self._reduce(kind, rows, picked, fresh=fresh)

    def take_features(self, tensor: Any) -> None:
        """Keep the features that the draft was given, [..., n * G]: side by side, and those of each target layer."""
        width, dtype = tensor.shape[-1], tensors.dtype_of(tensor)
        for name, columns in fused_slices(width, self._all.target_width):
            self._shapes[name] = ([self.tokens, columns.stop - columns.start], dtype)
        self.take("fused", tensor)

    def take_more_best(self, rows: Rows, logits: Any, count: int) -> None:
        """Keep the `count` best ids of further rows, of which nothing else is kept: their logits [T, V]."""
        if not self._all.keeps_best or self._level == "shapes":
            return
        held = self._stage.keep(logits)

        def made() -> Part | None:
            kept = np.flatnonzero(self._all.selection.mask(rows))
            return self._all.best(rows.take(kept), best_ids(held.array[kept], count)) if len(kept) else None

        self._more.append(made)

    def expect(self, site: str, tensor: Any, refuse: Callable[[], Exception]) -> None:
        """Raise what `refuse` gives if the ids [T] of an integer site are not those of the rows.

        As soon as they are known: now, or in the thread that writes.
        """
        flat, choice = tensor.reshape(-1), self._choice
        keep = self._stage
        held = keep.keep(flat) if choice is None else keep.keep_rows(flat, choice, lambda: self._beside(tensor))

        def check() -> None:
            rows, where = self._where(picked=False)
            if not np.array_equal(held.array[where], rows.token_id if site == "token" else rows.position):
                raise refuse()

        self._stage.then(check)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Every site whose rows were kept as they are, in the order of the forward; once they have arrived."""
        for site, taken in self._taken.items():
            if site == "fused":
                for name, columns in fused_slices(taken.kind.width, self._all.target_width):
                    yield name, np.ascontiguousarray(taken.held.array[:, columns])
            yield site, taken.held.array

    def _beside(self, tensor: Any) -> Any:
        if self._on_device is None:
            self._on_device = tensors.beside(np.asarray(self._choice, dtype=np.int64), tensor)
        return self._on_device

    def _reduce(self, kind: Kind, rows: Any, picked: bool, *, fresh: bool) -> None:
        """Take rows to be reduced on their device, together with those of other sites of their shape."""
        # copied, since the host may write over them before that
        mine = rows if fresh else rows.new_empty(rows.shape).copy_(rows)
        self._unreduced.setdefault((kind.width, kind.dtype, kind.shard), []).append((kind, picked, mine))
        self._unreduced_bytes += mine.numel() * mine.element_size()
        self._count(kind.row_bytes, len(rows), picked)
        if self._unreduced_bytes >= TRANSFER_BYTES:
            self._reduce_all()

    def _reduce_all(self) -> None:
        """Reduce what was taken: each operator is called once per shape, not once per site."""
        waiting, self._unreduced, self._unreduced_bytes = self._unreduced, {}, 0
        for (_, _, shard), taken in waiting.items():
            rows = [mine for _, _, mine in taken]
            together = rows[0] if len(rows) == 1 else tensors.library_of(rows[0]).cat(rows)
            table = reduce_on_device(together, sketched=self._level == "sketch", shard=shard)
            held, start = self._stage.keep(table, fresh=True), 0
            for kind, picked, mine in taken:
                self._taken[kind.site] = _Taken(held, kind, picked, slice(start, start + len(mine)))
                start += len(mine)

    def _count(self, row_bytes: int, rows: int, picked: bool) -> None:
        if self._index is not None and self._known is not None:
            rows = int(np.isin(self.picked(), self._index).sum()) if picked and self.picked else self._known
        self._kept += rows * row_bytes

    # ---- handing over -----------------------------------------------------------------------------------------

    def close(
        self,
        mode: str,
        batch_size: int | Callable[[], int],
        training: Training | None = None,
        *,
        settle: bool = False,
    ) -> None:
        """The forward is over: its rows go to the writer, all of them or none.

        Args:
            mode: of the host.
            batch_size: sequences of the forward, or what says how many once the rows are known.
            training: columns of `schema.TRAINING` [rows], once the rows are known.
            settle: see `Forwards.send`.
        """
        self._reduce_all()
        known = self.tokens if self._choice is None else len(self._choice)
        known = known if self._known is None else self._known
        self._stage.later(lambda: self._parts(mode, batch_size() if callable(batch_size) else batch_size, training))
        self._all.rows += 0 if self._late else known
        self._all.calls += 1
        self._all.send(self.call, size=ROW_BYTES * known + 256, kept=ROW_BYTES * known + self._kept, settle=settle)

    @property
    def keys(self) -> tuple[Rows, Index]:
        """The rows that are kept, and their index into all; once that is known."""
        if self._rows is None or self._index is None:
            raise RuntimeError("the rows of a forward are asked for before they are known")
        return self._rows, self._index

    def _where(self, *, picked: bool) -> tuple[Rows, Any]:
        """Rows that are kept of a tensor that was copied, and where in it they are."""
        rows, index = self.keys
        if picked and self.picked is not None:
            # a prefill has logits for the last row of each request only
            position = {int(row): number for number, row in enumerate(index)}
            pairs = [(position[int(row)], b) for b, row in enumerate(self.picked()) if int(row) in position]
            return rows.take(np.array([row for row, _ in pairs], dtype=np.intp)), [b for _, b in pairs]
        if index is self._choice or len(index) == (self.tokens if self._choice is None else len(self._choice)):
            return rows, slice(None)
        return rows, index if self._choice is None else np.searchsorted(self._choice, index)

    def _parts(self, mode: str, batch_size: int, training: Training | None) -> list[Part]:
        if self._all.in_full:
            self._select()
        rows, index = self.keys
        self._all.rows += len(rows) if self._late else 0
        parts: list[Part] = [("rows", (rows, {} if training is None else training(rows, index)))]
        if self._level != "shapes" and len(rows):
            places = {picked: self._where(picked=picked) for picked in {one.picked for one in self._taken.values()}}
            for site, taken in self._taken.items():
                parts += self._parts_of(site, taken, *places[taken.picked])
            if self._best is not None:
                at, where = self._where(picked=self._best_picked)
                draft_ids, logits, logprobs = (one.array[where] for one in self._best)
                parts.append(self._all.best(at, (draft_ids, logits, logprobs)))
        parts += [part for made in self._more if (part := made()) is not None]
        shapes = [{"site": site, "shape": shape, "dtype": dtype} for site, (shape, dtype) in self._shapes.items()]
        call = {"call_id": self.call, "role": "draft", "mode": mode, "batch_size": batch_size}
        return [*parts, ("record", ("calls", call | {"tokens": self.tokens, "shapes": shapes}))]

    def _parts_of(self, site: str, taken: _Taken, at: Rows, where: Any) -> Iterator[Part]:
        kind, array = taken.kind, taken.held.array
        if taken.reduced is not None:
            array = array[taken.reduced]
        array = array[where]
        values: Array | Reduced = array
        if taken.reduced is not None:
            values = reduced_of(array, kind.dtype, kind.width, sketched=self._level == "sketch")
        else:
            for name, columns in kind.cut:
                yield "values", (name, at, np.ascontiguousarray(array[:, columns]), None)
        if kind.kept:
            yield "values", (site, at, values, kind.shard)
        # logits are gathered, so the best ids are the same on every rank
        if site == "logits" and taken.reduced is None and self._all.keeps_best and self._all.leads:
            yield self._all.best(at, best_ids(array, TOPK))
