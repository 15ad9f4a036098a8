"""eagle-trace beside other ways to look into SGLang: what recording costs, what comparing costs, who names the fault.

    python tests/benchmarks/bench_peers.py --peers FOLDER [--target DIR --trained DIR] [--markdown FILE]

FOLDER is where the packages of the peers are installed (pinned, once, about 200 MB; nothing of SGLang's is replaced).
Without a pair of models the demo pair is used; docs/walkthrough-smollm2.md says how to make the other pair of
docs/peers.md. Minutes: about 15 on two cores for the demo pair, twice that for the other, where msprobe also fills
20 GB of disk for a while.

Recording: one server of eagle-trace answers the prompts unrecorded and at each level in turn; each peer has a server of
its own, asked in turn with the unrecorded one, because most of them are on from start to end. The ratio is that of CPU
time (user and system, all processes of the server) for the same prompts; the median of the rounds is given. Comparing:
each tool's dumps of the healthy deployment and of a faulty one (layer ids as they stand in the training config, not
shifted for SGLang); eagle-trace compares its trace of the faulty one with training's forward on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from peers import tools
from peers.measure import HostFailedError, PeerServer, Run, run, size, tree_cpu

import sglang_cpu_eagle as cpu
from eagle_trace.capture import DTYPES
from eagle_trace.demo import models_dir, prompts_file
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import open_trace
from eagle_trace.sketch import buckets, stored_dtype
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_serving.host import ServerOptions
from eagle_trace_serving.requests import Request
from eagle_trace_serving.server import Server
from eagle_trace_sglang.deployment import server_arguments

LEVELS = ("shapes", "stats", "sketch", "values")
NEW_TOKENS, BATCH = 48, 8
REPEATS = 3
WIDE = 7168


@dataclass
class Recording:
    """What one way of recording cost: CPU time (s) of each round and of the unrecorded pass before it, bytes and files
    of a pass; or why it failed."""

    name: str
    spent: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    written: tuple[int, int] = (0, 0)
    failure: str = ""


@dataclass
class Compared:
    """What one comparison took, how many bytes of dumps it had read, and what it said."""

    name: str
    runs: list[Run]
    read: int
    said: str


@dataclass(frozen=True)
class Pair:
    """The models: a target, its draft as trained, and as deployed healthy and faulty."""

    target: Path
    trained: Path
    healthy: Path
    faulty: Path


def make_pair(options: argparse.Namespace, scratch: Path) -> Pair:
    """The healthy and the faulty deployment of a trained draft, and the rest."""
    target = options.target or models_dir() / "target"
    trained = options.trained or models_dir() / "draft"
    healthy, faulty = scratch / "healthy", scratch / "faulty"
    export(trained, healthy, target=target)
    shutil.copytree(healthy, faulty)
    config = json.loads((faulty / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [number + 1 for number in ids]
    (faulty / "config.json").write_text(json.dumps(config))
    return Pair(target, trained, healthy, faulty)


class Bench:
    """Both halves of the benchmark on one pair."""

    def __init__(self, pair: Pair, scratch: Path, packages: Path, rounds: int) -> None:
        self.pair = pair
        self._scratch = scratch
        self._packages = packages
        self._rounds = rounds
        self._request = Request(read_prompts(prompts_file()), max_new_tokens=NEW_TOKENS, batch_size=BATCH)
        self.recordings: list[Recording] = []
        self.compared: list[Compared] = []

    # ---- recording ------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Ratios of all, and the dumps that are compared."""
        with Server(self._options(self.pair.healthy)) as server:
            (child,) = psutil.Process().children()
            self._server, self._pid = server, child.pid
            # warm-up: the first recording of a server imports what writes it
            server.answer(self._request)
            (self._scratch / "warm-up.trace").mkdir()
            server.record(self._request, self._scratch / "warm-up.trace")
            self._record_levels()
            for number, peer in enumerate(tools.peers()):
                say(f"{peer.name}, healthy")
                self.recordings.append(self._record_peer(peer, self._scratch / f"peer{number}"))
                say(str(self.recordings[-1]))

    def _record_levels(self) -> None:
        levels = {level: Recording(f"eagle-trace, level {level}") for level in LEVELS}
        for number in range(self._rounds):
            say(f"eagle-trace, round {number + 1} of {self._rounds}")
            off = self._cpu(lambda: self._server.answer(self._request))
            for level, figures in levels.items():
                out = self._scratch / f"{level}{number}.trace"
                out.mkdir()
                spent = self._cpu(lambda: self._server.record(self._request, out, level=level))  # noqa: B023
                figures.spent.append(spent)
                figures.off.append(off)
                figures.written = size(out)
        self.recordings += levels.values()
        for figures in self.recordings:
            say(str(figures))

    def _record_peer(self, peer: tools.Peer, folder: Path) -> Recording:
        figures = Recording(peer.name)
        dump = folder / "healthy"
        try:
            with self._peer_server(peer, folder / "server", dump, self.pair.healthy) as server:
                server.cpu_of_a_pass()  # warm-up, and what is compared
                figures.written = size(dump) if dump.exists() else (0, 0)
                self._keep(peer, dump, folder / "kept")
                for _ in range(self._rounds):
                    figures.off.append(self._cpu(lambda: self._server.answer(self._request)))
                    figures.spent.append(server.cpu_of_a_pass())
                    if dump.exists():
                        remove_files(dump)
        except HostFailedError as error:
            figures.failure = str(error)
        shutil.rmtree(dump, ignore_errors=True)
        return figures

    def _keep(self, peer: tools.Peer, dump: Path, kept: Path) -> None:
        """Move what will be compared of a dump, and leave nothing of the rest: a pass can take many gigabytes.

        (msprobe at level tensor writes the parameters of every module again in every forward.)
        """
        for data in {comparison.data(dump) for comparison in peer.comparisons}:
            if not data.exists():
                continue
            (kept / data.relative_to(dump)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(data, kept / data.relative_to(dump), copy_function=os.link)
        if dump.exists():
            remove_files(dump)

    def _cpu(self, work: Callable[[], object]) -> float:
        before = tree_cpu(self._pid)
        work()
        return tree_cpu(self._pid) - before

    def _options(self, draft: Path) -> ServerOptions:
        return ServerOptions(self.pair.target, draft, dtype="float32", device="cpu")

    def _peer_server(self, peer: tools.Peer, folder: Path, dump: Path, draft: Path) -> PeerServer:
        options = self._options(draft)
        arguments, _ = server_arguments(replace(options, host_args=tuple(peer.arguments(dump))))
        environment = tools.environment(self._environment(), self._packages, draft_only=peer.draft_only)
        job = {"prompts": str(prompts_file()), "max_new_tokens": NEW_TOKENS, "batch": BATCH}
        return PeerServer(folder, arguments, environment | peer.environment(dump), job)

    def _environment(self) -> dict[str, str]:
        return cpu.cpu_environment(os.environ)

    # ---- comparing ------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Each tool on what it recorded of the healthy and the faulty deployment."""
        self._compare_eagle_trace()
        for number, peer in enumerate(tools.peers()):
            folder = self._scratch / f"peer{number}"
            if (folder / "kept").exists():
                say(f"{peer.name}, faulty")
                self._compare_peer(peer, folder)

    def _compare_eagle_trace(self) -> None:
        say("eagle-trace, faulty and training")
        traces = {level: self._scratch / f"faulty-{level}.trace" for level in ("sketch", "values")}
        with Server(self._options(self.pair.faulty)) as server:
            server.answer(self._request)
            for level, out in traces.items():
                out.mkdir()
                server.record(self._request, out, level=level)
        program = [sys.executable, "-m", "eagle_trace.cli.main"]
        for level, serve in traces.items():
            train = self._scratch / f"train-{level}.trace"
            command = [*program, "record", "--mode", "train", "--target", str(self.pair.target), "--level", level]
            command += ["--draft", str(self.pair.trained), "--replay", str(serve), "--out", str(train)]
            done = run(command, dict(os.environ), self._scratch)
            if done.status:
                raise SystemExit(done.output)
            if level == "values":
                self._compare_same_tensors(train, serve)
            read = sum(size(path / "values")[0] for path in (train, serve))
            for name, extra in (("diff --no-diagnose", ["--no-diagnose"]), ("diff, with the cause", [])):
                command = [*program, "diff", str(train), str(serve), *extra]
                runs = [run(command, dict(os.environ), self._scratch) for _ in range(REPEATS)]
                self.compared.append(Compared(f"eagle-trace, {level}: {name}", runs, read, diff_says(runs[-1].output)))

    def _compare_same_tensors(self, train: Path, serve: Path) -> None:
        """What SGLang's comparator takes for the very tensors that eagle-trace compares."""
        say("SGLang's comparator on eagle-trace's tensors")
        folder = self._scratch / "same"
        dumps = folder / "train" / "run", folder / "serve" / "run"
        for dump in dumps:
            dump.mkdir(parents=True)
        tools.write_dumps(open_trace(train), open_trace(serve), *dumps)
        self._run_comparison("eagle-trace's tensors", tools.COMPARATOR, folder / "train", folder / "serve", folder)

    def _run_comparison(self, name: str, one: tools.Comparison, healthy: Path, faulty: Path, folder: Path) -> None:
        environment = tools.environment(self._environment(), self._packages, draft_only=False)
        healthy, faulty = one.data(healthy), one.data(faulty)
        runs, read = [], size(healthy)[0] + size(faulty)[0]
        for number in range(REPEATS):
            out = folder / f"{one.name.split(' (')[0]}{number}"
            out.mkdir()
            runs.append(run(one.command(healthy, faulty, out), environment, out))
        self.compared.append(Compared(f"{name}: {one.name}", runs, read, one.says(runs[-1].output, out)))

    def _compare_peer(self, peer: tools.Peer, folder: Path) -> None:
        dump = folder / "faulty"
        try:
            with self._peer_server(peer, folder / "server2", dump, self.pair.faulty) as server:
                server.cpu_of_a_pass()
        except HostFailedError as error:
            self.compared.append(Compared(peer.name, [], 0, f"faulty deployment: {error}"))
            return
        self._keep(peer, dump, folder / "kept-faulty")
        for comparison in peer.comparisons:
            self._run_comparison(peer.name, comparison, folder / "kept", folder / "kept-faulty", folder)

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def raw_bytes(self) -> tuple[int, int, int]:
        """Bytes of a pass: captured values as they are; the same rows `WIDE` wide in bfloat16; their trace as sketches.

        The last holds, beside the sketches, all else that the trace at level ``sketch`` of this pass holds.
        """
        trace = open_trace(self._scratch / f"values{self._rounds - 1}.trace")
        hidden = json.loads((self.pair.healthy / "config.json").read_text())["hidden_size"]
        raw = wide = 0
        sketched = size(self._scratch / f"sketch{self._rounds - 1}.trace")[0]
        for site in trace.sites:
            for data in trace.site_data(site):
                raw += data.rows * data.width * DTYPES[data.dtype].itemsize
                width = data.width * WIDE // hidden
                wide += data.rows * width * DTYPES["bfloat16"].itemsize
                sketched += data.rows * buckets(width) * DTYPES[stored_dtype("bfloat16")].itemsize
                sketched -= data.rows * buckets(data.width) * DTYPES[stored_dtype(data.dtype)].itemsize
        return raw, wide, sketched


def remove_files(folder: Path) -> None:
    """Remove the files below a folder, whose folders a server may go on to use."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.unlink()


def diff_says(text: str) -> str:
    """The lines of a diff that name the divergence and the cause."""
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line.startswith(("agree", "diverged", "cause: ")))


def say(message: str) -> None:
    """Progress."""
    print(message, file=sys.stderr, flush=True)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table, columns aligned so that it reads as text as well."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def report(bench: Bench) -> str:
    """Both tables and the sizes."""
    raw, wide, sketched = bench.raw_bytes()
    recorded = []
    for one in bench.recordings:
        spread = "-"
        if one.spent:
            ratios = [spent / off for spent, off in zip(one.spent, one.off, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        written = [f"{one.written[0] / 1e6:.2f}", f"{one.written[0] / raw:.1%}", str(one.written[1])]
        recorded.append([one.name, spread, *written, one.failure])
    head = ["recording", "x CPU, median (min-max)", "MB", "of raw", "files", "failed with"]
    text = [table(head, recorded), ""]
    off = [seconds for one in bench.recordings for seconds in one.off]
    text += [f"An unrecorded pass: {statistics.median(off):.2f} s of CPU ({min(off):.2f}-{max(off):.2f})."]
    text += [f"Captured values of a pass (raw): {raw / 1e6:.2f} MB. The same rows {WIDE} wide in bfloat16: "]
    text[-1] += f"{wide / 1e6:.1f} MB, of which a trace of sketches takes {sketched / wide:.2%}."
    compared = []
    for one in bench.compared:
        if not one.runs:
            compared.append([one.name, *["-"] * 6, one.said])
            continue
        cpu_s, wall, peak = (statistics.median(getattr(r, name) for r in one.runs) for name in ("cpu", "wall", "peak"))
        read = one.read / 1e6
        figures = [f"{cpu_s:.2f}", f"{wall:.2f}", f"{peak:.0f}", f"{read:.1f}", f"{read / cpu_s:.1f}"]
        compared.append([one.name, *figures, str(one.runs[-1].status), one.said])
    head = ["comparison", "CPU s", "wall s", "peak MB", "read MB", "MB/CPU s", "exit", "what it said"]
    return "\n".join([*text, "", table(head, compared), ""])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder for the peers' packages")
    parser.add_argument("--target", type=Path, help="target, Hugging Face format")
    parser.add_argument("--trained", type=Path, help="draft, speculators format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it (default: a temporary one)")
    options = parser.parse_args()
    tools.install(options.peers)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (options.keep or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        bench = Bench(make_pair(options, scratch), scratch, options.peers.resolve(), options.rounds)
        bench.record()
        bench.compare()
        text = report(bench)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
