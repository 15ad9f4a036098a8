"""A pytest plugin: the fixture `eagle_trace`, with which a test records a draft, compares, and asserts agreement.

    def test_the_draft_is_served_as_it_was_trained(eagle_trace):
        result = eagle_trace.compare(target="models/target", trained="models/draft", prompts="tests/prompts.jsonl")
        eagle_trace.assert_agrees(result)

A failure's text is the report that `eagle-trace diff` prints. Loading the plugin imports nothing but this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from eagle_trace.reader import Trace
    from eagle_trace_analysis import Diff

Place = str | Path


@dataclass
class EagleTrace:
    """What the fixture gives to a test.

    Attributes:
        folder: where recordings go; a new one for each test.
    """

    folder: Path
    _count: int = field(default=0, repr=False)

    def record(self, *, target: Place, draft: Place, prompts: Place, **options: Any) -> Trace:
        """Start a server, have it answer `prompts`, and return its trace.

        Args:
            target, draft: checkpoints; the draft as it is served.
            prompts: prompts file.
            options: ``host`` (default: the one that is installed) and the options of `eagle-trace record --mode serve`,
                with underscores (``level="sketch"``, ``max_new_tokens=16``, ``host_args=(...)``).

        Raises:
            EagleTraceError: as the command does.
        """
        from eagle_trace.reader import open_trace
        from eagle_trace.recording.hosts import find_host

        host = find_host("server", options.pop("host", None))
        out = self._out("serve")
        host.record(target=Path(target), draft=Path(draft), prompts=Path(prompts), out=out, **options)
        return open_trace(out)

    def replay(self, serve: Trace | Place, *, target: Place, draft: Place, **options: Any) -> Trace:
        """Run a server's tokens through the training forward and return its trace.

        Args:
            serve: trace of the server.
            target, draft: checkpoints; the draft as it was trained.
            options: those of `eagle-trace record --mode train`, with underscores.

        Raises:
            EagleTraceError: as the command does.
        """
        from eagle_trace.reader import open_trace
        from eagle_trace.recording.hosts import find_host

        host = find_host("trainer", options.pop("host", None), draft=Path(draft))
        out = self._out("train")
        host.record(target=Path(target), draft=Path(draft), replay=_place(serve), out=out, **options)
        return open_trace(out)

    def compare(
        self,
        *,
        target: Place,
        trained: Place | None = None,
        deployed: Place | None = None,
        prompts: Place | None = None,
        host: str | None = None,
        baseline: Trace | Place | None = None,
        tolerance: float = 4.0,
        max_drop: float | None = None,
        **ask: Any,
    ) -> Diff:
        """The whole of `eagle-trace compare`, with the fixture's folder as ``--keep``.

        Args:
            target, trained, deployed, prompts, host: as the command's.
            baseline, tolerance, max_drop: as those of `diff` below.
            ask: fields of `eagle_trace.jobs.servers.Ask` (``max_new_tokens=16``, ``level="sketch"``, ...).

        Raises:
            EagleTraceError: something could not be recorded.
        """
        from eagle_trace.jobs.comparison import Asked, Comparison
        from eagle_trace.jobs.servers import Ask, servers_of
        from eagle_trace.jobs.workspace import Workspace

        asked = Asked(
            Path(target), _path(trained), _path(deployed), _path(prompts),
            tuple(servers_of([host] if host else [], [], None, {})), Ask(**ask),
        )  # fmt: skip
        comparison = Comparison(asked, Workspace(self._out("compare", make=True), kept=True))
        reference, other = comparison.record()
        return self.diff(reference, other, baseline=baseline, tolerance=tolerance, max_drop=max_drop)

    def diff(
        self,
        reference: Trace | Place,
        other: Trace | Place,
        *,
        baseline: Trace | Place | None = None,
        tolerance: float = 4.0,
        max_drop: float | None = None,
        diagnose: bool = True,
    ) -> Diff:
        """Compare two traces, as `eagle-trace diff` does with these options.

        Raises:
            EagleTraceError: a trace cannot be read.
        """
        from eagle_trace_analysis.gate.compared import Compare

        compare = Compare(tolerance=tolerance, max_drop=max_drop, diagnose=diagnose)
        before = _trace(baseline) if baseline is not None else None
        return compare(_trace(reference), _trace(other), baseline=before)

    def assert_agrees(self, result: Diff) -> None:
        """Fail the test, with the report as its text, unless the exit status of `result` is 0."""
        __tracebackhide__ = True
        if result.exit_status:
            from eagle_trace_analysis.report.text import render

            pytest.fail(render(result, verbose=False), pytrace=False)

    def _out(self, name: str, *, make: bool = False) -> Path:
        self._count += 1
        out = self.folder / f"{name}{self._count}.trace"
        if make:
            out = out.with_suffix("")
            out.mkdir()
        return out


@pytest.fixture
def eagle_trace(tmp_path: Path) -> EagleTrace:
    """Record a draft where it is served and where it was trained, compare, and assert that the two agree."""
    return EagleTrace(tmp_path)


def _path(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


def _place(trace: Trace | Place) -> Any:
    from eagle_trace.store import as_place

    return as_place(str(trace)) if isinstance(trace, str | Path) else trace.path


def _trace(trace: Trace | Place) -> Trace:
    from eagle_trace.reader import open_trace

    return open_trace(trace) if isinstance(trace, str | Path) else trace
