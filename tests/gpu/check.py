"""Records on a GPU, and says what came out: ``make gpu``, or ``python -m tests.gpu.check [TARGET SGLANG_DRAFT DRAFT]``.

1. The healthy pair in bfloat16, SGLang's CUDA graphs put aside and kept, and five faults: what `diff` finds of each.
2. What each level costs: seconds of the same requests, recorded over not recorded, in turn on one server.
3. How often a draft makes the host wait for the GPU, as ``torch.cuda.set_sync_debug_mode`` counts it: recorded no more
   often than not recorded.

Exit status: 0 all is as expected, 1 something is not, 2 there is no GPU here and nothing was run. With
``--device cpu`` it goes through the same motions without one, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_trace.demo import models_dir, prompts_file
from eagle_trace.prompts import read_prompts
from eagle_trace.reader import open_trace
from eagle_trace_analysis import diff
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_serving.host import ServerOptions
from eagle_trace_serving.record import record as record_serve
from eagle_trace_serving.requests import Request
from eagle_trace_serving.server import Server, has_cuda
from eagle_trace_speculators.host import HOST as SPECULATORS
from tests.support import faults

ROUNDS = 5
#: waits per draft that recording may add: none, but for the parameters that are read when it begins
MOST_WAITS = 0.05
LEVELS = ("shapes", "stats", "sketch", "values")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Pair:
    """Folders of the target, of the draft as trained and as SGLang loads it, and the device to run on."""

    target: Path
    trained: Path
    deployed: Path
    device: str


@dataclass(frozen=True)
class Case:
    """What is deployed, and what the diff must say of it: the cause and the first site, None where they agree."""

    cause: str | None = None
    site: str | None = None
    config: Callable[[dict[str, Any]], object] | None = None
    tensors: Callable[[dict[str, Any]], object] | None = None
    keep_cuda_graphs: bool = False


CASES = {
    "healthy": Case(),
    "healthy, CUDA graphs kept": Case(keep_cuda_graphs=True),
    "single layer": Case("single-layer-features", "fused", config=faults.single_layer_features),
    "layer ids": Case("layer-ids-shifted", "target.hidden.0", config=faults.layer_ids_shifted),
    "rope theta": Case("rope-theta", "layer.0.attn.q_rope", config=faults.rope_theta),
    "norm eps": Case("norm-eps", "layer.0.embed_norm", config=faults.norm_eps),
    "d2t": Case("d2t-absolute", "topk.target_id", tensors=faults.d2t_minus_arange),
}


def run_case(pair: Pair, name: str, case: Case, folder: Path) -> bool:
    """Record both sides and diff them; prints a row, returns whether it says what it must."""
    started = time.perf_counter()
    draft = faults.edit(pair.deployed, folder / "draft", config=case.config, tensors=case.tensors)
    served = record_serve(
        target=pair.target,
        draft=draft,
        prompts=prompts_file(),
        out=folder / "serve.trace",
        dtype="bfloat16",
        device=pair.device,
        keep_cuda_graphs=case.keep_cuda_graphs,
    )
    trained = SPECULATORS.record(
        target=pair.target, draft=pair.trained, replay=served, out=folder / "train.trace", device=pair.device
    )
    traces = open_trace(trained), open_trace(served)
    result = diagnosed(diff(*traces), *traces)
    first = result.first_divergence
    causes = [one.cause for one in result.diagnosis.confirmed] if result.diagnosis else []
    found = (causes, first.site if first else None)
    right = found == ([case.cause] if case.cause else [], case.site) and result.incomparable is None
    words = result.incomparable or f"{result.verdict}, first at {found[1]}, {', '.join(causes) or 'no cause'}"
    print(
        f"{'as expected' if right else 'NOT AS EXPECTED':16} {name:28} {words} ({time.perf_counter() - started:.0f} s)"
    )
    return right


def cost(pair: Pair, folder: Path) -> None:
    """Print what each level costs, over the same requests that are not recorded."""
    request = Request(read_prompts(prompts_file()), max_new_tokens=128)
    seconds: dict[str, list[float]] = {level: [] for level in ("off", *LEVELS)}
    options = ServerOptions(pair.target, pair.deployed, dtype="bfloat16", device=pair.device)
    with Server(options) as server:
        server.answer(request)
        for number in range(ROUNDS):
            for level, taken in seconds.items():
                started = time.perf_counter()
                if level == "off":
                    server.answer(request)
                else:
                    out = folder / f"{level}{number}.trace"
                    out.mkdir()
                    server.record(request, out, level=level)
                taken.append(time.perf_counter() - started)
    print(f"\n{'level':8} {'s':>7} {'x unrecorded (median, min-max)':>32}")
    for level, taken in seconds.items():
        ratios = [mine / off for mine, off in zip(taken, seconds["off"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{level:8} {statistics.median(taken):7.2f} {spread:>32}")


def waits(pair: Pair, folder: Path) -> bool:
    """Print how often a draft waits for the GPU, unrecorded and at each level; whether recording adds no wait."""
    file = folder / "waits"
    os.environ["EAGLE_TRACE_GPU_WAITS"] = str(file)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    request = Request(read_prompts(prompts_file()), max_new_tokens=32)
    options = ServerOptions(pair.target, pair.deployed, dtype="bfloat16", device=pair.device)
    print(f"\n{'level':8} {'drafts':>7} {'waits a draft':>14}")
    each: dict[str, float] = {}
    with Server(options) as server:
        server.answer(request)
        # the first recording brings the constants of its reductions to the GPU
        warm = folder / "waits-warm.trace"
        warm.mkdir()
        server.record(request, warm, level="sketch")
        before = counts(file)
        for level in ("off", *LEVELS):
            if level == "off":
                server.answer(request)
            else:
                out = folder / f"waits-{level}.trace"
                out.mkdir()
                server.record(request, out, level=level)
            after = counts(file)
            drafts, waited = after[0] - before[0], after[1] - before[1]
            before = after
            each[level] = waited / max(1, drafts)
            print(f"{level:8} {drafts:7} {each[level]:14.2f}")
    return max(each.values()) <= each["off"] + MOST_WAITS


def counts(file: Path) -> tuple[int, int]:
    """Drafts and waits so far."""
    drafts, waited = file.read_text(encoding="utf-8").split()
    return int(drafts), int(waited)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="TARGET SGLANG_DRAFT DRAFT instead of the demo pair")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    if asked.device == "cuda" and not has_cuda():
        print("There is no GPU here that torch can use: nothing was run.")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if len(asked.folders) == 3:
            target, deployed, trained = asked.folders
        else:
            target, trained, deployed = models_dir() / "target", models_dir() / "draft", folder / "deployed"
            export(trained, deployed, target=target)
        pair = Pair(target, trained, deployed, asked.device)
        right = []
        for number, (name, case) in enumerate(CASES.items()):
            place = folder / str(number)
            place.mkdir()
            right.append(run_case(pair, name, case, place))
        cost(pair, folder)
        if asked.device == "cuda":
            right.append(waits(pair, folder))
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
