"""First on PYTHONPATH of a command that `record --mode train` starts: arms its Python processes.

It hides another sitecustomize, which is run as if this one were not there.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

try:
    from eagle_trace_training import arm

    arm.install()
except ImportError as error:
    sys.stderr.write(f"eagle-trace: not recording this process: {error} (install eagle-trace for {sys.executable})\n")

_HERE = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 (pathlib would cost every process its import)
_spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path) != _HERE])
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sitecustomize"])
