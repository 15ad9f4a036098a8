"""Damage to traces, thousands of it: nothing that is altered may end in another verdict, another figure or a traceback.

    python -m tests.support.damage [--count 5000] [--seed 0]

Each damage is done to one file (or two that change places) of a small pair at one level, `diff` is run, and the files
are put back. What comes out must be one sentence that names a damaged file, or exactly the result of the sound pair
(not every file is read). A damage is told by its number alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pyarrow.parquet as pq

from eagle_trace.capture import Shard
from eagle_trace.errors import TraceError
from eagle_trace.manifest import OPEN_SEAL, SEAL
from eagle_trace.reader import Trace, ValueReader, open_trace, read_keys
from eagle_trace.store import Store
from eagle_trace.store.remote import RemoteStore
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.comparison.fold import Serial
from eagle_trace_analysis.report.json import to_json_text
from tests.support.synthetic import Side, make_prompts, only, write_trace

#: of a sharded site, half on each of two ranks
SHARDED = ("layer.0.attn.q", "layer.0.mlp.gate")
ROUND = {
    "prompt_id": 0, "round": 1, "root": 9, "proposed": [1, 2], "parents": [0, 1], "target_argmax": [1, 2, 3],
    "accepted": [1], "bonus": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two traces and what a diff of them says.

    Attributes:
        name: what kind of pair it is.
        train, serve: their folders.
        partial: whether they are read with `allow_partial`.
        remote: whether they are read as from another machine, through fsspec.
        sound: the diff as JSON.
    """

    name: str
    train: Path
    serve: Path
    partial: bool = False
    remote: bool = False
    sound: str = ""

    def files(self) -> list[Path]:
        """Every file of both, in order."""
        return sorted(file for side in (self.train, self.serve) for file in side.rglob("*") if file.is_file())

    def diff(self) -> tuple[str, list[str]]:
        """The diff as JSON, and what the traces say is missing."""
        with mock.patch("eagle_trace.reader.open_store", _remote) if self.remote else nullcontext():
            traces = [open_trace(side, allow_partial=self.partial) for side in (self.train, self.serve)]
        text = to_json_text(diff(*traces, executor=Serial()))
        return text, [*traces[0].missing, *traces[1].missing]


def _remote(place: Path) -> Store:
    return RemoteStore(str(place), fsspec.filesystem("file"), str(place))


def make_pairs(folder: Path) -> list[Pair]:
    """Pairs of every level, one that diverges, one of two ranks, and one whose server was killed."""
    prompts = make_prompts(2)
    fault = only("layer.0.attn.q", 0, lambda _, values: values * 1.045)
    pairs = []
    for level in ("values", "sketch", "stats", "shapes"):
        where = folder / level
        where.mkdir()
        write_trace(where / "train", Side("train", level=level), prompts)
        write_trace(where / "serve", Side("serve", level=level, noise_seed=1), prompts, rounds=[ROUND])
        pairs.append(Pair(level, where / "train", where / "serve"))
    train = folder / "values" / "train"
    pairs.append(Pair("remote", train, folder / "values" / "serve", remote=True))
    write_trace(folder / "faulty", Side("serve", fault=fault), prompts, rounds=[ROUND])
    pairs.append(Pair("diverged", train, folder / "faulty"))
    whole = open_trace(folder / "values" / "serve")
    _in_two_ranks(whole, folder / "ranks", prompts=prompts)
    pairs.append(Pair("ranks", train, folder / "ranks"))
    shutil.copytree(folder / "values" / "serve", folder / "killed")
    (folder / "killed" / SEAL).rename(folder / "killed" / OPEN_SEAL)
    pairs.append(Pair("killed", train, folder / "killed", partial=True))
    return [replace(pair, sound=pair.diff()[0]) for pair in pairs]


def _in_two_ranks(trace: Trace, path: Path, *, prompts: object) -> None:
    """The same rows as two ranks would have recorded them."""
    prepare_output(path)
    for rank in (0, 1):
        made = replace(trace.manifest, rank=rank, ranks=2, tp_rank=rank, files={}, checksums={})
        with mock.patch("os.fsync"):
            writer = TraceWriter(path, made)
            writer.put_rows(trace.rows)
            for name in ("prompts", "calls", "params", "rounds"):
                for record in trace.table(name).to_pylist():
                    writer.put_record(name, record)
            for site in trace.kept_sites:
                (data,) = trace.site_data(site)
                values = ValueReader(data).take(np.arange(data.rows))
                shard = Shard(rank, 2) if site in SHARDED else None
                part = np.split(values, 2, axis=1)[rank] if shard else values
                writer.put_values(site, read_keys(data), part.copy(), shard)
            writer.seal()


Rng = np.random.Generator
#: changes the files of a pair, and says which
Damage = Callable[[Pair, Rng], list[Path]]


def _one(pair: Pair, rng: Rng) -> Path:
    # a manifest is one file of many, and holds what all others rest on
    files = pair.files()
    if rng.random() < 0.2:
        files = [file for file in files if file.name.startswith("manifest")]
    return files[int(rng.integers(len(files)))]


def flip(pair: Pair, rng: Rng) -> list[Path]:
    """One to eight bits."""
    file = _one(pair, rng)
    data = bytearray(file.read_bytes())
    for _ in range(int(rng.integers(1, 9)) if rng.random() < 0.3 else 1):
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)
    return [file]


