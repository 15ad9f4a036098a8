"""What a trace holds of one site, and reading it in bounded memory: part by part, shards put together."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, LEVELS, Rows, Shard, Statistics
from eagle_trace.errors import TraceDamagedError
from eagle_trace.partfile import PartFile
from eagle_trace.schema import KEYS, TABLES, value_schema
from eagle_trace.tablechecks import MOST_SHARDS, VALUES, check_rows, same_type

Index = NDArray[np.int64]
#: dtype, width, whether values and whether sketches are there
_Kind = tuple[str, int, bool, bool]


@dataclass(frozen=True)
class RowGroup:
    """Where a run of rows of a site lies: in a row group of a part, from its first row on."""

    part: PartFile
    index: int
    start: int
    rows: int


@dataclass(frozen=True)
class SiteData:
    """What a trace holds of one site in one dtype and width.

    Attributes:
        site: name of the site.
        dtype: on-disk dtype name.
        width: elements of a row.
        has_values: whether exact bytes are there (level ``values``).
        groups: row groups in the order the rows were recorded (of the first shard, where there are several).
        has_sketch: whether sketches are there (level ``sketch``).
        shards: empty, or the parts that each row was cut into, in order along the last axis.
        orders: for each shard, where the rows of this site are among the shard's; None where in the same place.
    """

    site: str
    dtype: str
    width: int
    has_values: bool
    groups: tuple[RowGroup, ...]
    has_sketch: bool = False
    shards: tuple[SiteData, ...] = ()
    orders: tuple[Index | None, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.groups)


def scan(
    site: str, parts: Iterable[PartFile], lost: Callable[[str], None] | None
) -> dict[Shard | None, list[SiteData]]:
    """What some parts hold of a site, by shard: one entry a (dtype, width, level) seen.

    Args:
        site: its name.
        parts: in the order of their rows.
        lost: told of a part that cannot be read, which is then left out; None to raise.

    Raises:
        TraceDamagedError: a part cannot be read.
    """
    found: dict[Shard | None, OrderedDict[_Kind, list[RowGroup]]] = {}
    for part in parts:
        try:
            kind, shard = _facts(site, part)
        except TraceDamagedError as error:
            if lost is None:
                raise
            lost(str(error))
            continue
        groups = found.setdefault(shard, OrderedDict()).setdefault(kind, [])
        left = part.rows
        for index in range(part.metadata.num_row_groups):
            rows = min(left, part.metadata.row_group(index).num_rows)
            if rows:
                groups.append(RowGroup(part, index, groups[-1].start + groups[-1].rows if groups else 0, rows))
            left -= rows
    return {
        shard: [SiteData(site, *kind[:3], tuple(groups), kind[3]) for kind, groups in kinds.items()]
        for shard, kinds in found.items()
    }


def _facts(site: str, part: PartFile) -> tuple[_Kind, Shard | None]:
    """Dtype, width, whether values and whether sketches are there, and which shard a part holds."""
    with part.reading():
        given = part.schema.metadata or {}
        facts = {
            key.decode().removeprefix("eagle_trace."): value.decode()
            for key, value in given.items()
            if key.startswith(b"eagle_trace.")
        }
    index, slash, count = facts.get("shard", "0/1").partition("/")
    width, *numbers = (_number(one) for one in (facts.get("width", ""), index, count))
    if facts.get("dtype") not in DTYPES or facts.get("level") not in LEVELS[1:] or not slash or not width:
        raise TraceDamagedError(f"{part} does not say its dtype and width: it was not written by eagle-trace")
    if None in numbers or not numbers[0] < numbers[1] <= MOST_SHARDS:  # type: ignore[operator]
        raise TraceDamagedError(f"{part} says it holds part {facts['shard']} of its rows, which there cannot be")
    if facts.get("site") != site:
        raise TraceDamagedError(f"{part} holds rows of another site, {facts.get('site')}: it was moved")
    shard = Shard(*numbers) if "shard" in facts else None  # type: ignore[arg-type]
    expected = value_schema(site, facts["dtype"], width, facts["level"], shard)
    for field in expected:
        at = part.schema.get_field_index(field.name)
        if at < 0 or not same_type(part.schema.field(at).type, field.type):
            raise TraceDamagedError(
                f"{part} does not hold what it says: its column {field.name} is not {field.type} "
                f"({facts['dtype']}, width {width}, level {facts['level']})"
            )
    return (facts["dtype"], width, "values" in expected.names, "sketch" in expected.names), shard


def _number(text: str) -> int | None:
    """A number of a file's metadata, 0 to 2^24; None if it is something else."""
    return int(text) if re.fullmatch(r"\d{1,8}", text, re.ASCII) and int(text) <= 1 << 24 else None


def _kind_of(data: SiteData) -> _Kind:
    return data.dtype, data.width, data.has_values, data.has_sketch


def append_rows(before: list[SiteData], behind: list[SiteData]) -> list[SiteData]:
    """The rows of one group of ranks, and behind them those of another."""
    joined = {_kind_of(one): one for one in before}
    for one in behind:
        kind = _kind_of(one)
        old = joined.get(kind)
        if old is not None:
            moved = (replace(group, start=group.start + old.rows) for group in one.groups)
            one = replace(old, groups=(*old.groups, *moved))
        joined[kind] = one
    return list(joined.values())


