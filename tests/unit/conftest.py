"""Set before torch is imported: a process for each core runs tests, so threads would only wait for each other."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _no_power_cuts() -> Iterator[None]:
    """A test's trace need not survive one: waiting for the disk would be most of the time it takes."""
    with mock.patch("os.fsync"):
        yield
