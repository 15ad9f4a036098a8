"""Reading a trace: lazily, one site at a time, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, Array, Rows, Statistics, to_float32
from eagle_trace.errors import TraceDamagedError, TraceError, TraceNotFoundError, TraceUnsealedError
from eagle_trace.manifest import OPEN_SEAL, SEAL, Manifest
from eagle_trace.schema import KEYS, TABLES
from eagle_trace.sites import draft_sites

CACHE_BYTES = 256 << 20
OPEN_FILES = 8


@dataclass(frozen=True)
class RowGroup:
    """Where a run of rows of a site lies: a row group of a part file."""

    path: Path
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
        groups: row groups in the order the rows were recorded.
    """

    site: str
    dtype: str
    width: int
    has_values: bool
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(group.rows for group in self.groups)


class Trace:
    """A recorded trace. Opening reads the manifest only; every table and site is read when asked for.

    Attributes:
        path: the trace's folder.
        manifest: what made it.
        missing: files that the manifest names and that cannot be read (only with `allow_partial`).
    """

    def __init__(self, path: Path, manifest: Manifest, *, sealed: bool, missing: list[str]) -> None:
        self.path = path
        self.manifest = manifest
        self.sealed = sealed
        self.missing = missing

    def __repr__(self) -> str:
        state = "" if self.sealed else ", unsealed"
        return f"Trace({str(self.path)!r}, {self.side}, {len(self.sites)} sites, level {self.level}{state})"

    def _repr_html_(self) -> str:
        from eagle_trace.display import trace_html

        return trace_html(self)

    @property
    def side(self) -> str:
        """``train`` or ``serve``."""
        return self.manifest.side

    @property
    def level(self) -> str:
        """``shapes``, ``stats``, ``sketch`` or ``values``."""
        return self.manifest.level

    # ---- tables -----------------------------------------------------------------------------------------------

    def table(self, name: str) -> pa.Table:
        """One of the tables beside values/ as Arrow; empty if the trace has none of it."""
        path = self.path / f"{name}.parquet"
        if not path.exists():
            return TABLES[name].empty_table()
        try:
            return pq.read_table(path, schema=TABLES[name], use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(path, error) from error

    @cached_property
    def prompts(self) -> pd.DataFrame:
        """Prompts: prompt_id, prompt_key, request_id, token_ids, num_prompt_tokens, text, output_ids."""
        return _frame(self.table("prompts"))

    @cached_property
    def calls(self) -> pd.DataFrame:
        """Forwards: call_id, role, mode, batch_size, tokens and the shapes and dtypes seen at every site."""
        return _frame(self.table("calls"))

    @cached_property
    def params(self) -> pd.DataFrame:
        """Parameters as the host loaded them: names, shape, dtype, digest, norm, found in the checkpoint or not."""
        return _frame(self.table("params"))

    @cached_property
    def topk(self) -> pd.DataFrame:
        """Best draft ids of each row with their target ids, logits and log-probabilities."""
        return _frame(self.table("topk"))

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Verify rounds (serve side): tokens proposed and accepted, the target's own choice."""
        return _frame(self.table("rounds"))

    @cached_property
    def floors(self) -> pd.DataFrame:
        """Rounding floor of each site and step, measured by the train side."""
        return _frame(self.table("floors"))

    @cached_property
    def rows(self) -> Rows:
        """Keys of every draft row, with token and position."""
        return _to_rows(self.table("rows"))

    # ---- sites ------------------------------------------------------------------------------------------------

    @cached_property
    def shapes(self) -> dict[str, set[tuple[int, str]]]:
        """Width and dtype of every site seen by the host, also where no rows were kept: {site: {(width, dtype)}}."""
        seen: dict[str, set[tuple[int, str]]] = {}
        for shapes in self.table("calls").filter(pa.compute.field("role") == "draft").column("shapes").to_pylist():
            for entry in shapes or []:
                seen.setdefault(entry["site"], set()).add((entry["shape"][-1], entry["dtype"]))
        return seen

    @cached_property
    def _site_data(self) -> dict[str, list[SiteData]]:
        found: dict[str, list[SiteData]] = {}
        # absolute, because whoever reads the parts may run in another folder
        for folder in sorted((self.path.absolute() / "values").glob("site=*")):
            site = folder.name.removeprefix("site=")
            found[site] = _scan_site(
                site, sorted(folder.glob("*.parquet")), partial=not self.sealed, missing=self.missing
            )
        return {site: data for site, data in found.items() if data}

    @property
    def sites(self) -> list[str]:
        """Names of the sites with rows, in forward order (every site seen, at level ``shapes``)."""
        names = set(self._site_data) or set(self.shapes)
        order = {site.name: index for index, site in enumerate(draft_sites(64, 8))}
        return sorted(names, key=lambda name: (order.get(name, len(order)), name))

    def site_data(self, site: str) -> list[SiteData]:
        """What the trace holds of a site: one entry a (dtype, width) seen, [] if it has no rows of it."""
        return self._site_data.get(site, [])

    def _one(self, site: str) -> SiteData:
        data = self.site_data(site)
        if not data:
            raise TraceError(f"{self.path} has no rows of site {site!r}; it has {', '.join(self.sites) or 'none'}")
        if len(data) > 1:
            kinds = ", ".join(f"[{d.width}] {d.dtype}" for d in data)
            raise TraceError(f"site {site!r} of {self.path} changes its shape ({kinds}): read it with site_data()")
        return data[0]

    def keys(self, site: str) -> Rows:
        """Keys of a site's rows, in the order of `values` (raises TraceError if the site changes its shape)."""
        return read_keys(self._one(site))

    def statistics(self, site: str) -> Statistics:
        """Norm, absmax, mean and count of non-finite elements of each row of a site."""
        return read_statistics(self._one(site))

    def values(self, site: str) -> NDArray[np.float32]:
        """All rows of a site, float32 [rows, width], in recorded order.

        Raises:
            TraceError: no rows of this site, the site changes its shape, or the trace's level keeps no values.
        """
        data = self._one(site)
        return to_float32(ValueReader(data).take(np.arange(data.rows)))

    def frame(self, site: str) -> pd.DataFrame:
        """All rows of a site as a frame: keys, statistics, and `values` (one float32 array a row) where kept."""
        data = self._one(site)
        tables = [_read_group(group, None) for group in data.groups]
        table = pa.concat_tables(tables)
        frame = _frame(table.drop_columns(["values"]) if data.has_values else table)
        if data.has_values:
            frame["values"] = list(self.values(site))
        return frame


def open_trace(path: str | Path, *, allow_partial: bool = False) -> Trace:
    """Open a trace.

    Args:
        path: its folder.
        allow_partial: read what is whole of a trace that was not sealed or lost files, and say what is missing.

    Raises:
        TraceNotFoundError: nothing there, or no trace.
        TraceUnsealedError: recording was not finished.
        TraceVersionError: another format version.
        TraceDamagedError: a file is missing or has not the size that the seal says.
    """
    path = Path(path)
    if not path.is_dir():
        raise TraceNotFoundError(f"{path} is not a trace: no such folder")
    sealed = (path / SEAL).exists()
    name = SEAL if sealed else OPEN_SEAL
    if not (path / name).exists():
        raise TraceNotFoundError(f"{path} is not a trace: it has no {SEAL}")
    if not sealed and not allow_partial:
        raise TraceUnsealedError(
            f"{path} was not finished: it has no seal. "
            "Record it again; diff and show read what is whole with --allow-partial"
        )
    manifest = Manifest.from_json((path / name).read_text(encoding="utf-8"), path / name)
    missing = [
        problem for file, facts in manifest.files.items() if (problem := _check_file(path, file, facts["bytes"]))
    ]
    if missing and not allow_partial:
        raise TraceDamagedError(
            f"{path} is damaged: {'; '.join(missing[:3])}. "
            "Record it again, or pass --allow-partial to read what is whole"
        )
    return Trace(path, manifest, sealed=sealed and not missing, missing=missing)


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _check_file(path: Path, file: str, size: int) -> str | None:
    try:
        found = (path / file).stat().st_size
    except OSError:
        return f"{file} is missing"
    return None if found == size else f"{file} has {found} bytes, not {size}"


def _damaged(path: Path, error: Exception) -> TraceDamagedError:
    return TraceDamagedError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}): record the trace again")


