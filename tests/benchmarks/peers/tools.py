"""The peers: how each is switched on in SGLang, how its dumps are compared, and what it then says."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace

#: what the peers need beyond SGLang, without what SGLang brings (no other numpy or torch may come in its way)
PACKAGES = (
    "mindstudio-probe==26.2.0", "polars==2.1.0", "polars-runtime-32==2.1.0", "tensorboard==2.21.0", "absl-py==2.5.1",
    "markdown==3.11.3", "werkzeug==3.1.9", "matplotlib==3.11.2", "contourpy==1.3.3", "cycler==0.12.1",
    "fonttools==4.68.0", "kiwisolver==1.5.1", "pyparsing==3.3.3", "openpyxl==3.1.5", "et_xmlfile==2.0.0",
    "pytz==2026.6", "wheel==0.48.0",
)  # fmt: skip


def install(folder: Path) -> None:
    """Install `PACKAGES` into a folder, once."""
    done = folder / "installed.txt"
    if done.exists() and done.read_text().split() == list(PACKAGES):
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--upgrade", "--target", str(folder), *PACKAGES], check=True)
    done.write_text("\n".join(PACKAGES))


@dataclass(frozen=True)
class Comparison:
    """One way to compare two dumps.

    Attributes:
        name: behind the peer's, in the table.
        command: for the healthy dump, the faulty one and an empty folder for results.
        says: what it printed about the fault, from its output and its folder of results.
        data: the part of a dump that it compares.
    """

    name: str
    command: Callable[[Path, Path, Path], list[str]]
    says: Callable[[str, Path], str]
    data: Callable[[Path], Path] = lambda dump: dump


@dataclass(frozen=True)
class Peer:
    """A way of dumping that is on from the start of a server to its end.

    Attributes:
        name: in the table.
        arguments: SGLang's, given the folder to dump to.
        environment: variables, given that folder.
        draft_only: kept to the draft, or as shipped: the target is dumped as well.
        comparisons: of what it dumped; none if nothing comes with it.
    """

    name: str
    arguments: Callable[[Path], Sequence[str]] = lambda _: ()
    environment: Callable[[Path], dict[str, str]] = lambda _: {}
    draft_only: bool = True
    comparisons: tuple[Comparison, ...] = ()


def _dumper(folder: Path) -> dict[str, str]:
    # its console is off: with it on, every tensor is printed as well, which costs more than writing it
    return {
        "DUMPER_ENABLE": "1",
        "DUMPER_DIR": str(folder),
        "DUMPER_EXP_NAME": "run",
        "DUMPER_NON_INTRUSIVE_MODE": "all",
        "DUMPER_ENABLE_OUTPUT_CONSOLE": "0",
    }


def _comparator(healthy: Path, faulty: Path, _out: Path) -> list[str]:
    module = [sys.executable, "-m", "sglang.srt.debug_utils.comparator"]
    return [*module, "--baseline-path", str(healthy), "--target-path", str(faulty), "--output-format", "json"]


def comparator_says(text: str, _out: Path) -> str:
    """Counts by verdict and the first tensor it calls different, of SGLang's comparator's JSON lines."""
    counts: Counter[str] = Counter()
    first = ""
    for line in text.splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        kind = record.get("type", "")
        if kind == "summary":
            counts.update({name: record[name] for name in ("passed", "failed", "skipped", "errored")})
        elif not first and kind == "comparison_tensor" and not (record.get("diff") or {}).get("passed"):
            step = (record.get("location") or {}).get("step")
            difference = record.get("diff")
            why = f"rel {difference['rel_diff']:.3g}" if difference else "shapes differ"
            first = f"first failed: {record['name']}, step {step} ({why})"
    return f"{', '.join(f'{number} {name}' for name, number in counts.items())}; {first or 'names no tensor'}"


def _msprobe(task: str) -> Callable[[Path], Sequence[str]]:
    def arguments(folder: Path) -> Sequence[str]:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": "L0", "async_dump": False}
        details = {"scope": [], "list": [], "data_mode": ["all"]}
        summary = {"summary_mode": "statistics"} if task == "statistics" else {}
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(config | {task: details | summary}))
        return ("--msprobe-dump-config", str(file))

    return arguments


def _first_step(dump: Path) -> Path:
    """Its first step (of the draft: the first prefill), in the form that `compare` reads: it takes one step a run."""
    return min(dump.glob("step*"), key=lambda step: int(step.name.removeprefix("step")), default=dump / "step0")


def _msprobe_first(healthy: Path, faulty: Path, out: Path) -> list[str]:
    return [*_msprobe_compare(healthy, faulty, out), "-da"]


def _msprobe_compare(healthy: Path, faulty: Path, out: Path) -> list[str]:
    code = "import sys; from msprobe.msprobe import main; sys.argv[0] = 'msprobe'; main()"
    paths = ["-tp", str(faulty), "-gp", str(healthy), "-o", str(out)]
    return [sys.executable, "-c", code, "compare", "-m", "auto", *paths]


def msprobe_says(text: str, out: Path) -> str:
    """Counts by verdict and the first row not passed, of msprobe's table; its last error if it made none."""
    tables = sorted(out.rglob("*.csv"))
    if not tables:
        errors = [line.strip() for line in text.splitlines() if "ERROR" in line or "Error" in line]
        return f"no result: {errors[-1] if errors else text.strip().splitlines()[-1]}"
    counts: Counter[str] = Counter()
    first = ""
    for table in tables:
        with table.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                verdict = row.get("Result") or row.get("Accuracy Reached or Not") or "?"
                counts[verdict] += 1
                if not first and verdict.lower() not in ("pass", "yes"):
                    first = f"first not passed: {row.get('NPU Name') or row.get('Target Name')} ({verdict})"
    return f"{', '.join(f'{number} {name}' for name, number in counts.items())}; {first or 'names no tensor'}"


