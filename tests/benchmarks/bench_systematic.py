"""What looking for systematic errors adds to a diff: CPU time with and without, paired, on two traces.

    python tests/benchmarks/bench_systematic.py train.trace serve.trace

Rounds alternate between the two, so that both see the same machine; the figure is the median of the paired ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from unittest import mock

# small matrices on many threads would measure the threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.replay.replay import Measured, Recomputed

ROUNDS = 7


def seconds(train: Trace, serve: Trace) -> float:
    """CPU time of one diff with its diagnosis."""
    start = time.process_time()
    diagnosed(diff(train, serve), train, serve)
    return time.process_time() - start


def seconds_without(train: Trace, serve: Trace) -> float:
    """The same with sizes alone judged."""
    with mock.patch.object(Recomputed, "systematic", None), mock.patch.object(Measured, "excess", 0.0):
        return seconds(train, serve)


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("train")
    parser.add_argument("serve")
    options = parser.parse_args()
    traces = open_trace(options.train), open_trace(options.serve)
    seconds(*traces)
    rounds = [(seconds(*traces), seconds_without(*traces)) for _ in range(ROUNDS)]
    with_, without = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(a / b for a, b in rounds)
    print(f"diff with diagnosis: {with_:.2f} s, without systematic errors {without:.2f} s, paired ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
