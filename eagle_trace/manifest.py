"""The manifest: what made a trace. Written last, atomically, it is the trace's seal."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from eagle_trace.errors import TraceDamagedError, TraceVersionError

FORMAT_VERSION = 1
SEAL = "manifest.json"
#: stands in for the seal while recording: says what was being made, and lets `allow_partial` read what is whole
OPEN_SEAL = "manifest.partial.json"

Side = Literal["train", "serve"]


def seal_name(rank: int) -> str:
    """File name of a rank's manifest."""
    return SEAL if rank == 0 else f"manifest.rank{rank}.json"


def open_seal_name(rank: int) -> str:
    """File name of what stands in for a rank's manifest while it records."""
    return OPEN_SEAL if rank == 0 else f"manifest.rank{rank}.partial.json"


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
        stopped: None, or why recording stopped early (``max-bytes``).
        rank, ranks: number of the process that wrote this manifest, and how many write into the trace.
        tp_rank: which part of each sharded site this rank holds; 0 speaks for its group.
        files: rows and bytes of every file, by path relative to the trace.
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
    rank: int = 0
    ranks: int = 1
    tp_rank: int = 0
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The manifest as indented JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        """Parse a manifest read from `where` (for messages only).

        Raises:
            TraceDamagedError: not JSON, or a required field is missing.
            TraceVersionError: another format version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceDamagedError(f"{where} is not JSON ({error}): record the trace again") from error
        if not isinstance(data, dict) or "format_version" not in data:
            raise TraceDamagedError(f"{where} is not a manifest (no format_version): is this folder a trace?")
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise TraceVersionError(
                f"{where} has format version {version}, this eagle-trace reads {FORMAT_VERSION}: "
                "record again, or use the eagle-trace version that wrote it"
            )
        known = {f.name for f in fields(cls)}
        missing = {"side", "level", "host"} - set(data)
        if missing:
            raise TraceDamagedError(f"{where} lacks {', '.join(sorted(missing))}: record the trace again")
        return cls(**{key: value for key, value in data.items() if key in known})

    def write(self, folder: Path, name: str = SEAL) -> None:
        """Write atomically: a reader sees the whole manifest or none."""
        partial = folder / f".{name}.tmp"
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(self.to_json())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(folder / name)
