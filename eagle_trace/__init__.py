"""eagle-trace: record the training and the serving forward of an EAGLE-3 draft model, and find where they part.

>>> trace = open_trace("serve.trace")
>>> trace.frame("fc.out")     # keys, statistics and values of one site, as a pandas frame
>>> trace.values("fc.out")    # float32 [rows, width]
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_trace.reader import Trace, open_trace

__all__ = ["Trace", "open_trace"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # pyarrow and pandas are imported when a trace is opened, so that `--help` and an unarmed plugin stay fast
    if name in __all__:
        from eagle_trace import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
