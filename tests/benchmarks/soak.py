"""A long run of a real server: recorded and not, started and stopped, on a good and a bad disk, among bad clients.

    make soak                                       # 2,000 requests, 30 recordings; about six minutes
    python tests/benchmarks/soak.py --requests 200 --recordings 4

Prints how many answers differ from those of the server when it was new, what a request takes recorded and not, how long
the server waited for the disk, and what its processes hold before and after. Ends with status 1 if an answer differs,
the server waits longer than it may, a recording wedges, or the server dies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recorders"), str(ROOT / "analysis")]

from eagle_trace.demo import prompts_file  # noqa: E402
from eagle_trace.patience import MAX_WAIT  # noqa: E402
from eagle_trace_analysis.checkpoint.export import export  # noqa: E402
from tests.support.attached import Attached, server  # noqa: E402
from tests.support.disk_faults import FILE, HANG, LATE, QUEUE, touched_by_hosts  # noqa: E402
from tests.support.pairs import DRAFT, TARGET  # noqa: E402

#: what the disk does in one recording after the other: most of the time it is a good one
DISKS = ("", "", "", "0.2", "", HANG, "")
TOKENS = 12
CLIENTS = 8


@dataclass
class Seen:
    """What came of the requests of one kind."""

    seconds: list[float] = field(default_factory=list)
    differing: int = 0
    failed: int = 0
    #: what the server waited for the disk in one recording, at most, as its recorder counted [s]
    waited: float = 0.0

    def line(self) -> str:
        if not self.seconds:
            return "none"
        cuts = statistics.quantiles(self.seconds, n=100) if len(self.seconds) > 1 else self.seconds * 99
        return (
            f"{len(self.seconds)} answered, {self.differing} differ, {self.failed} failed; "
            f"p50 {cuts[49] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms, longest {max(self.seconds) * 1e3:.0f} ms"
        )


def texts(count: int) -> list[str]:
    """Prompts that all differ."""
    lines = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines() if '"prompt"' in line]
    return [f"{number}: {lines[number % len(lines)]}" for number in range(count)]


def ask(running: Attached, seen: Seen, wanted: dict[str, str], prompts: Sequence[str]) -> None:
    """Ask `prompts`, some at a time; answers are held against the `wanted` ones, or become those."""

    def one(prompt: str) -> None:
        started = time.monotonic()
        try:
            text = running.generate(prompt, tokens=TOKENS)["text"]
        except OSError:
            seen.failed += 1
            return
        seen.seconds.append(time.monotonic() - started)
        seen.differing += wanted.setdefault(prompt, text) != text

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, prompts))


def held(running: Attached) -> dict[str, tuple[int, int, int]]:
    """Threads, handles and megabytes of each process of the server that has to do with recording."""
    found = {}
    root = psutil.Process(running.process.pid)
    for process in [root, *root.children(recursive=True)]:
        name = "main" if process == root else process.name()
        if name == "main" or "scheduler" in name:
            found[name] = (process.num_threads(), process.num_fds(), process.memory_info().rss >> 20)
    return found


class Hostile(threading.Thread):
    """Clients that send what nobody should, all the time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.answers: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        """Go on until it is over."""
        deep = b'{"settings": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}"
        patterns = json.dumps({"match": "^(a+)+$", "requests": 1}).encode()
        many = json.dumps({"requests": -1, "roots": ",".join("0:1" for _ in range(100_000))}).encode()
        endless = json.dumps({"text": "a", "rid": "a" * 200_000, "sampling_params": {"max_new_tokens": 1}}).encode()
        sent: list[tuple[str, str, bytes | None]] = [
            ("POST", "/eagle_trace/start", deep),
            ("POST", "/eagle_trace/start", patterns),
            ("POST", "/eagle_trace/start", many),
            ("POST", "/eagle_trace/start", b"{" * 10_000),
            ("POST", "/eagle_trace/finish", deep),
            ("GET", "/eagle_trace/traces/..%2f..%2fetc", None),
            ("DELETE", "/eagle_trace/traces/nothing", None),
            ("GET", "/eagle_trace", None),
            ("POST", "/generate", endless),
        ]
        while not self.over.is_set():
            for method, path, body in sent:
                request = urllib.request.Request(self._url + path, body, method=method)
                request.add_header("Content-Type", "application/json")
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        self.answers[str(answer.status)] += 1
                except urllib.error.HTTPError as error:
                    self.answers[str(error.code)] += 1
                except OSError as error:
                    self.answers[type(error).__name__] += 1
            self.over.wait(0.5)


