"""Where a trace lies: a local folder, or a folder on any filesystem that fsspec knows (``s3://bucket/run.trace``).

Names of files are relative to the trace, with ``/``. Every failure is an `OSError`, whatever library it came from.
"""

from __future__ import annotations

from pathlib import Path

from eagle_trace.errors import UsageError
from eagle_trace.store.base import Place, Sink, Store, as_place, is_url, join, reason, same_place
from eagle_trace.store.local import FOLDER_MODE, LocalStore
from eagle_trace.store.remote import RemoteStore

__all__ = [
    "FOLDER_MODE",
    "Place",
    "Sink",
    "Store",
    "as_place",
    "is_url",
    "join",
    "open_store",
    "reason",
    "same_place",
]

#: packages that fsspec needs for a protocol and does not bring along
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "hf"}


def open_store(place: Place) -> Store:
    """The store at `place`.

    Raises:
        UsageError: nobody here knows how to reach it; the message names the package to install.
    """
    if not is_url(place):
        return LocalStore(Path(place))
    import fsspec

    protocol = str(place).split("://", 1)[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(str(place))
    except ImportError as error:
        package = _DRIVERS.get(protocol, error.name or protocol)
        raise UsageError(f"{place} needs a package that is not installed: pip install {package}") from error
    except ValueError as error:
        raise UsageError(f"{place}: {reason(error)}") from error
    except Exception as error:  # every driver has errors of its own
        raise UsageError(f"cannot reach {place}: {reason(error)}") from error
    if protocol in ("file", "local"):
        return LocalStore(Path(root))
    return RemoteStore(str(place), filesystem, root)
