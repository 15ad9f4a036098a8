"""Who runs the parts of a diff: this thread, the cores of this machine, or a Dask cluster.

Every executor gives the results back in the order of the parts, and what becomes of them depends on nothing else: a
diff is the same to the last bit under any of them.
"""

from __future__ import annotations

import os
import platform
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

import eagle_trace
from eagle_trace.errors import SchedulerError, TraceError, UsageError
from eagle_trace.extras import way_to
from eagle_trace_analysis.comparison.compare import Part, SiteFold

#: memory that the parts in flight may take together; a thread is never kept idle for less than `BYTES_A_WORKER`
IN_FLIGHT_BYTES = 256 << 20
BYTES_A_WORKER = 32 << 20
#: how long a scheduler, and then its first worker, may take to answer
ANSWER_SECONDS = 10.0

Task = tuple[Callable[[Part], Any], Part]


class Executor(Protocol):
    """Runs tasks and gives their results back in the order of the tasks."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The result of each task. Tasks are asked for one by one, as there is room for them."""
        ...


class Serial:
    """Runs every part in the calling thread."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The result of each task."""
        for function, part in tasks:
            yield function(part)


class Threads:
    """Runs parts on threads of this process; NumPy and Arrow let go of the interpreter for nearly all of the work.

    Args:
        workers: number of threads; as many as this process may use cores if None.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or available_cores()

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The result of each task."""
        room = max(IN_FLIGHT_BYTES, BYTES_A_WORKER * self.workers)
        waiting: deque[tuple[Future[Any], int]] = deque()
        held = 0
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="eagle-trace-diff")
        try:
            for function, part in tasks:
                while waiting and (len(waiting) > 2 * self.workers or held + part.bytes > room):
                    future, size = waiting.popleft()
                    yield future.result()
                    held -= size
                waiting.append((pool.submit(function, part), part.bytes))
                held += part.bytes
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)


class Dask:
    """Runs parts on the workers of a Dask cluster, which must reach both traces by the same paths or URLs.

    The numbers are those of this machine to the last bit where workers have the same versions (which is checked) and
    processors with the same instructions (only KL and total variation depend on those).

    Args:
        scheduler: its address, ``tcp://host:8786``.

    Raises:
        UsageError: Dask is not installed here.
        SchedulerError: no scheduler answers, it has no workers, or they cannot run the comparison.
    """

    def __init__(self, scheduler: str) -> None:
        try:
            from distributed import Client
        except ImportError as error:
            raise UsageError(f"--scheduler needs Dask: {way_to('dask')}") from error
        self.scheduler = scheduler
        if not re.search(r"://|:\d+$", scheduler):
            # Dask would say so too, and then hang for 20 seconds in a destructor of its own
            raise SchedulerError(
                f"no Dask scheduler answers at {scheduler}, which is no address: they look like tcp://host:8786"
            )
        try:
            self._client = Client(scheduler, timeout=ANSWER_SECONDS, set_as_default=False)
        except Exception as error:  # what answers there may be anything
            raise SchedulerError(
                f"no Dask scheduler answers at {scheduler} ({_first_line(error)}): start one with `dask scheduler`, "
                "or leave out --scheduler"
            ) from error
        try:
            self._client.wait_for_workers(1, timeout=ANSWER_SECONDS)
            self._check_versions()
        except TimeoutError as error:
            self._client.close()
            raise SchedulerError(
                f"the Dask scheduler at {scheduler} has no workers: start some with `dask worker {scheduler}`"
            ) from error
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Dask:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _check_versions(self) -> None:
        here = versions()
        advice = f"every worker needs {', '.join(f'{name} {version}' for name, version in here.items())}"
        try:
            found: dict[str, dict[str, str]] = self._client.run(versions)
        except Exception as error:  # Dask has no type for what a worker cannot import
            raise SchedulerError(
                f"workers of {self.scheduler} cannot run the comparison ({_first_line(error)}): {advice}"
            ) from error
        for worker, there in found.items():
            for name, version in here.items():
                if there[name] != version:
                    raise SchedulerError(f"worker {worker} has {name} {there[name]}: {advice}")

    def map(self, tasks: Iterable[Task]) -> Iterator[Any]:
        """The result of each task; a part that fails for a worker that dies is run again elsewhere."""
        waiting: deque[Any] = deque()
        try:
            for function, part in tasks:
                while len(waiting) > 2 * sum(self._client.nthreads().values()):
                    yield self._result(waiting.popleft())
                # pure: Dask would give back what it remembers of files that may have changed
                waiting.append(self._client.submit(function, part, pure=False))
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            self._client.cancel(list(waiting))

    def _result(self, future: Any) -> Any:
        try:
            return future.result()
        except TraceError as error:
            # of a file that is damaged, Arrow says OSError too, but without a number
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno):
                raise
            raise SchedulerError(
                f"a worker of {self.scheduler} cannot read what is read here ({_first_line(error.__cause__)}): "
                "every worker must see both traces at the same path or URL"
            ) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] != "distributed":
                raise
            raise SchedulerError(
                f"the cluster at {self.scheduler} lost a part of the comparison ({type(error).__name__}: "
                f"{_first_line(error)}): look at its workers' logs, or leave out --scheduler"
            ) from error


def versions() -> dict[str, str]:
    """What must be the same everywhere for the numbers to be the same."""
    return {
        "eagle-trace": eagle_trace.__version__,
        "numpy": np.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fold(sites: Iterable[SiteFold], executor: Executor) -> Iterator[SiteFold]:
    """Run all parts of all sites as one stream; gives back each site when its last part is in, in order.

    One stream, so that sites of one part keep every worker busy too. Sites are asked for as there is room for parts.
    """
    started: deque[SiteFold] = deque()

    def tasks() -> Iterator[Task]:
        for site in sites:
            started.append(site)
            for part in site.parts:
                yield site.compare, part

    missing = 0
    for result in executor.map(tasks()):
        site = started[0]
        missing = missing or len(site.parts)
        site.add(result)
        missing -= 1
        if not missing:
            yield started.popleft()
