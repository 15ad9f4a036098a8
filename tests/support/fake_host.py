"""A host of a few lines: a draft that is nothing but its sites, recorded as a server's draft is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.params import parameter_row
from eagle_trace.recording.tap import Tap, after, hang
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.sites import draft_sites
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.batches import Batch
from eagle_trace_serving.described import server_manifest
from eagle_trace_serving.host import Facts
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recording import Recording

WIDTH, STEPS = 8, 2
PROMPTS = {"a": [3, 5, 7, 11, 13, 17, 19], "b": [2, 4, 8, 16]}
FACTS = Facts(
    host="fake", packages={"fake": "1.0"}, target="org/target", draft="org/draft", device="cpu", dtype="float32",
    architecture="Draft", settings={"steps": STEPS, "topk": 1, "draft_tokens": STEPS + 1},
)  # fmt: skip
#: sites that modules show; the features come with the call
SITES = [site for site in draft_sites() if site.kept == "values" and not site.name.startswith(("fused", "target."))]


class Draft(torch.nn.Module):
    """One module per site; each passes on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3 * WIDTH, WIDTH)
        self.places = torch.nn.ModuleList(torch.nn.Identity() for _ in SITES)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for n, (site, module) in enumerate(zip(SITES, self.places, strict=True)):
            if site.steps == "all" or (site.steps == "first") == (step == 0):
                x = module(torch.sin(x + n))
        return x

    @property
    def taps(self) -> list[Tap]:
        return [after(f"places.{n}", site.name) for n, site in enumerate(SITES)]


class FakeHost:
    """A server of two requests: their prompts in one call, and some draft steps."""

    name, side = "fake", "serve"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.draft = Draft()
        self.facts = FACTS

    def answer(self) -> list[float]:
        return self._run(None)

    def record(
        self, out: Path, *, level: str = "values", max_bytes: int | None = None, selection: Selection = EVERYTHING
    ) -> list[float]:
        prepare_output(out)
        kept: dict[str, Any] = {"level": level, "max_bytes": max_bytes, "selection": selection}
        order = Order(str(out), Admission(requests=len(PROMPTS)), **kept)
        writer = TraceWriter(out, server_manifest(order, self.facts), max_bytes=max_bytes)
        for name, parameter in self.draft.named_parameters():
            writer.put_record("params", parameter_row(name, name, parameter, in_checkpoint=True))
        recording = Recording(order, writer, WIDTH)
        with Hooks() as hooks:
            hang(hooks, self.draft, self.taps(), recording.capture)
            answer = self._run(recording)
        self.seal(recording)
        return answer

    def hooks(self) -> int:
        return sum(len(module._forward_hooks) for module in self.draft.modules())

    # what a test may spoil

    def taps(self) -> list[Tap]:
        return self.draft.taps

    def seal(self, recording: Recording) -> None:
        recording.seal({})

    def batches(self) -> list[Batch]:
        lengths = [len(ids) for ids in PROMPTS.values()]
        fed = torch.cat([torch.tensor([*ids[1:], ids[-1] + 1]) for ids in PROMPTS.values()])
        tensors: dict[str, Any] = {
            "input_ids": fed,
            "positions": torch.cat([torch.arange(length) for length in lengths]),
            "seq_lens": torch.tensor(lengths),
            "extend_lens": torch.tensor(lengths),
        }
        features = torch.outer(fed.float(), torch.linspace(0, 1, 3 * WIDTH))
        calls = [Batch("extend", "prefill", list(PROMPTS), sum(lengths), tensors, features)]
        for step in range(1, STEPS + 1):
            ends = torch.tensor(lengths)
            given = {"input_ids": 30 + ends + step, "positions": ends + step - 1, "seq_lens": ends}
            calls.append(Batch("step", "draft", list(PROMPTS), len(PROMPTS), given))
        return calls

    def _run(self, recording: Recording | None) -> list[float]:
        if recording is not None:
            for rid, ids in PROMPTS.items():
                recording.arrived(
                    SimpleNamespace(
                        rid=rid,
                        prompt_ids=ids,
                        answer_ids=[ids[-1] + 1],
                        finish_reason="length",
                        has_media=False,
                        text=lambda *_: "",
                    )
                )
        answer = []
        for step, batch in enumerate(self.batches()):
            if recording is not None:
                recording.open_call(batch)
            x = batch.tensors["input_ids"].float()[:, None].repeat(1, WIDTH)
            if batch.features is not None:
                x = self.draft.fc(batch.features)
            answer += self.draft(x, step).sum(dim=1).tolist()
            if recording is not None:
                recording.close_call()
        if recording is not None:
            for rid in PROMPTS:
                recording.ended(rid)
        return answer