def msprobe_first_says(text: str, out: Path) -> str:
    """The operation that msprobe's search for the first difference names."""
    found = sorted(out.glob("diff_analyze*.json"))
    if not found:
        return f"names nothing: {text.strip().splitlines()[-1].rpartition('] ')[2]}"
    names = [node["op_name"] for nodes in json.loads(found[0].read_text()).values() for node in nodes]
    return f"first different: {', '.join(names)}" if names else "names nothing"


COMPARATOR = Comparison("comparator", _comparator, comparator_says, lambda dump: dump / "run")
MSPROBE = (
    Comparison("compare (first step)", _msprobe_compare, msprobe_says, _first_step),
    Comparison("compare -da (first step)", _msprobe_first, msprobe_first_says, _first_step),
)


def peers() -> list[Peer]:
    """All of them; the first is none, on a server of its own: what two servers alone differ by."""

    def dump(folder: Path) -> Sequence[str]:
        return ("--debug-tensor-dump-output-folder", str(folder))

    return [
        Peer("untraced, a second server"),
        Peer("SGLang dump, as shipped", dump, draft_only=False),
        Peer("SGLang dump, mended and of the draft only", dump),
        Peer("SGLang dumper, mode all", environment=_dumper, comparisons=(COMPARATOR,)),
        Peer("msprobe L0 statistics", _msprobe("statistics"), comparisons=MSPROBE),
        Peer("msprobe L0 tensor", _msprobe("tensor"), comparisons=MSPROBE),
    ]


def write_dumps(train: Trace, serve: Trace, *folders: Path) -> None:
    """Write the rows that both traces hold as SGLang's dumper would: a file a site and forward, rows in one order."""
    import torch

    number = 0
    for site in train.sites:
        if site not in serve.sites:
            continue
        keys = [trace.keys(site) for trace in (train, serve)]
        values = [trace.values(site) for trace in (train, serve)]
        known = {key: row for row, key in enumerate(_row_keys(keys[0]))}
        pairs = [(known[key], row) for row, key in enumerate(_row_keys(keys[1])) if key in known]
        calls: dict[int, list[tuple[int, int]]] = {}
        for pair in pairs:
            calls.setdefault(int(keys[1].call_id[pair[1]]), []).append(pair)
        for call, rows in calls.items():
            number += 1
            meta = {"step": call, "rank": 0, "dump_index": number, "name": site}
            name = "___".join(f"{key}={value}" for key, value in meta.items())
            for folder, whole, taken in zip(folders, values, zip(*rows, strict=True), strict=True):
                value = torch.from_numpy(whole[list(taken)])
                torch.save({"value": value, "meta": meta}, folder / f"{name}.pt")


def _row_keys(rows: Rows) -> list[tuple[object, ...]]:
    return list(zip(rows.prompt_id.tolist(), rows.root.tolist(), rows.paths(), strict=True))


def environment(base: dict[str, str], packages: Path, *, draft_only: bool) -> dict[str, str]:
    """Variables by which a process finds the peers' packages and, if asked, keeps them to the draft."""
    ahead = [str(Path(__file__).parent / "draft_only"), base.get("PYTHONPATH", ""), str(packages)]
    scope = {"BENCH_PEERS_DRAFT_ONLY": "1"} if draft_only else {}
    return base | scope | {"PYTHONPATH": os.pathsep.join(part for part in ahead if part)}
