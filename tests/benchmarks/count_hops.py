"""Through how many functions of ours a row goes from a hook in a draft to its Parquet file.

    python tests/benchmarks/count_hops.py [serve|train] [-v]

serve: a small draft with one site runs a few forwards, recorded by SGLang's own draft worker class, recorder and
writer. train: the tiny speculators pair of the tests trains two steps, one site of which is recorded (`recording`).

Every call of every thread is looked at (`sys.setprofile`). A function counts if it was running (on the stack) while the
site's rows were passed to a function, were taken by Parquet, or changed threads with their forward. What answers a
question about rows is not counted, since they do not go through it: a function that calls nothing further with them and
gives something back, and those of `QUESTIONS`. With -v the functions are listed, in the order in which rows come to
them.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import types
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from eagle_trace import open_trace
from eagle_trace.inbox import Inbox
from eagle_trace.manifest import Manifest
from eagle_trace.selection import Selection
from eagle_trace.writer import prepare_output
from eagle_trace_serving.admission import Admission
from eagle_trace_serving.orders import Order
from eagle_trace_serving.recorder import ServeRecorder
from eagle_trace_sglang.batches import SGLangRequest
from eagle_trace_sglang.worker import SGLangDraft

LEVELS = ("values", "sketch", "stats")
SITE, LAYER = "layer.0.attn.out", "model.layers.0.self_attn.o_proj"
#: a width that nothing else has
WIDTH, TOKENS, FORWARDS = 83, 7, 3
#: where a forward changes threads, and where Parquet takes rows
#: what a tensor is, and figures of rows
QUESTIONS = ("eagle_trace/tensors.py", "eagle_trace/capture.py")
PUT, WRITE = Inbox.put.__code__, pq.ParquetWriter.write_table.__code__


class Road:
    """Notes the functions that are running while rows are handed on, in this thread and those that start from now on.

    Args:
        width: of a row.

    Attributes:
        watched: whether anything is noted.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        #: each function's place, in the order of their first mark
        self._seen: dict[CodeType, str] = {}
        #: what calls others with rows, or gives nothing back
        self._through: set[CodeType] = set()
        self.watched = False
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    @property
    def hops(self) -> list[str]:
        """The functions that rows go through."""
        return [place for code, place in self._seen.items() if code in self._through]

    def _look(self, frame: FrameType, event: str, given: Any) -> None:
        code = frame.f_code
        if not self.watched or event not in ("call", "return"):
            return
        if event == "return":
            if given is None and code in self._seen:
                self._through.add(code)
            return
        if code is PUT:
            # other things than forwards go this way, too
            marked = frame.f_locals["call"] is not None
        else:
            marked = code is WRITE or bool(_place(code) and _is_handed_rows(frame, self._width))
        if not marked:
            return
        running, one = [], frame
        while one is not None:
            running.append(one.f_code)
            one = one.f_back  # type: ignore[assignment]
        self._through |= {*running[1:], PUT}
        for code in reversed(running):
            if place := _place(code):
                self._seen.setdefault(code, place)


def _place(code: CodeType) -> str:
    """Where a function of ours is; nothing for others."""
    _, found, path = code.co_filename.partition("/eagle_trace")
    place = f"eagle_trace{path}"
    return f"{place}:{code.co_firstlineno} {code.co_qualname}" if found and place not in QUESTIONS else ""


def _is_handed_rows(frame: FrameType, width: int) -> bool:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    return any(_are_rows(frame.f_locals.get(name), width) for name in code.co_varnames[:count])


def _are_rows(given: Any, width: int) -> bool:
    if isinstance(given, tuple | list):
        return any(_are_rows(one, width) for one in given)
    return isinstance(given, np.ndarray | torch.Tensor) and given.shape[-1:] == (width,)


class Model(torch.nn.Module):
    """As much of a draft as its recorder asks for."""

    def __init__(self) -> None:
        super().__init__()
        layer, attention = torch.nn.Module(), torch.nn.Module()
        attention.o_proj = torch.nn.Linear(WIDTH, WIDTH)
        # not split over ranks
        attention.o_proj.tp_rank, attention.o_proj.tp_size = 0, 1
        layer.self_attn = attention
        self.model = _Inner(layer)
        self.logits_processor = _Logits()

    def run(self, batch: Any) -> None:
        """One forward."""
        self.model(batch.input_ids, batch.positions, batch)
        self.logits_processor(len(batch.rids))