def record(running: Attached, disk: Path, fault: str, seen: Seen, wanted: dict[str, str], prompts: list[str]) -> str:
    """Ask `prompts` while recording them on a disk of that kind; how the recording ended."""
    name = f"soak-{time.monotonic_ns()}"
    running.post("/eagle_trace/start", {"requests": len(prompts)})
    put(disk, fault)
    ask(running, seen, wanted, prompts)
    try:
        running.post("/eagle_trace/finish", {}, timeout=120)
    except urllib.error.HTTPError as error:
        error.close()
    put(disk, "")
    running.wait_until("ready", 120)
    last = running.status["last"]
    seen.waited = max(seen.waited, (last or {}).get("waited_seconds", 0.0))
    for place in running.traces:
        shutil.rmtree(place, ignore_errors=True)
    return f"{last['outcome']}{' early' if last.get('stopped') else ''}" if last else f"unknown ({name})"


def put(disk: Path, fault: str) -> None:
    """Make the disk a good or a bad one, all at once."""
    other = disk.with_name("next")
    other.write_text(fault)
    other.replace(disk)


def main() -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="requests in all; half of them are recorded")
    parser.add_argument("--recordings", type=int, default=30, help="how often a recording is started and ended")
    parser.add_argument("--seconds", type=float, default=840.0, help="begin no further recording after so long")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle-trace-soak-") as folder:
        return soak(Path(folder), asked.requests, asked.recordings, asked.seconds)


def soak(folder: Path, requests: int, recordings: int, seconds: float) -> int:
    """The soak itself, in `folder`."""
    export(DRAFT, folder / "draft", target=TARGET)
    disk = folder / "disk"
    put(disk, "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/support/engine_site"), str(ROOT)])
    variables = {FILE: str(disk), QUEUE: str(1 << 20), "EAGLE_TRACE_REQUESTS": "0", "EAGLE_TRACE_RECORD_OTHERS": "1"}
    arguments = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    share = max(1, requests // (2 * recordings))
    prompts = texts(share)
    wanted: dict[str, str] = {}
    plain, recorded, ends = Seen(), Seen(), Counter[str]()
    with server(folder, TARGET, folder / "draft", *arguments, **variables) as running:
        ask(running, Seen(), wanted, prompts)
        record(running, disk, "", Seen(), wanted, prompts)  # what is made once is there before it is counted
        before = held(running)
        hostile = Hostile(running.url)
        hostile.start()
        started = time.monotonic()
        done = 0
        while done < recordings and time.monotonic() - started < seconds:
            fault = DISKS[done % len(DISKS)]
            ends[f"{fault or 'good'} disk: {record(running, disk, fault, recorded, wanted, prompts)}"] += 1
            ask(running, plain, wanted, prompts)
            done += 1
        hostile.over.set()
        hostile.join(60)
        time.sleep(11)  # what a disk that hung has left behind is gone
        after = held(running)
        alive = running.process.poll() is None
    print(f"{done} of {recordings} recordings in {time.monotonic() - started:.0f} s")
    print(f"not recorded: {plain.line()}")
    print(f"recorded:     {recorded.line()}")
    print(f"the server waited for the disk {recorded.waited:.2f} s in one recording at most")
    print(f"its threads that serve touched a bad disk: {'yes' if touched_by_hosts(disk) else 'never'}")
    for end, count in sorted(ends.items()):
        print(f"{count:3} x {end}")
    for name, (threads, handles, megabytes) in after.items():
        was = before[name]
        print(f"{name}: threads {was[0]} -> {threads}, handles {was[1]} -> {handles}, MB {was[2]} -> {megabytes}")
    print(f"hostile clients were answered: {dict(sorted(hostile.answers.items()))}")
    wrong = plain.differing + recorded.differing + plain.failed + recorded.failed
    wrong += recorded.waited > MAX_WAIT + LATE or bool(touched_by_hosts(disk))
    return 0 if alive and not wrong and done else 1


if __name__ == "__main__":
    raise SystemExit(main())
