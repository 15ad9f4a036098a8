"""Whoever compares the parts of a diff, it comes out the same to the last bit, in bounded memory; and what goes wrong
elsewhere is said in one sentence.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import LocalCluster
from typer.testing import CliRunner

from eagle_trace import open_trace
from eagle_trace.cli.main import app
from eagle_trace.errors import SchedulerError, TraceDamagedError, UsageError
from eagle_trace.extras import way_to
from eagle_trace.partfile import PartFile
from eagle_trace.sitedata import RowGroup
from eagle_trace.store import open_store
from eagle_trace_analysis import align, diff
from eagle_trace_analysis.comparison import compare
from eagle_trace_analysis.comparison import fold as folding
from eagle_trace_analysis.comparison.fold import Dask, Executor, Serial, Threads
from eagle_trace_analysis.report.json import to_json_text
from tests.support.synthetic import Side, make_prompts, only, write_trace

pytestmark = pytest.mark.slow

PROMPTS = make_prompts(6, tree=True)
LEVELS = ("values", "stats")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A diverging pair of traces at each level; the serve side has its prompts in another order."""
    folder = tmp_path_factory.mktemp("pairs")
    fault = only("embed", 1, lambda _, values: values * 1.045)
    found = {}
    for level in LEVELS:
        train = Side("train", dtype="bfloat16", level=level, noise_seed=1)
        serve = Side("serve", dtype="bfloat16", level=level, noise_seed=2, fault=fault)
        found[level] = (
            write_trace(folder / f"train-{level}", train, PROMPTS).path,
            write_trace(folder / f"serve-{level}", serve, PROMPTS).path,
        )
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # a task that ends its worker once would end it again
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0", silence_logs=50) as started,
    ):
        yield started


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row group a part of its own (parts are cut here, not on the workers)."""
    monkeypatch.setattr(compare, "PART_BYTES", 1)
    monkeypatch.setattr(compare, "LARGEST_PART_BYTES", 1)


def report(traces: tuple[Path, Path], executor: Executor) -> str:
    return to_json_text(diff(*map(open_trace, traces), executor=executor))


@pytest.mark.parametrize("level", LEVELS)
def test_threads_and_processes_give_the_result_of_one_thread_to_the_last_bit(
    level: str, pairs: dict[str, tuple[Path, Path]], cluster: LocalCluster, small_parts: None
) -> None:
    expected = report(pairs[level], Serial())
    assert '"verdict": "diverged"' in expected
    for workers in (1, 2, 5):
        assert report(pairs[level], Threads(workers)) == expected
    with Dask(cluster.scheduler_address) as executor:
        assert report(pairs[level], executor) == expected


def test_many_parts_of_many_sites_are_added_in_order(
    pairs: dict[str, tuple[Path, Path]], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = report(pairs["values"], Serial())
    original = compare.compare_values
    rng = np.random.default_rng(0)
    waits = iter(rng.uniform(0, 0.01, 10_000))

    def late(part: compare.Part) -> Any:
        time.sleep(next(waits))
        return original(part)

    monkeypatch.setattr(compare, "compare_values", late)
    assert report(pairs["values"], Threads(4)) == expected


# ---- the same bits on another machine


def test_sums_do_not_depend_on_the_kernels_of_blas() -> None:
    code = """