class _Inner(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])

    def forward(self, input_ids: Any, _positions: Any, _batch: Any) -> Any:
        rows = self.layers[0].self_attn.o_proj(torch.rand(len(input_ids), WIDTH))
        return rows[:, :4], [rows[:, :4]]


class _Logits(torch.nn.Module):
    def forward(self, count: int) -> Any:
        return SimpleNamespace(next_token_logits=torch.zeros(count, 16))


def worker(folder: str) -> Any:
    """As much of SGLang's `EagleDraftWorker` as is asked for."""
    model = Model()
    runner = SimpleNamespace(model=model, model_config=SimpleNamespace(model_path=folder))
    target = SimpleNamespace(
        model_config=SimpleNamespace(hidden_size=WIDTH), model_runner=SimpleNamespace(model=torch.nn.Identity())
    )
    return SimpleNamespace(draft_runner=runner, target_worker=target, hot_token_id=None)


def prefill(rid: str) -> Any:
    """A forward of one request and one of somebody else's."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND"),
        rids=[rid, "other"],
        input_ids=torch.arange(TOKENS + 1),
        positions=torch.arange(TOKENS + 1),
        seq_lens=torch.tensor([TOKENS, 1]),
        extend_seq_lens=torch.tensor([TOKENS, 1]),
        extend_seq_lens_cpu=[TOKENS, 1],
        spec_info=SimpleNamespace(hidden_states=torch.zeros(TOKENS + 1, 3 * WIDTH)),
    )


def record(level: str, folder: Path) -> Road:
    """Record some forwards of the small draft, all but the first of them and the seal watched."""
    road, out = Road(WIDTH), folder / f"{level}.trace"
    prepare_output(out)
    draft = SGLangDraft(worker(str(folder)))
    main, other = Pipe()
    recorder = ServeRecorder(draft, other)
    threading.Thread(target=recorder._obey, daemon=True).start()
    order = Order(str(out), Admission(requests=FORWARDS), level=level, selection=Selection(sites=(SITE,)), alone=False)
    main.send(("begin", 1, order, Manifest("serve", level, "sglang")))
    said = main.recv()
    assert said[0] == "recording", said
    for number in range(FORWARDS):
        request = SimpleNamespace(
            rid=f"r{number}", origin_input_ids=list(range(TOKENS)), output_ids_through_stop=[], finished_reason=None,
            tokenizer=None,
        )  # fmt: skip
        recorder.arrived(SGLangRequest(request))
    run = draft._model.run
    run(prefill("r0"))
    road.watched = True
    for number in range(1, FORWARDS):
        run(prefill(f"r{number}"))
    main.send(("finish", 1, {}, "measured"))
    said = main.recv()
    road.watched = False
    assert said[0] == "sealed", said
    assert len(open_trace(out).keys(SITE)) == FORWARDS * TOKENS
    return road


def record_training(level: str, folder: Path) -> Road:
    """Record two steps of a tiny training, the second of them and the seal watched."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from eagle_trace_speculators import recording
    from tests.support.tiny_speculators import SHAPE, random_prompts, write_pair
    from tests.support.training import Loop, collate, sample, trainable

    pair = write_pair(folder / level)
    batch = collate([sample(pair, document, 4) for document in random_prompts([9, 5, 13])])
    loop, road = Loop(trainable(pair)), Road(SHAPE["intermediate_size"])
    selection = Selection(sites=("layer.0.mlp.act",))
    with recording(loop.model, out=folder / f"{level}.trace", level=level, selection=selection) as run:
        loop.step(batch)
        road.watched = True
        loop.step(batch)
        run.wait()
        road.watched = False
    assert run.failure is None, run.failure
    return road


def main() -> None:
    """Print the figures."""
    asked = "train" if "train" in sys.argv else "serve"
    # watched by a hook of its own, which nothing here calls
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["sglang.srt.speculative"].eagle_worker_v2 = SimpleNamespace(select_top_k_tokens=None)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        for level in LEVELS:
            road = (record_training if asked == "train" else record)(level, Path(folder))
            print(f"{asked}, {level}: {len(road.hops)} functions")
            if "-v" in sys.argv:
                print(*(f"    {place}" for place in road.hops), sep="\n")


if __name__ == "__main__":
    main()
