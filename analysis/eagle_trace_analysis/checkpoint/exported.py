"""The folder that an export writes: whole or not at all, and known again by a mark when another is to replace it.

Nothing in a config or in a tensor's name tells an exported draft from one that was trained in a server's format, so an
export notes a digest of each of its files in a file of its own, which neither engine looks at. A folder that is not as
its mark says holds somebody's work and stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from eagle_trace import __version__
from eagle_trace.errors import OutputExistsError, RecordingError
from eagle_trace.store import reason

#: its name begins with a dot, so that no engine's pattern of files matches it
MARK = ".eagle-trace-export"
CHANGED = "{} was changed while the draft was written: it stays, choose another folder"


@contextmanager
def written_whole(out: Path, *, force: bool = False, sources: Iterable[Path | None] = ()) -> Iterator[Path]:
    """An empty folder to write a draft into, which is at `out` once all of it is on the disk.

    What was at `out` before goes only then. A draft that is replaced lies beside it under a hidden name for the moment
    of the swap, so that one of the two is whole whatever happens.

    Args:
        out: where the draft is to be; missing, or an empty folder.
        force: whether it may hold an exported draft as well.
        sources: folders that are read meanwhile.

    Raises:
        OutputExistsError: `out` is a link, holds something and `force` is off, or holds what no export wrote, or what
            was changed since, or one of the `sources`.
        RecordingError: it cannot be written; everything is as it was.
    """
    replaces = _is_to_be_replaced(out, force=force, sources=tuple(sources))
    place = out.absolute()
    empty = place.is_dir() and not replaces
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # an empty folder stays the one that it is: it may be where a disk is mounted, or somebody's working directory
        hidden = Path(tempfile.mkdtemp(prefix=f".{place.name[:100]}.", dir=place if empty else place.parent))
        try:
            new = hidden / "draft"
            new.mkdir()
            yield new
            _mark(new)
            if empty:
                _move_into(new, place)
            elif replaces:
                _swap(new, place, hidden.with_name(f"{hidden.name}.old"))
            else:
                new.rename(place)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RecordingError(f"cannot write {out}: {reason(error)}") from error


def _is_to_be_replaced(out: Path, *, force: bool, sources: tuple[Path | None, ...]) -> bool:
    """Whether an exported draft is at `out`; raises OutputExistsError for anything else that is there."""
    stays = f"{out} exists and --force does not replace it"
    if out.is_symlink():
        raise OutputExistsError(f"{out} is a link to {out.resolve()}, and an export follows none: name that folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not force:
        raise OutputExistsError(f"{out} exists: choose another folder, or --force to replace it")
    if any(source is not None and _reads(source, out.resolve()) for source in sources):
        raise OutputExistsError(f"{stays}: it is what is exported, so choose another folder")
    if not is_as_exported(out):
        raise OutputExistsError(
            f"{stays}: it is not a folder that eagle-trace export wrote, or it was changed since, so choose another "
            "folder"
        )
    return True


def _reads(source: Path, out: Path) -> bool:
    """Whether a source is the folder `out`, or has a file in it, be it by a link."""
    files = source.iterdir() if source.is_dir() else ()
    return source.resolve() == out or any(file.resolve().parent == out for file in files)


def is_as_exported(folder: Path) -> bool:
    """Whether a folder holds what an export wrote there, every byte of it, and nothing else."""
    if not folder.is_dir():
        return False
    files = {file.name: file for file in folder.iterdir()}
    if MARK not in files or any(file.is_symlink() or not file.is_file() for file in files.values()):
        return False
    try:
        noted = json.loads(files.pop(MARK).read_text(encoding="utf-8"))["files"]
        return isinstance(noted, dict) and noted.keys() == files.keys() and noted == _digests(files.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _mark(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream)  # what takes another's place must be on the disk, not on its way there
    written = {"written_by": f"eagle-trace {__version__}", "files": _digests(folder.iterdir())}
    (folder / MARK).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files by name, as hex digits."""
    found = {}
    for file in files:
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _move_into(new: Path, out: Path) -> None:
    """Put what is in `new` into `out`, in which nothing is but the folder that `new` is in."""
    if any(one != new.parent for one in out.iterdir()):
        raise OutputExistsError(CHANGED.format(out))
    moved: list[Path] = []
    try:
        # the config last: a folder without it is not taken for a checkpoint
        for file in sorted(new.iterdir(), key=lambda file: file.name == "config.json"):
            moved.append(file.rename(out / file.name))
    except BaseException:
        for file in moved:
            file.unlink()
        raise


def _swap(new: Path, out: Path, aside: Path) -> None:
    """Put `new` in the place of the exported draft at `out`, which lies at `aside` for the moment."""
    new.chmod(stat.S_IMODE(out.stat().st_mode))
    try:
        out.rename(aside)
        # writing takes a while, in which somebody may have put something there
        if not is_as_exported(aside):
            raise OutputExistsError(CHANGED.format(out))  # noqa: TRY301
        new.rename(out)
    except BaseException:
        if aside.exists() and not out.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