import numpy as np
from eagle_trace_analysis.comparison.sums import Accumulator
rng = np.random.default_rng(0)
x, y = (rng.standard_normal((96, 3001), dtype=np.float32) for _ in range(2))
total = Accumulator(3001, 96, logits=True)
total.add(x, y)
print(total.sums.result())
"""
    found = set()
    for kernel in ("Nehalem", "Haswell"):
        env = {**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": "4"}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1
    assert "kl_mean=" in found.pop()


# ---- what is in flight


class Busy:
    """Counts the parts at work, and the memory that they say they take.

    The first `together` parts wait for each other: they are at work at once, or the test fails.
    """

    def __init__(self, together: int) -> None:
        self._together, self._barrier = together, threading.Barrier(together)
        self.parts = self.bytes = self.most_parts = self.most_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, part: compare.Part) -> int:
        with self._lock:
            self.parts, self.bytes = self.parts + 1, self.bytes + part.bytes
            self.most_parts, self.most_bytes = max(self.most_parts, self.parts), max(self.most_bytes, self.bytes)
            self._together, waits = self._together - 1, self._together > 0
        if waits:
            self._barrier.wait(60)
        with self._lock:
            self.parts, self.bytes = self.parts - 1, self.bytes - part.bytes
        return part.bytes


def part_of(size: int) -> compare.Part:
    half = compare.Half((), (), np.zeros(0, dtype=np.int64))
    return compare.Part("embed", half, half, np.zeros(0, dtype=np.int32), size)


def test_parts_in_flight_are_bounded_in_number_and_memory() -> None:
    busy, asked = Busy(3), []

    def tasks(sizes: list[int]) -> Iterator[folding.Task]:
        for size in sizes:
            asked.append(size)
            yield busy, part_of(size)

    results = Threads(3).map(tasks([1] * 40))
    assert next(results) == 1
    assert len(asked) <= 9, "parts are not made before there is room for them"
    assert list(results) == [1] * 39
    assert busy.most_parts == 3
    large, busy = folding.IN_FLIGHT_BYTES // 2, Busy(2)
    assert list(Threads(8).map(tasks([large] * 9))) == [large] * 9
    assert busy.most_bytes == folding.IN_FLIGHT_BYTES
    assert list(Threads(8).map(tasks([4 * large, 4 * large]))) == [4 * large] * 2, "one part may always run"


def test_no_thread_is_left_behind(pairs: dict[str, tuple[Path, Path]]) -> None:
    report(pairs["values"], Threads(3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("eagle-trace-diff")]


def test_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert Threads().workers == 3
    assert Threads(7).workers == 7


# ---- what goes wrong


def test_a_file_that_is_damaged_on_the_way_is_named_under_any_executor(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, cluster: LocalCluster
) -> None:
    train, serve = (open_trace(shutil.copytree(path, tmp_path / path.name)) for path in pairs["values"])
    site = compare.ValuesFold(train, serve, "embed", align(train, serve).pairs("embed"))
    (data,) = serve.site_data("embed")
    part = data.groups[0].part
    path = Path(part.store.place) / part.name
    path.write_bytes(path.read_bytes()[:100])
    with Dask(cluster.scheduler_address) as on_cluster:
        for executor in (Serial(), Threads(2), on_cluster):
            with pytest.raises(TraceDamagedError, match=r"site=embed.*record the trace again"):
                list(folding.fold([site], executor))


def test_a_worker_that_does_not_see_the_traces_is_told_so(
    pairs: dict[str, tuple[Path, Path]], cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers' machine has no such folder: parts name one that is not there."""

    def moved(group: RowGroup) -> RowGroup:
        return replace(group, part=PartFile(open_store(Path("/elsewhere")), group.part.name, group.part.rows))

    def elsewhere(part: compare.Part) -> compare.Part:
        data = tuple(replace(one, groups=tuple(map(moved, one.groups))) for one in part.serve.data)
        return replace(part, serve=replace(part.serve, data=data))

    original = compare.partition
    monkeypatch.setattr(compare, "partition", lambda *args: [elsewhere(part) for part in original(*args)])
    with (
        Dask(cluster.scheduler_address) as executor,
        pytest.raises(SchedulerError, match=r"cannot read what is read here.*/elsewhere.*same path"),
    ):
        report(pairs["values"], executor)


def test_a_worker_that_dies_is_no_traceback(cluster: LocalCluster) -> None:
    with Dask(cluster.scheduler_address) as executor:
        task = die, part_of(1)
        with pytest.raises(SchedulerError, match="lost a part"):
            list(executor.map([task]))


def die(part: compare.Part) -> None:
    os._exit(1)


def test_other_versions_on_the_workers_are_refused(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "0.0.1")
    with pytest.raises(SchedulerError, match=r"has numpy .* every worker needs .*numpy 0\.0\.1"):
        Dask(cluster.scheduler_address)


def test_a_scheduler_that_does_not_answer(pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "ANSWER_SECONDS", 0.5)
    for url in ("tcp://127.0.0.1:9", "nonsense"):
        run = CliRunner().invoke(app, ["diff", *map(str, pairs["values"]), "--scheduler", url])
        assert run.exit_code == 2
        assert f"no Dask scheduler answers at {url}" in run.output
        assert "Traceback" not in run.output


def test_what_is_no_address_is_not_waited_for(pairs: dict[str, tuple[Path, Path]]) -> None:
    code = (
        "from eagle_trace.cli.main import main; from eagle_trace_analysis.comparison import fold;"
        "fold.ANSWER_SECONDS = 10_000; main()"
    )
    command = [sys.executable, "-c", code, "diff", *map(str, pairs["values"]), "--scheduler", "nonsense"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2
    assert "nonsense, which is no address" in run.stderr
    assert "Traceback" not in run.stderr, "nor from Dask's destructors, when Python ends"


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=50) as empty:
        for seconds in (0.5, 5.0, 50.0):  # as long as this machine takes to connect
            monkeypatch.setattr(folding, "ANSWER_SECONDS", seconds)
            with pytest.raises(SchedulerError) as refused:
                Dask(empty.scheduler_address)
            if "no Dask scheduler answers" not in str(refused.value):
                break
    assert f"dask worker {empty.scheduler_address}" in str(refused.value)


def test_without_dask_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=re.escape(way_to("dask"))):
        Dask("tcp://127.0.0.1:8786")


def test_workers_and_scheduler_together_are_refused(pairs: dict[str, tuple[Path, Path]]) -> None:
    options = ["--workers", "2", "--scheduler", "tcp://127.0.0.1:8786"]
    run = CliRunner().invoke(app, ["diff", *map(str, pairs["values"]), *options])
    assert (run.exit_code, "give one of them" in run.output) == (2, True)


def test_the_command_line_gives_the_same_report_on_a_cluster(
    pairs: dict[str, tuple[Path, Path]], cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths too: the workers run elsewhere."""
    folder = pairs["values"][0].parent
    monkeypatch.chdir(folder)
    command = ["diff", *(path.name for path in pairs["values"]), "--format", "json"]
    here = CliRunner().invoke(app, [*command, "--workers", "2"])
    there = CliRunner().invoke(app, [*command, "--scheduler", cluster.scheduler_address])
    assert here.exit_code == there.exit_code == 1
    assert here.stdout == there.stdout
