"""Reading a trace: `open_trace` says what there is of it and what is missing; a `Trace` reads the rest when asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from eagle_trace.errors import TraceDamagedError, TraceError, TraceNotFoundError, TraceUnsealedError
from eagle_trace.manifest import Manifest, read_manifests
from eagle_trace.sitedata import RowGroup, SiteData, match_rows, padded_paths, read_keys, read_statistics
from eagle_trace.store import open_store, reason
from eagle_trace.trace import Trace
from eagle_trace.valuereader import SketchReader, ValueReader, iter_blocks

__all__ = [
    "RowGroup",
    "SiteData",
    "SketchReader",
    "Trace",
    "ValueReader",
    "iter_blocks",
    "match_rows",
    "open_trace",
    "padded_paths",
    "read_keys",
    "read_statistics",
]


#: ranks that are named one by one where they are missing
_LISTED = 8


def open_trace(path: str | Path, *, allow_partial: bool = False) -> Trace:
    """Open a trace.

    Args:
        path: its folder, or the URL of one on a filesystem of fsspec's (``s3://bucket/run.trace``).
        allow_partial: read what is whole of a trace that was not sealed or lost files, and say what is missing.

    Raises:
        TraceNotFoundError: nothing there, or no trace.
        TraceUnsealedError: recording was not finished.
        TraceVersionError: another format version.
        TraceDamagedError: a file is missing or has not the size that the seal says, or a manifest is damaged.
        TraceError: the place cannot be reached.
        UsageError: the package that knows the place is not installed.
    """
    store = open_store(path)
    try:
        sizes = store.sizes()
        # a file lists nothing, or itself; of a folder, a place such as a web server may say that it is a file
        is_file = sizes.keys() <= {""} and store.is_file()
        there = bool(sizes) or store.is_folder()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {reason(error)}") from error
    if is_file:
        raise TraceNotFoundError(f"{path} is a file: a trace is the folder that `eagle-trace record` writes")
    if not there:
        raise TraceNotFoundError(f"{path} is not a trace: no such folder")
    manifests, sealed = read_manifests(store, sizes)
    first = min(manifests)
    ranks = max(manifest.ranks for manifest in manifests.values())
    missing = []
    absent = [rank for rank in range(ranks) if rank not in manifests]
    for rank in sorted({*absent[:_LISTED], *manifests}):
        who = f"rank {rank} of {ranks}: " if ranks > 1 else ""
        if rank not in manifests:
            missing.append(f"{who}all that it recorded")
        elif rank not in sealed:
            missing.append(who + _after_the_end(manifests[rank]))
    if len(absent) > _LISTED:
        missing.append(f"all that {len(absent) - _LISTED} more ranks recorded")
    if missing and not allow_partial:
        lacking = "; ".join(missing)
        raise TraceUnsealedError(
            f"{path} was not finished: it has no seal"
            + (f" ({lacking} is missing)" if ranks > 1 or manifests[first].stopped else "")
            + ". Record it again; diff and show read what is whole with --allow-partial"
        )
    damaged = _check_files(manifests, sealed, sizes)
    if damaged and not allow_partial:
        raise TraceDamagedError(
            f"{path} is damaged: {'; '.join(damaged[:3])}. "
            "Record it again, or pass --allow-partial to read what is whole"
        )
    missing += damaged
    return Trace(store, manifests, sealed=sealed, missing=missing)


def _after_the_end(manifest: Manifest) -> str:
    """What an open seal says is missing."""
    why = f" ({manifest.stopped})" if manifest.stopped else ""
    return f"what came after {manifest.flushed}{why}" if manifest.flushed else f"all that was recorded{why}"


def _check_files(manifests: Mapping[int, Manifest], sealed: Collection[int], sizes: Mapping[str, int]) -> list[str]:
    """What is wrong with the files that the manifests name; they are taken off the list."""
    problems = []
    for rank, manifest in manifests.items():
        for name, facts in list(manifest.files.items()):
            found, size = sizes.get(name), facts["bytes"]
            if found is None:
                problems.append(f"{name} is missing")
            elif rank in sealed and found != size:
                problems.append(f"{name} has {found} bytes, not {size}")
            else:
                continue
            del manifest.files[name]
    return problems
