"""What goes wrong in a plugin and must not reach its server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from eagle_trace.errors import EagleTraceError


@contextlib.contextmanager
def guarded(logger: logging.Logger) -> Iterator[None]:
    """Log what goes wrong inside, as a sentence or with a bug's traceback: the server must serve all the same."""
    try:
        yield
    except EagleTraceError as error:
        logger.error("eagle-trace records nothing: %s", error)  # noqa: TRY400 (a sentence, not a bug)
    except Exception:
        logger.exception("eagle-trace records nothing")
