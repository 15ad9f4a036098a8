"""The manifest: what made a trace. Written last, atomically, it is the trace's seal."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from eagle_trace.capture import LEVELS
from eagle_trace.errors import TraceDamagedError, TraceNotFoundError, TraceVersionError
from eagle_trace.store import Store, join

FORMAT_VERSION = 1
SEAL = "manifest.json"
#: stands in for the seal while recording: what was being made, and which rows of which file are whole
OPEN_SEAL = "manifest.partial.json"

_ATTEMPTS = 10
#: options that are followed by what nobody else may know (``--api-key``, ``--hf-token``, ``--ssl-keyfile-password``)
_SECRET = re.compile(r"--?(?:.*[-_.])?(?:key|token|password|passwd|secret)", re.IGNORECASE)

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
        draft: the same for the draft, plus checkpoint keys that the host dropped and parameters it did not find.
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
        files: rows, bytes and crc32 of every file, by path relative to the trace.
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
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def ended_early(self) -> str | None:
        """A clause that says why the recording ended before it was done, None if it did not; for every reader."""
        return f"the recording ended early: {self.stopped}" if self.stopped else None

    def to_json(self) -> str:
        """The manifest as indented JSON text."""
        facts = vars(self)
        for _ in range(_ATTEMPTS):
            # the recorder may add a setting or a warning just now, from a thread of its own
            with contextlib.suppress(RuntimeError):
                return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"

    def to_bytes(self) -> bytes:
        """The manifest as it lies in its file; what UTF-8 cannot hold (a command line may) is escaped."""
        return self.to_json().encode("utf-8", "backslashreplace")

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Parse a manifest read from `where` (for messages only).

        Raises:
            TraceDamagedError: not JSON, a required field is missing, or a field is not of its type.
            TraceVersionError: another format version.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else error
            raise TraceDamagedError(f"{where} is not JSON ({why}): record the trace again") from error
        if not isinstance(data, dict) or "format_version" not in data:
            raise TraceDamagedError(f"{where} is not a manifest (no format_version): is this folder a trace?")
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise TraceVersionError(
                f"{where} has format version {version!s:.40}, this eagle-trace reads {FORMAT_VERSION}: "
                "record again, or use the eagle-trace version that wrote it"
            )
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        missing = {"side", "level", "host"} - set(known)
        if missing:
            raise TraceDamagedError(f"{where} lacks {', '.join(sorted(missing))}: record the trace again")
        for name, value in known.items():
            if not _CHECKS[name](value):
                raise TraceDamagedError(
                    f"{where} is damaged: its {name} is not what it must be: record the trace again"
                )
        return cls(**known)

    def write(self, store: Store, name: str = SEAL) -> None:
        """Write atomically: a reader sees the whole manifest or none."""
        store.write(name, self.to_bytes())


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of that file name (see `Manifest.from_json`)."""
    where = join(store.place, name)
    try:
        return Manifest.from_json(store.read(name), where)
    except OSError as error:
        raise TraceDamagedError(f"{where} cannot be read ({error}): record the trace again") from error


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
    manifests = {}
    for rank in sorted({rank for rank, _ in seals}):
        name = seal_name(rank) if rank in sealed else open_seal_name(rank)
        manifest = manifests[rank] = read_manifest(store, name)
        if manifest.rank != rank:
            raise TraceDamagedError(
                f"{join(store.place, name)} is the manifest of rank {manifest.rank}: it was renamed"
            )
    kinds = {(one.side, one.level, one.ranks) for one in manifests.values()}
    if len(kinds) > 1:
        raise TraceDamagedError(f"{store.place} holds ranks of different recordings: record the trace again")
    return manifests, sealed


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


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _inside(name)
        and isinstance(facts, dict)
        and all(map(_count, facts.values()))
        and {"rows", "bytes"} <= set(facts)
        for name, facts in value.items()
    )


def _inside(name: str) -> bool:
    """Whether `name` is a file of the trace itself, not one elsewhere."""
    return bool(name) and not name.startswith("/") and not {"..", ""} & set(name.split("/")) and "\\" not in name


#: whether a field's value is of its type
_CHECKS = {
    "side": lambda value: value in ("train", "serve"),
    "level": lambda value: value in LEVELS,
    **dict.fromkeys(("host", "dtype", "device", "prompts_digest", "created", "flushed", "recorder"), _text),
    "packages": _of_texts,
    **dict.fromkeys(("target", "draft", "settings"), _mapping),
    **dict.fromkeys(("changes", "argv", "warnings"), _texts),
    "not_materialised": lambda value: isinstance(value, list) and all(map(_of_texts, value)),
    "stopped": lambda value: value is None or _text(value),
    "waited_seconds": _seconds,
    **dict.fromkeys(("rank", "tp_rank", "dp_rank", "format_version"), _count),
    "ranks": lambda value: _count(value) and 1 <= value <= 1 << 16,
    "files": _files,
}
