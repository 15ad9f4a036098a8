"""Who runs the parts of a diff: this thread, the cores of this machine, or a Dask cluster.

Every executor gives the results back in the order of the parts, and what becomes of them depends on nothing else: a
diff is the same to the last bit under any of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from eagle_trace_analysis.compare import Part, SiteFold

#: memory that the parts in flight may take together; a thread is never kept idle for less than `BYTES_A_WORKER`
IN_FLIGHT_BYTES = 256 << 20
BYTES_A_WORKER = 32 << 20

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
