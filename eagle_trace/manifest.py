"""The manifest: what made a trace. Written last, atomically, it is the trace's seal."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from eagle_trace.capture import LEVELS
from eagle_trace.checksums import digest
from eagle_trace.errors import TraceDamagedError, TraceNotFoundError, TraceVersionError
from eagle_trace.fields import (
    Check,
    Table,
    count,
    listed,
    mapped,
    one_of,
    optional,
    plain,
    seconds,
    small,
    text,
    whole,
    writable,
)
from eagle_trace.store import Store, join, reason

FORMAT_VERSION = 1
SEAL = "manifest.json"
#: stands in for the seal while recording: what was being made, and which rows of which file are whole
OPEN_SEAL = "manifest.partial.json"

_ATTEMPTS = 10
#: options that are followed by what nobody else may know (``--api-key``, ``--hf-token``, ``--ssl-keyfile-password``)
_SECRET = re.compile(r"--?(?:.*[-_.])?(?:key|token|password|passwd|secret)", re.IGNORECASE)
#: more than the manifest of any trace
_LARGEST_BYTES = 64 << 20
_MOST_RANKS = 1 << 16
#: how a manifest ends: a checksum over all that is before it
_END = ',\n "checksum": "{}"\n}}\n'
_ENDING = re.compile(rb',\n "checksum": "([0-9a-f]{16})"\n}\n\Z')

Side = Literal["train", "serve"]


def seal_name(rank: int) -> str:
    """File name of a rank's manifest."""
    return SEAL if rank == 0 else f"manifest.rank{rank}.json"


def open_seal_name(rank: int) -> str:
    """File name of what stands in for a rank's manifest while it records."""
    return OPEN_SEAL if rank == 0 else f"manifest.rank{rank}.partial.json"


def rank_of_seal(name: str) -> tuple[int, bool] | None:
    """Rank, and whether it is sealed, by a file's name; None if that is no manifest."""
    if name in (SEAL, OPEN_SEAL):
        return 0, name == SEAL
    found = re.fullmatch(r"manifest\.rank([1-9]\d{0,8})(\.partial)?\.json", name)
    return (int(found[1]), found[2] is None) if found else None