def blank(pair: Pair, rng: Rng) -> list[Path]:
    """A block of zeros, or of noise."""
    file = _one(pair, rng)
    data = bytearray(file.read_bytes())
    size = int(min(len(data), 2 ** rng.uniform(0, 12)))
    start = int(rng.integers(len(data) - size + 1))
    data[start : start + size] = bytes(size) if rng.random() < 0.7 else rng.bytes(size)
    file.write_bytes(data)
    return [file]


def resize(pair: Pair, rng: Rng) -> list[Path]:
    """The end is missing, or something is behind it, or a piece of the middle is gone."""
    file = _one(pair, rng)
    data = file.read_bytes()
    at = int(rng.integers(len(data)))
    kind = rng.integers(3)
    file.write_bytes([data[:at], data + rng.bytes(at % 64 + 1), data[:at] + data[at + 1 + at % 64 :]][kind])
    return [file]


def exchange(pair: Pair, rng: Rng) -> list[Path]:
    """Two files change places: of one trace, of both, of two ranks."""
    parquet = [file for file in pair.files() if file.suffix == ".parquet"]
    alike = rng.random() < 0.5
    first = parquet[int(rng.integers(len(parquet)))]
    site = first.parent.name
    others = [file for file in parquet if file != first and (not alike or file.parent.name == site)] or parquet
    second = others[int(rng.integers(len(others)))]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    return [first, second]


def copy_over(pair: Pair, rng: Rng) -> list[Path]:
    """One file stands in the place of another."""
    files = pair.files()
    first, second = (files[int(rng.integers(len(files)))] for _ in range(2))
    first.write_bytes(second.read_bytes())
    return [first]


def remove(pair: Pair, rng: Rng) -> list[Path]:
    """A file is gone."""
    file = _one(pair, rng)
    file.unlink()
    return [file]


def rewrite(pair: Pair, rng: Rng) -> list[Path]:
    """A file is a whole Parquet file that says something else: fewer rows, another width, dtype or order."""
    parquet = [file for file in pair.files() if file.suffix == ".parquet"]
    file = parquet[int(rng.integers(len(parquet)))]
    table = pq.read_table(file, partitioning=None)
    kind = int(rng.integers(4))
    if kind == 0:
        table = table.slice(0, max(1, len(table) - 1))
    elif kind == 1:
        table = table.take(rng.permutation(len(table)))
    else:
        facts = dict(table.schema.metadata or {})
        facts[b"eagle_trace.width" if kind == 2 else b"eagle_trace.dtype"] = b"16" if kind == 2 else b"float16"
        table = table.replace_schema_metadata(facts)
    pq.write_table(table, file)
    return [file]


KINDS: tuple[Damage, ...] = (flip, flip, flip, blank, blank, resize, exchange, copy_over, remove, rewrite)


@contextmanager
def damaged(pair: Pair, damage: Damage, rng: Rng) -> Iterator[list[Path]]:
    """The damage done, and undone afterwards."""
    before = {file: file.read_bytes() for file in pair.files()}
    try:
        yield damage(pair, rng)
    finally:
        for file, data in before.items():
            if not file.is_file() or file.read_bytes() != data:
                file.write_bytes(data)


def outcome(pair: Pair, number: int, seed: int = 0) -> tuple[str, str]:
    """What became of a damage: its kind, and ``refused``, ``same``, or what is wrong."""
    rng = np.random.default_rng([seed, number])
    damage = KINDS[int(rng.integers(len(KINDS)))]
    before = {file: file.read_bytes() for file in pair.files()}
    with damaged(pair, damage, rng) as files:
        altered = [file for file in files if not file.is_file() or file.read_bytes() != before[file]]
        return damage.__name__, _judged(pair, files, altered)


def _judged(pair: Pair, files: list[Path], altered: list[Path]) -> str:
    try:
        found, missing = pair.diff()
    except TraceError as error:
        text = str(error)
        names = [
            file.relative_to(side).as_posix()
            for file in files
            for side in (pair.train, pair.serve)
            if file.is_relative_to(side)
        ]
        if not altered:
            return f"refused although nothing was altered: {text}"
        if "\n" in text or not any(name in text for name in [*names, *(str(pair.train), str(pair.serve))]):
            return f"the sentence names no damaged file ({', '.join(names)}): {text}"
        return "refused"
    except Exception:  # noqa: BLE001 (what it is, is what is asked here)
        return f"traceback: {traceback.format_exc()}"
    if found == pair.sound:
        return "same"
    if pair.partial and any(file.name in line for line in missing for file in altered):
        return "refused"  # read without the damaged part, which is said
    return f"another result, verdict {json.loads(found)['verdict']}"


def main() -> None:
    """Do so many damages and print what became of them; the exit status is 1 if one of them went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[tuple[str, str, str]] = Counter()
    bad = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pairs = make_pairs(Path(folder))
        for number in range(options.count):
            pair = pairs[number % len(pairs)]
            kind, what = outcome(pair, number, options.seed)
            if what not in ("refused", "same"):
                bad += 1
                print(f"{number}: {pair.name}, {kind}: {what}", flush=True)
                what = "WRONG"
            counts[pair.name, kind, what] += 1
    for (name, kind, what), count in sorted(counts.items()):
        print(f"{name:9} {kind:10} {what:8} {count}")
    totals = Counter(what for (_, _, what) in counts.elements())
    print(f"{options.count} damages in {time.monotonic() - started:.0f} s: {dict(totals)}")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
