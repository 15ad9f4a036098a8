"""A recorded trace: its tables and sites are read when they are asked for, one at a time, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from eagle_trace.capture import Rows, Shard, Statistics, drawn_channels, to_float32
from eagle_trace.errors import TraceDamagedError, TraceError
from eagle_trace.families import Family
from eagle_trace.manifest import Manifest, spokesman
from eagle_trace.partfile import PartFile
from eagle_trace.schema import KEYS, STATISTICS, TABLES
from eagle_trace.sitedata import (
    SiteData,
    append_rows,
    join_shards,
    read_keys,
    read_statistics,
    scan,
    to_rows,
)
from eagle_trace.sites import family_of, forward_order
from eagle_trace.store import Place, Store
from eagle_trace.tables import last_prompts, read_table, whole_params
from eagle_trace.valuereader import SketchReader, ValueReader

_RANK = re.compile(r"rank(\d+)-")
#: a table of at most so many bytes is kept once it was read: a comparison asks for most of them several times
_KEPT_BYTES = 8 << 20


class Trace:
    """A recorded trace. Opening reads the manifest only; every table and site is read when asked for.

    Attributes:
        path: the trace's folder, or its URL.
        manifest: what made it (rank 0's, where several ranks wrote).
        missing: what is not there, in words (only with `allow_partial`).
    """

    def __init__(
        self, store: Store, manifests: dict[int, Manifest], *, sealed: Collection[int], missing: list[str]
    ) -> None:
        self._store = store
        self._sealed = sealed
        self._manifests = dict(sorted(manifests.items()))
        self.path: Place = store.place
        self.manifest = spokesman(list(self._manifests.values()))
        self.sealed = not missing
        self.missing = missing
        self._sites: dict[str, list[SiteData]] = {}
        self._rows_of: dict[str, Rows] = {}
        self._tables: dict[str, pa.Table] = {}

    def __repr__(self) -> str:
        state = "" if self.sealed else ", unsealed"
        state += f", {self.manifest.ended_early}" if self.manifest.ended_early else ""
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

    @cached_property
    def files(self) -> dict[str, dict[str, int]]:
        """Rows and bytes of every file that can be read, in the order of their rows."""
        ranks = sorted(self._manifests.values(), key=lambda one: (one.dp_rank, one.tp_rank))
        return {name: facts for one in ranks for name, facts in sorted(one.files.items())}

    @cached_property
    def unchecked(self) -> list[str]:
        """Files without a checksum, in which an altered byte may go unnoticed: all of a trace of an older version."""
        known = {name for one in self._manifests.values() for name in one.checksums}
        return [name for name in self.files if name not in known]

    def _parts(self, folder: str) -> Iterator[tuple[Manifest, PartFile]]:
        """Files of a folder (or of the one file in its place), each with the manifest of the rank that wrote it."""
        for name, facts in self.files.items():
            if facts["rows"] and (name == folder or name.startswith(f"{folder}/")):
                rank = _RANK.search(name)
                writer = self._manifests.get(int(rank[1]) if rank else 0, self.manifest)
                growing = None if writer.rank in self._sealed else writer.recording
                yield writer, PartFile(self._store, name, facts["rows"], writer.checksums.get(name), growing)

    @property
    def _lost(self) -> Callable[[str], None] | None:
        """Where to note a file that turns out to be damaged; None where that is an error."""
        return None if self.sealed else self._note_lost

    def _note_lost(self, problem: str) -> None:
        if problem not in self.missing:
            self.missing.append(problem)

    def table_rows(self, name: str) -> int:
        """Rows of a table, without reading it; prompts that were written twice count twice."""
        return sum(part.rows for _, part in self._parts(f"{name}.parquet"))

    def table(self, name: str) -> pa.Table:
        """One of the tables beside values/ as Arrow; empty if the trace has none of it. Read once, if it is small."""
        if name in self._tables:
            return self._tables[name]
        table = self._read_table(name)
        if table.nbytes <= _KEPT_BYTES:
            self._tables[name] = table
        return table

    def _read_table(self, name: str) -> pa.Table:
        schema = TABLES[name]
        tables = []
        for _, part in self._parts(f"{name}.parquet"):
            try:
                tables.append(read_table(part, name))
            except TraceDamagedError as error:
                if self._lost is None:
                    raise
                self._lost(str(error))
        table = pa.concat_tables(tables) if tables else schema.empty_table()
        return last_prompts(table) if name == "prompts" else whole_params(table) if name == "params" else table

    def params_by_rank(self) -> list[tuple[Manifest, list[dict[str, Any]]]]:
        """Rows of the params table as each rank wrote them."""
        found: dict[int, list[dict[str, Any]]] = {}
        for writer, part in self._parts("params.parquet"):
            found.setdefault(writer.rank, []).extend(read_table(part, "params").to_pylist())
        return [(self._manifests[rank], rows) for rank, rows in found.items()]

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
    def metrics(self) -> pd.DataFrame:
        """Loss and metrics of each batch of a recorded training: batch, call_id, step, name, value."""
        return _frame(self.table("metrics"))

    def layer_channels(self, width: int) -> NDArray[np.int64]:
        """Which channels of hidden states of a width layers.parquet holds, ascending [C]."""
        named = self.manifest.settings.get("layer_channels")
        return drawn_channels(width) if named is None else np.array(named, dtype=np.int64)

    @cached_property
    def rows(self) -> Rows:
        """Keys of every draft row, with token and position."""
        return to_rows(self.table("rows"))

    # ---- sites ------------------------------------------------------------------------------------------------

    @cached_property
    def shapes(self) -> dict[str, set[tuple[int, str]]]:
        """Width and dtype of every site seen by the host, also where no rows were kept: {site: {(width, dtype)}}."""
        seen: dict[str, set[tuple[int, str]]] = {}
        for shapes in self.table("calls").filter(pa.compute.field("role") == "draft").column("shapes").to_pylist():
            for entry in shapes or []:
                seen.setdefault(entry["site"], set()).add((entry["shape"][-1], entry["dtype"]))
        return seen

    @property
    def kept_sites(self) -> list[str]:
        """Names of the sites with rows, in forward order; none at level ``shapes``."""
        return [site for site in self.sites if self.site_data(site)]

    @property
    def sites(self) -> list[str]:
        """Names of the sites with rows, in forward order (every site seen, at level ``shapes``)."""
        return forward_order({name for name in self._scanned if self.site_data(name)} or set(self.shapes))

    @cached_property
    def family(self) -> Family:
        """The family of the draft: the one that the recording names, or else the one that has these sites."""
        return family_of([*self.sites, *self.shapes], self.manifest.draft.get("family"))

    def site_data(self, site: str) -> list[SiteData]:
        """What the trace holds of a site: one entry a (dtype, width) seen, [] if it has no rows of it."""
        if site not in self._sites:
            self._sites[site] = self._read_site(site)
        return self._sites[site]

    @cached_property
    def _scanned(self) -> dict[str, list[tuple[Manifest, dict[Shard | None, list[SiteData]]]]]:
        """What each rank holds of each site, by shard."""
        files: dict[str, dict[int, list[PartFile]]] = {}
        for name in self.files:
            if name.startswith("values/site="):
                files.setdefault(name.split("/")[1].removeprefix("site="), {})
        for site, by_rank in files.items():
            for writer, part in self._parts(f"values/site={site}"):
                by_rank.setdefault(writer.rank, []).append(part)
        return {
            site: [(self._manifests[rank], scan(site, parts, self._lost)) for rank, parts in by_rank.items()]
            for site, by_rank in files.items()
        }

    def _read_site(self, site: str) -> list[SiteData]:
        whole: dict[int, list[SiteData]] = {}
        shards: dict[tuple[int, Shard], list[SiteData]] = {}
        for rank, found in self._scanned.get(site, []):
            for shard, data in found.items():
                # ranks come in order: of what several of a group hold alike, the first one speaks
                if shard is None:
                    whole.setdefault(rank.dp_rank, data)
                else:
                    shards.setdefault((rank.dp_rank, shard), data)
        by_shard: dict[Shard, list[SiteData]] = {}
        for (_, shard), data in shards.items():
            by_shard[shard] = append_rows(by_shard.get(shard, []), data)
        alike: list[SiteData] = reduce(append_rows, whole.values(), [])
        return [*alike, *join_shards(by_shard, self._lost)]

    def copies(self, site: str) -> list[tuple[int, SiteData, int, SiteData]]:
        """Where several ranks hold the same rows of a site: (rank, what it holds, other rank, what that one holds)."""
        first: dict[tuple[int, Shard | None], tuple[int, list[SiteData]]] = {}
        found = []
        for rank, by_shard in self._scanned.get(site, []):
            for shard, data in by_shard.items():
                number, spoken = first.setdefault((rank.dp_rank, shard), (rank.rank, data))
                if number != rank.rank:
                    pairs = ((a, b) for a in spoken for b in data if (a.dtype, a.width) == (b.dtype, b.width))
                    found += [(number, a, rank.rank, b) for a, b in pairs]
        return found

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
        self._one(site)
        return self.rows_of(site)

    def rows_of(self, site: str) -> Rows:
        """Keys of a site's rows through all of its `site_data`, in that order; the site has rows.

        They are read once, and kept once for all the sites that have the same rows: most have.
        """
        if site not in self._rows_of:
            found = Rows.concatenate([read_keys(one) for one in self.site_data(site)])
            kept = {id(one): one for one in self._rows_of.values()}.values()
            self._rows_of[site] = next((one for one in kept if one.same(found)), found)
        return self._rows_of[site]

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

    def sketch(self, site: str) -> NDArray[np.float32]:
        """Sketches of all rows of a site (`eagle_trace.sketch`), float32 [rows, min(64, width)], in recorded order.

        At level ``values`` they are made from the values.

        Raises:
            TraceError: no rows of this site, the site changes its shape, or the trace's level keeps no sketches.
        """
        data = self._one(site)
        return SketchReader(data).take(np.arange(data.rows))

    def frame(self, site: str) -> pd.DataFrame:
        """All rows of a site as a frame: keys, statistics, and `values` or `sketch` (a float32 array a row) as kept."""
        data = self._one(site)
        keys, statistics = self.keys(site), read_statistics(data)
        frame = pd.DataFrame(
            {name: getattr(keys, name) for name, _ in KEYS if name != "path"}
            | {name: getattr(statistics, name) for name, _ in STATISTICS}
        )
        paths = [np.array(path, dtype=np.int32) for path in keys.paths()]
        frame.insert([name for name, _ in KEYS].index("path"), "path", paths)
        if data.has_values:
            frame["values"] = list(self.values(site))
        elif data.has_sketch:
            frame["sketch"] = list(self.sketch(site))
        return frame

    def verify(self) -> list[str]:
        """Read every file in full and compare its checksums: one sentence for each that was altered."""
        problems = []
        for name, facts in self.files.items():
            for writer, part in self._parts(name):
                # a part may have grown since an open seal was written
                crc32 = facts.get("crc32") if writer.rank in self._sealed else None
                try:
                    part.verify(crc32)
                except TraceDamagedError as error:
                    problems.append(str(error).removesuffix(": record the trace again"))
        return problems


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    return frame