def join_shards(data: dict[Shard, list[SiteData]], lost: Callable[[str], None] | None) -> Iterator[SiteData]:
    """Full rows from shards: one entry a (dtype, shard width, level, count) seen.

    Args:
        data: what `scan` found, by shard.
        lost: told of a shard that is missing, whose site is then left out; None to raise.

    Raises:
        TraceDamagedError: a shard is missing.
    """
    kinds: dict[tuple[int, _Kind], dict[int, SiteData]] = {}
    for shard, found in data.items():
        for one in found:
            kinds.setdefault((shard.count, _kind_of(one)), {})[shard.index] = one
    for (count, _), by_index in kinds.items():
        missing = [index for index in range(count) if index not in by_index]
        if missing:
            site = next(iter(by_index.values())).site
            text = f"site {site} lacks part {missing[0]} of {count}"
            if lost is None:
                raise TraceDamagedError(f"{text}: record the trace again")
            lost(text)
            continue
        try:
            yield _joined([by_index[index] for index in range(count)])
        except TraceDamagedError as error:
            if lost is None:
                raise
            lost(str(error))


def _joined(shards: list[SiteData]) -> SiteData:
    """Ranks record the same rows in the same order, as a rule: only where they did not, rows are looked up."""
    width = sum(shard.width for shard in shards)
    whole = replace(shards[0], width=width, shards=tuple(shards), orders=(None,) * len(shards))
    keys = [read_keys(shard) for shard in shards]
    orders = match_rows(keys)
    if orders is not None:
        keys = [one.take(order) for one, order in zip(keys, orders, strict=True)]
    for number, other in enumerate(keys[1:], start=1):
        if not all(np.array_equal(getattr(keys[0], name), getattr(other, name)) for name in ("token_id", "position")):
            raise TraceDamagedError(
                f"parts 0 and {number} of site {whole.site} were fed other tokens or positions: "
                "they are not of one recording"
            )
    if orders is None:
        return whole
    groups: list[RowGroup] = []
    for group in shards[0].groups:
        rows = int(((orders[0] >= group.start) & (orders[0] < group.start + group.rows)).sum())
        if rows:
            groups.append(replace(group, start=groups[-1].start + groups[-1].rows if groups else 0, rows=rows))
    return replace(whole, groups=tuple(groups), orders=tuple(orders))


def match_rows(keys: Sequence[Rows]) -> list[Index] | None:
    """Where the rows that all of `keys` have are in each, in the order of the first; None if all are alike."""
    first, *others = keys
    names = ("prompt_id", "root", "step", "path")
    if all(np.array_equal(getattr(first, name), getattr(other, name)) for other in others for name in names):
        return None
    places = [_places(one) for one in keys]
    common = [key for key in places[0] if all(key in other for other in places[1:])]
    return [np.array([place[key] for key in common], dtype=np.int64) for place in places]


def _places(rows: Rows) -> dict[tuple[int, ...], int]:
    """Where each row is, by its key and its number among the rows of that key."""
    seen: dict[tuple[int, ...], int] = {}
    found: dict[tuple[int, ...], int] = {}
    columns = (rows.prompt_id.tolist(), rows.root.tolist(), rows.step.tolist(), rows.path.tolist())
    for at, (prompt, root, step, path) in enumerate(zip(*columns, strict=True)):
        key = (prompt, root, step, *path[:step])
        seen[key] = seen.get(key, -1) + 1
        found[*key, seen[key]] = at
    return found


def read_columns(data: SiteData, columns: list[str]) -> pa.Table:
    """Columns other than the values of all rows of `data`, whose shards are left alone."""
    tables = []
    for part, groups in groupby(data.groups, key=lambda group: group.part):
        listed = list(groups)
        rows = sum(group.rows for group in listed)
        # of a part that has grown since, only the first rows belong to the trace
        table = part.read([group.index for group in listed], columns).slice(0, rows)
        with part.reading():
            if len(table) != rows:
                raise ValueError(f"it has {len(table)} rows, not {rows}")
            check_rows("values", table, VALUES)
        tables.append(table)
    return pa.concat_tables(tables)


def read_keys(data: SiteData) -> Rows:
    """Keys of all rows of `data`."""
    rows = to_rows(read_columns(data.shards[0] if data.shards else data, [name for name, _ in KEYS]))
    return rows if not data.orders or data.orders[0] is None else rows.take(data.orders[0])


def read_statistics(data: SiteData) -> Statistics:
    """Statistics of all rows of `data`."""
    if not data.shards:
        names = ["norm", "absmax", "mean", "nonfinite"]
        table = read_columns(data, names)
        return Statistics(*(table.column(name).to_numpy() for name in names))
    parts = []
    for shard, order in zip(data.shards, data.orders, strict=True):
        found = read_statistics(shard)
        parts.append((found.norm, found.absmax, found.mean * shard.width, found.nonfinite))
        if order is not None:
            parts[-1] = tuple(column[order] for column in parts[-1])  # type: ignore[assignment]
    norm, absmax, total, nonfinite = (np.stack(columns) for columns in zip(*parts, strict=True))
    return Statistics(
        np.sqrt((norm**2).sum(axis=0)),
        absmax.max(axis=0),
        total.sum(axis=0) / data.width,
        nonfinite.sum(axis=0, dtype=np.int32),
    )


def to_rows(table: pa.Table) -> Rows:
    """The key columns of a table."""
    columns = {name: table.column(name).to_numpy() for name, _ in KEYS if name != "path"}
    return Rows(path=padded_paths(table.column("path")), **columns)


def padded_paths(column: pa.ChunkedArray) -> NDArray[np.int32]:
    """A ``path`` column as int32 [rows, longest path], padded with -1."""
    path = column.combine_chunks()
    if isinstance(path, pa.ChunkedArray):
        path = path.chunk(0) if path.num_chunks else pa.array([], type=TABLES["rows"].field("path").type)
    lengths = np.diff(path.offsets.to_numpy())
    width = int(lengths.max(initial=0))
    padded = np.full((len(path), width), -1, dtype=np.int32)
    padded[np.arange(width)[None, :] < lengths[:, None]] = path.flatten().to_numpy()
    return padded
