"""A family's pair of `tiny_targets` on both hosts.

``python -m tests.support.target_pairs`` runs all of them and prints the table of docs/support.md.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_trace import Trace, open_trace
from eagle_trace.errors import EagleTraceError
from eagle_trace.recording.hosts import find_host
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.comparison.metrics import Metrics
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support import faults, latent
from tests.support.tiny_speculators import Pair, write_prompts
from tests.support.tiny_targets import (
    DRAFT_VOCAB,
    FAMILIES,
    FIRST_WORD,
    HIDDEN,
    IDS,
    VOCAB,
    Family,
    write_family,
    write_family_target,
)
from tests.support.warm.start import Warm, warm_python

NEW_TOKENS = 8
#: the row of a target of the family kimi_k25 with a draft of the kind that is published for it
LATENT = "kimi_k25, its own draft (MLA)"


@dataclass
class TargetPair:
    """A family's pair, the deployed draft, and room for what is recorded of it."""

    name: str
    family: Family
    pair: Pair
    deployed: Path
    prompts: Path
    folder: Path
    warm: Warm

    def failures(self) -> list[Any]:
        """What the static check says against the deployed draft."""
        found = check(self.deployed, target=self.pair.target, reference=self.pair.draft)
        return [one for one in found.findings if one.status in ("fail", "warn")]

    def serve(self, draft: Path) -> Trace:
        """Record SGLang with `draft`."""
        from eagle_trace_serving.record import record

        with self.warm():
            out = record(
                target=self.pair.target,
                draft=draft,
                prompts=self.prompts,
                out=self.folder / f"{draft.name}.trace",
                dtype=self.family.dtype,
                device="cpu",
                max_new_tokens=NEW_TOKENS,
                host_args=("--skip-tokenizer-init", *self.family.sglang),
            )
        return open_trace(out)

    def train(self, served: Trace) -> Trace:
        """Record speculators' forward on the tokens of a serve trace."""
        from eagle_trace_speculators.host import HOST

        out = self.folder / f"train-{Path(str(served.path)).stem}.trace"
        return open_trace(
            HOST.record(target=self.pair.target, draft=self.pair.draft, replay=served.path, out=out, device="cpu")
        )

    def diffed(self, served: Trace) -> Diff:
        """The serving against the training on its tokens."""
        train = self.train(served)
        return diagnosed(diff(train, served), train, served)

    def single(self) -> Path:
        """The deployed draft, fed one layer."""
        return faults.edit(
            self.deployed,
            self.folder / "single",
            config=lambda config: config["eagle_config"].update(use_aux_hidden_state=False),
        )


class LatentPair(TargetPair):
    """A draft with latent attention, which is served as it is; its training is the reference forward."""

    def train(self, served: Trace) -> Trace:
        """Record the reference forward on the tokens of a serve trace."""
        out = self.folder / f"train-{Path(str(served.path)).stem}.trace"
        record = find_host("trainer", "reference").record
        record(target=self.pair.target, draft=self.pair.draft, replay=served.path, out=out, device="cpu")
        return open_trace(out)


def make(name: str, folder: Path, warm: Warm) -> TargetPair:
    """Write a family's pair and deploy its draft."""
    draw = np.random.default_rng(3)
    words = [draw.integers(FIRST_WORD, VOCAB, size=length).tolist() for length in (9, 14)]
    if name == LATENT:
        pair = Pair(write_family_target("kimi_k25", folder / "target"), write_latent_draft(folder / "draft"))
        kind, family, deployed = LatentPair, FAMILIES["kimi_k25"], pair.draft
    else:
        pair, deployed = write_family(name, folder), folder / "deployed"
        export(pair.draft, deployed, target=pair.target)
        kind, family = TargetPair, FAMILIES[name]
    return kind(name, family, pair, deployed, write_prompts(folder / "prompts.jsonl", words), folder, warm)


def write_latent_draft(folder: Path) -> Path:
    """Write a draft with latent attention for a target of `tiny_targets` that has some itself."""
    return latent.write_draft(
        folder,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        # such a target's class takes ids for outputs of layers
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [i - 1 for i in IDS]},
    )


# ---- the table -------------------------------------------------------------------------------------------------------


def row(name: str, folder: Path, warm: Warm) -> list[str]:
    """One family's cells: class, dtype, check, what the healthy diff and the diff of the fault say, seconds."""
    family, started = FAMILIES["kimi_k25" if name == LATENT else name], time.monotonic()
    cells = [f"`{family.architecture}`", family.dtype]
    try:
        one = make(name, folder, warm)
        failures = one.failures()
        cells.append("passes" if not failures else "; ".join(f"{f.name}: {f.evidence}" for f in failures))
        cells.append(_said(one.diffed(one.serve(one.deployed))))
        cells.append(_said(one.diffed(one.serve(one.single()))))
    except EagleTraceError as error:
        print(error, file=sys.stderr)
        cells.append(str(error).splitlines()[0])
    cells += [""] * (5 - len(cells))
    return [*cells, f"{time.monotonic() - started:.0f}"]


def _said(result: Diff) -> str:
    matched = f"{result.coverage.matched} of {result.coverage.serve_rows} rows"
    if result.first_divergence is None:
        fed = [one.metrics for one in result.sites if one.site.startswith("target.hidden.")]
        median, worst = (
            max(getattr(one, name) for one in fed if isinstance(one, Metrics)) for name in ("rho_median", "rho_max")
        )
        return f"{result.verdict}, {matched}; features {median:.1e} apart (median row), {worst:.1e} (worst)"
    causes = [one.cause for one in result.diagnosis.confirmed] if result.diagnosis else []
    return f"{', '.join(causes) or 'no known cause'} at `{result.first_divergence.site}`"


def main() -> int:
    """Run the families named (all of them without a name), and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.target_pairs", description=__doc__)
    parser.add_argument("families", nargs="*", help="all without a name")
    names = parser.parse_args().families or [*FAMILIES, LATENT]
    logging.disable(logging.CRITICAL)
    titles = ("family", "class", "dtype", "check", "healthy", "one layer fed", "seconds")
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    from eagle_trace_serving import process

    # no "eagle" in the name: SGLang takes a path with that and "mistral" for one in Mistral's own format
    with warm_python() as python, tempfile.TemporaryDirectory(prefix="targets-") as folder:
        process.PYTHON = tuple(python)
        for name in names:
            print("| " + " | ".join([name, *row(name, Path(folder) / name, nullcontext)]) + " |", flush=True)
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
