"""Which files a trace consists of, by name: a server gives away nothing else, and nothing else is taken from one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from eagle_trace.manifest import rank_of_seal
from eagle_trace.schema import TABLES

_PART = r"rank(?:0|[1-9]\d{0,8})-\d{5,9}\.parquet"
_SITE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*"
_DATA = re.compile(rf"(?:{'|'.join(TABLES)})\.parquet(?:/{_PART})?|values/site={_SITE}/{_PART}", re.ASCII)
#: longer than any name above gets, and short enough for a tar header
LONGEST_NAME = 200


def is_trace_file(name: str) -> bool:
    """Whether `name`, relative to a trace, is one of its manifests, a part of a table, or a part of a site."""
    if len(name) > LONGEST_NAME:
        return False
    return rank_of_seal(name) is not None or _DATA.fullmatch(name) is not None


def is_trace_folder(name: str) -> bool:
    """Whether `name`, relative to a trace, is a folder in which it keeps files; the trace itself is ``""``."""
    return name in ("", "values") or is_trace_file(f"{name}/rank0-00000.parquet")


def trace_files(path: Path) -> dict[str, int]:
    """Name and bytes of the files of the trace at `path`: regular ones below real folders. Manifests come last.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[str, int] = {}
    folders = [""]
    for folder in folders:
        with os.scandir(path / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False) and is_trace_folder(name):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False) and is_trace_file(name):
                    found[name] = entry.stat(follow_symlinks=False).st_size
    return dict(sorted(found.items(), key=lambda item: (rank_of_seal(item[0]) is not None, item[0])))
