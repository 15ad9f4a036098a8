"""Set before numpy is imported: small matrices on many BLAS threads take up to 70 times as long on a busy machine."""

import gc
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection() -> None:
    """What is imported stays: looking through it for garbage takes seconds and finds nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on there may be garbage again."""
    gc.freeze()
    gc.enable()