def _open_file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, error) from error


def _scan_site(site: str, paths: list[Path], *, partial: bool, missing: list[str]) -> list[SiteData]:
    groups: OrderedDict[tuple[str, int, bool], list[RowGroup]] = OrderedDict()
    for path in paths:
        try:
            with _open_file(path) as file:
                metadata = file.schema_arrow.metadata or {}
                counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                has_values = "values" in file.schema_arrow.names
        except TraceDamagedError as error:
            if not partial:
                raise
            missing.append(str(error))
            continue
        facts = {key.decode().removeprefix("eagle_trace."): value.decode() for key, value in metadata.items()}
        if facts.get("dtype") not in DTYPES or not facts.get("width", "").isdigit():
            raise TraceDamagedError(f"{path} does not say its dtype and width: it was not written by eagle-trace")
        kind = groups.setdefault((facts["dtype"], int(facts["width"]), has_values), [])
        for index, rows in enumerate(counts):
            kind.append(RowGroup(path, index, kind[-1].start + kind[-1].rows if kind else 0, rows))
    return [SiteData(site, dtype, width, kept, tuple(found)) for (dtype, width, kept), found in groups.items()]


def _read_group(group: RowGroup, columns: list[str] | None) -> pa.Table:
    try:
        with _open_file(group.path) as file:
            return file.read_row_group(group.index, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(group.path, error) from error


def _read_columns(data: SiteData, columns: list[str]) -> pa.Table:
    by_file: OrderedDict[Path, list[int]] = OrderedDict()
    for group in data.groups:
        by_file.setdefault(group.path, []).append(group.index)
    tables = []
    for path, indices in by_file.items():
        try:
            with _open_file(path) as file:
                tables.append(file.read_row_groups(indices, columns=columns, use_threads=False))
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(path, error) from error
    return pa.concat_tables(tables)


def read_keys(data: SiteData) -> Rows:
    """Keys of all rows of `data`."""
    return _to_rows(_read_columns(data, [name for name, _ in KEYS]))


def read_statistics(data: SiteData) -> Statistics:
    """Statistics of all rows of `data`."""
    names = ["norm", "absmax", "mean", "nonfinite"]
    table = _read_columns(data, names)
    return Statistics(*(table.column(name).to_numpy() for name in names))


def _to_rows(table: pa.Table) -> Rows:
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


class ValueReader:
    """Random access to the values of one site, with a bounded cache of row groups.

    Row groups are decoded once as long as the working set fits `cache_bytes`.
    """

    def __init__(self, data: SiteData, cache_bytes: int = CACHE_BYTES) -> None:
        if not data.has_values:
            raise TraceError(f"site {data.site!r} was recorded at a level without values: record with --level values")
        self.data = data
        self._dtype = DTYPES[data.dtype]
        self._starts = np.array([group.start for group in data.groups], dtype=np.int64)
        self._cache: OrderedDict[int, Array] = OrderedDict()
        self._cached_bytes = 0
        self._cache_bytes = cache_bytes
        self._files: OrderedDict[Path, pq.ParquetFile] = OrderedDict()

    def take(self, index: NDArray[np.integer]) -> Array:
        """Rows at `index` (any order), exact dtype, [len(index), width]; a view where they lie side by side."""
        if not len(index):
            return np.empty((0, self.data.width), dtype=self._dtype)
        group_of = np.searchsorted(self._starts, index, side="right") - 1
        first = int(group_of[0])
        if (group_of == first).all():
            local = index - self._starts[first]
            start = int(local[0])
            array: Array = self._group(first)
            if (np.diff(local) == 1).all():
                return array[start : start + len(local)]
            picked: Array = array[local]
            return picked
        out = np.empty((len(index), self.data.width), dtype=self._dtype)
        for group in np.unique(group_of):
            where = np.flatnonzero(group_of == group)
            out[where] = self._group(int(group))[index[where] - self._starts[group]]
        return out

    def _group(self, number: int) -> Array:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        group = self.data.groups[number]
        try:
            # one column: handing it to Arrow's thread pool would cost more than the copy itself
            column = self._file(group.path).read_row_group(group.index, ["values"], use_threads=False).column("values")
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(group.path, error) from error
        chunks = [_decode(chunk, self._dtype, self.data.width) for chunk in column.chunks]
        array = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        self._cache[number] = array
        self._cached_bytes += array.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return array

    def _file(self, path: Path) -> pq.ParquetFile:
        """The open file at `path`: opening parses a footer, which takes longer than reading a row group."""
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        # not memory-mapped: pages of a map that stays open count as this process's memory
        file = self._files[path] = pq.ParquetFile(path)
        while len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file


def _decode(chunk: pa.FixedSizeBinaryArray, dtype: np.dtype[np.generic], width: int) -> Array:
    size = width * dtype.itemsize
    flat = np.frombuffer(chunk.buffers()[1], dtype=np.uint8, count=len(chunk) * size, offset=chunk.offset * size)
    return flat.view(dtype).reshape(len(chunk), width)


def iter_blocks(data: SiteData, rows: int = 4096) -> Iterator[Array]:
    """All values of `data` in recorded order, at most `rows` rows at a time."""
    reader = ValueReader(data, cache_bytes=0)
    for start in range(0, data.rows, rows):
        yield reader.take(np.arange(start, min(start + rows, data.rows)))