@dataclass
class Manifest:
    """What made a trace.

    Attributes:
        side: ``train`` or ``serve``.
        level: ``shapes``, ``stats``, ``sketch`` or ``values``.
        host: name of the recorded library (``speculators``, ``sglang``).
        packages: versions of what took part, by package name.
        target: path, config digest and shape facts of the target checkpoint.
        draft: the same for the draft, plus its family's name, keys that the host dropped and parameters not found.
        dtype: dtype the draft ran in, on-disk name.
        device: ``cpu`` or ``cuda``.
        settings: what the run was asked to do (steps, topk, draft tokens, features, seed, ...).
        changes: what recording changed about the host, one sentence each ("CUDA graphs off").
        not_materialised: sites, and rows of them, that this host never computes, with the reason.
        prompts_digest: digest over the keys of all prompts.
        argv: command line, for the record.
        created: ISO 8601 time, UTC.
        warnings: what went wrong without spoiling the trace.
        stopped: None, or why recording stopped early: ``max-bytes``, or a few words.
        flushed: ISO 8601 time, UTC, up to which all that was recorded is in `files`.
        recorder: ``host:pid`` of the process that is recording; empty once it is done.
        waited_seconds: how long the host waited for the disk while it was recorded, in all [s].
        rank, ranks: number of the process that wrote this manifest, and how many write into the trace.
        tp_rank: which part of each sharded site this rank holds; 0 speaks for its group.
        dp_rank: ranks of another number hold other rows.
        recording: names this recording by this process; in each of its files, too.
        files: rows, bytes and crc32 of every file, by path relative to the trace.
        checksums: the seal of every file (`eagle_trace.checksums`), by the same paths; older traces have none.
    """

    side: Side
    level: str
    host: str
    packages: dict[str, str] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    device: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    not_materialised: list[dict[str, str]] = field(default_factory=list)
    prompts_digest: str = ""
    argv: list[str] = field(default_factory=list)
    created: str = ""
    warnings: list[str] = field(default_factory=list)
    stopped: str | None = None
    flushed: str = ""
    recorder: str = ""
    waited_seconds: float = 0.0
    rank: int = 0
    ranks: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    recording: str = ""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def ended_early(self) -> str | None:
        """A clause that says why the recording ended before it was done, None if it did not; for every reader."""
        return f"the recording ended early: {self.stopped}" if self.stopped else None

    def to_bytes(self) -> bytes:
        """The manifest as it lies in its file: indented JSON, its own checksum last."""
        for _ in range(_ATTEMPTS):
            # the recorder may add a setting or a warning just now, from a thread of its own
            with contextlib.suppress(RuntimeError):
                return sealed_json(self._fields())
        return sealed_json(self._fields())

    def _fields(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parse a manifest read from `where` (for messages only).

        Raises:
            TraceDamagedError: not JSON, a required field is missing, or a field is not of its type.
            TraceVersionError: another format version.
        """
        data = _parsed(text, where)
        if not isinstance(data, dict) or "format_version" not in data:
            raise TraceDamagedError(f"{where} is not a manifest (no format_version): is this folder a trace?")
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise TraceVersionError(
                f"{where} has format version {version!s:.40}, this eagle-trace reads {FORMAT_VERSION}: "
                "record again, or use the eagle-trace version that wrote it"
            )
        _check_ending(data, text, where)
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        missing = {"side", "level", "host"} - set(known)
        if missing:
            raise TraceDamagedError(f"{where} lacks {', '.join(sorted(missing))}: record the trace again")
        for name, value in known.items():
            if not _FIELDS[name](value):
                raise TraceDamagedError(
                    f"{where} is damaged: its {name} is not what it must be: record the trace again"
                )
        manifest = cls(**known)
        if wrong := _contradiction(manifest):
            raise TraceDamagedError(f"{where} is damaged: {wrong}: record the trace again")
        return manifest

    def write(self, store: Store, name: str = SEAL) -> None:
        """Write atomically: a reader sees the whole manifest or none."""
        store.write(name, self.to_bytes())


def sealed_json(data: Mapping[str, Any]) -> bytes:
    """A manifest's fields as the bytes of its file; what UTF-8 cannot hold (a command line may) is escaped."""
    written = {name: writable(value) for name, value in data.items() if name != "checksum"}
    for name in ("target", "draft", "settings"):
        # whatever a checkpoint's config or a client says: what was recorded must not be lost by it
        if isinstance(table := _FIELDS[name], Table) and isinstance(written.get(name), dict):
            written[name] = table.fitted(written[name])
    body = json.dumps(written, indent=1, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
    body = body.removesuffix(b"\n}")
    return body + _END.format(digest(body)).encode()


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        # configs of some models hold an Infinity, which JSON has no number for
        return json.loads(text, parse_constant=str, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise TraceDamagedError(f"{where} is not JSON ({why}): record the trace again") from error


def _finite(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def _check_ending(data: Mapping[str, Any], text: str | bytes, where: str) -> None:
    """Hold a manifest against its own checksum; one that names those of files must have one."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    ending = _ENDING.search(raw)
    if ending is None:
        if "checksum" in data or data.get("checksums"):
            raise TraceDamagedError(f"{where} was altered: it does not end in its checksum: record the trace again")
    elif digest(raw[: ending.start()]).encode() != ending[1]:
        raise TraceDamagedError(
            f"{where} was altered: its checksum is not the one it was written with: record the trace again"
        )


def _contradiction(manifest: Manifest) -> str | None:
    """What cannot be true of a manifest whose fields are each of their type."""
    if manifest.rank >= manifest.ranks:
        return f"there is no rank {manifest.rank} of {manifest.ranks}"
    for name in manifest.files:
        writer = rank_of_file(name)
        if writer != manifest.rank:
            return f"it is the manifest of rank {manifest.rank} and names a file of rank {writer}"
    return None


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of that file name (see `Manifest.from_json`)."""
    where = join(store.place, name)
    try:
        return Manifest.from_json(store.read(name, _LARGEST_BYTES), where)
    except OSError as error:
        raise TraceDamagedError(f"{where} cannot be read ({reason(error)}): record the trace again") from error


def read_manifests(store: Store, names: Collection[str]) -> tuple[dict[int, Manifest], set[int]]:
    """The manifest of each rank that has one among the files `names`, and which of them are seals.

    Raises:
        TraceNotFoundError: there is none.
        TraceDamagedError, TraceVersionError: see `Manifest.from_json`; or they are not of one recording.
    """
    seals = [found for name in names if (found := rank_of_seal(name))]
    sealed = {rank for rank, is_seal in seals if is_seal}
    if not seals:
        raise TraceNotFoundError(f"{store.place} is not a trace: it has no {SEAL}")
    manifests: dict[int, Manifest] = {}
    for rank in sorted({rank for rank, _ in seals}):
        name = seal_name(rank) if rank in sealed else open_seal_name(rank)
        if manifests and rank >= (ranks := next(iter(manifests.values())).ranks):
            raise TraceDamagedError(
                f"{join(store.place, name)} does not belong to this trace, which has {ranks} ranks: remove it"
            )
        manifest = manifests[rank] = read_manifest(store, name)
        if manifest.rank != rank:
            raise TraceDamagedError(
                f"{join(store.place, name)} is the manifest of rank {manifest.rank}: it was renamed"
            )
    kinds = {_kind_of(one) for one in manifests.values()}
    if len(kinds) > 1:
        raise TraceDamagedError(f"{store.place} holds ranks of different recordings: record the trace again")
    return manifests, sealed


def _kind_of(manifest: Manifest) -> tuple[Any, ...]:
    """What is the same for all ranks of one recording."""
    checkpoints = [facts.get("config_digest") for facts in (manifest.target, manifest.draft)]
    return manifest.side, manifest.level, manifest.ranks, manifest.host, manifest.dtype, *map(str, checkpoints)


def spokesman(manifests: Sequence[Manifest]) -> Manifest:
    """The first rank's manifest, with what the others have to add."""
    first, *others = manifests
    warnings = [f"rank {one.rank}: {text}" for one in others for text in one.warnings if text not in first.warnings]
    # each data-parallel rank has prompts of its own: no digest is over all of them
    alone = all(one.dp_rank == first.dp_rank for one in others)
    stopped = [f"{one.stopped} (rank {one.rank})" for one in others if one.stopped]
    return replace(
        first,
        warnings=[*first.warnings, *warnings],
        stopped=first.stopped or next(iter(stopped), None),
        waited_seconds=max(one.waited_seconds for one in manifests),
        prompts_digest=first.prompts_digest if alone else "",
    )


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line as a manifest may hold it: what follows an option such as ``--api-key`` is left out."""
    words: list[str] = []
    hidden = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = _SECRET.fullmatch(name) is not None
        words.append("***" if hidden else f"{name}=***" if secret and equals else word)
        hidden = secret and not equals
    return words


def rank_of_file(name: str) -> int | None:
    """Which rank writes a file of that name; None if none does."""
    found = _FILE_NAME.fullmatch(name)
    return int(found["rank"] or 0) if found else None


#: one part of a table or a site, or a table in one file, as older versions wrote it
_FILE_NAME = re.compile(
    r"(?:values/site=[^/\\]{1,200}|[a-z]{1,40}\.parquet)/rank(?P<rank>0|[1-9]\d{0,8})-\d{1,9}\.parquet|[a-z]{1,40}\.parquet",
    re.ASCII,
)
_TEXTS = listed(text)
_FACTS = {
    "path": optional(text),
    "config": optional(mapped(plain)),
    "config_digest": optional(text),
    "model_type": optional(text),
    "architecture": optional(text),
    "family": optional(text),
    "captures": optional(lambda value: isinstance(value, bool)),
    "captured_inputs": optional(listed(whole)),
    "layer_ids": optional(listed(whole)),
    "dropped_keys": optional(_TEXTS),
    "missing_keys": optional(_TEXTS),
    "num_hidden_layers": optional(small),
    "hidden_size": optional(small),
    "vocab_size": optional(small),
}
_SETTINGS = {
    "features": optional(text),
    "algorithm": optional(text),
    "sglang_args": optional(_TEXTS),
    "server_counts": optional(mapped(plain)),
    "selection": optional(mapped(plain)),
    "layer_channels": optional(listed(small)),
    "routers": optional(mapped(listed(small))),
}

#: whether a field's value is what it must be
_FIELDS: dict[str, Check] = {
    "side": one_of("train", "serve"),
    "level": one_of(*LEVELS),
    **dict.fromkeys(("host", "dtype", "device", "prompts_digest", "created", "flushed", "recorder", "recording"), text),
    "packages": mapped(text),
    **dict.fromkeys(("target", "draft"), Table(_FACTS, others=plain)),
    "settings": Table(_SETTINGS, others=plain),
    **dict.fromkeys(("changes", "argv", "warnings"), _TEXTS),
    "not_materialised": listed(mapped(text)),
    "stopped": optional(text),
    "waited_seconds": seconds,
    **dict.fromkeys(("rank", "tp_rank", "dp_rank", "format_version"), count),
    "ranks": lambda value: count(value) and 1 <= value <= _MOST_RANKS,
    "files": mapped(
        Table({"rows": count, "bytes": count}, others=count, required=("rows", "bytes")),
        names=lambda name: rank_of_file(name) is not None,
    ),
    "checksums": mapped(lambda value: text(value) and re.fullmatch("[0-9a-f]{16}", value) is not None),
}
