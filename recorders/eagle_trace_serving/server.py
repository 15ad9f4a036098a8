"""SGLang with a recorder inside: started once, asked as often as one likes, recorded or not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle_trace.errors import PromptsError, UsageError
from eagle_trace.manifest import without_secrets
from eagle_trace.prompts import check_tokens
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.store import Place
from eagle_trace_serving.orders import Order
from eagle_trace_serving.process import Host
from eagle_trace_serving.requests import Answers, Request
from eagle_trace_sglang.deployment import (
    check_deployment,
    check_parallelism,
    server_arguments,
    tensor_parallel_size,
)
from eagle_trace_sglang.releases import check_release, installed
from eagle_trace_sglang.targets import check_classes

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ServerOptions:
    """What SGLang is started with; see `eagle_trace_serving.record.record` for the meaning of each.

    `cache_tokens` is the room in the key/value cache on CPU, where SGLang cannot work it out.
    """

    target: Path
    draft: Path
    steps: int = 3
    topk: int = 1
    draft_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    host_args: tuple[str, ...] = ()
    cache_tokens: int = 16384
    keep_cuda_graphs: bool = False

    @property
    def verified_tokens(self) -> int:
        """Tokens verified at once: a chain's steps and the token before them, or 8 of a tree."""
        if self.draft_tokens is not None:
            return self.draft_tokens
        return self.steps + 1 if self.topk == 1 else 8

    def check(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Refuse what cannot work, before anything starts; returns the configs of target and draft.

        Raises:
            UsageError: an option makes no sense.
            CheckpointError: SGLang cannot load the pair.
        """
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("steps", "topk", "verified_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        check_parallelism(self.host_args)
        return check_deployment(self.target, self.draft)


@cache
def has_cuda() -> bool:
    """Whether an NVIDIA device can be used here; asked of torch in another process, since asking initialises CUDA."""
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


class Server:
    """A running SGLang. A context manager: on leaving, every process of it is gone."""

    def __init__(self, options: ServerOptions, progress: Progress = lambda _: None) -> None:
        installed()
        target_config, draft_config = options.check()
        device = options.device if options.device != "auto" else ("cuda" if has_cuda() else "cpu")
        check_release(device)
        check_classes(target_config, draft_config, options.host_args)
        arguments, changes = server_arguments(
            target=options.target,
            draft=options.draft,
            steps=options.steps,
            topk=options.topk,
            draft_tokens=options.verified_tokens,
            dtype=options.dtype,
            device=device,
            tokens=options.cache_tokens,
            keep_cuda_graphs=options.keep_cuda_graphs,
            extra=options.host_args,
        )
        self._options = options
        self._progress = progress
        self._device = device
        self._changes = tuple(changes)
        self._target_config = target_config
        progress("starting SGLang (this takes a while)")
        self._host = Host(options.target, arguments, device, tensor_parallel_size(options.host_args))

    def __enter__(self) -> Server:
        self._host.__enter__()
        try:
            self._host.receive("ready")
        except BaseException as error:
            self._host.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._host.stop()
        self._host.__exit__(*error)

    def answer(self, request: Request) -> Answers:
        """Answer without recording."""
        return self._ask(request, self._tokens(request))

    def record(
        self,
        request: Request,
        out: Place,
        *,
        level: str = "values",
        max_bytes: int | None = None,
        selection: Selection = EVERYTHING,
        keep_cuda_graphs: bool = False,
        argv: Sequence[str] = (),
    ) -> Answers:
        """Answer, and leave a sealed trace in the empty folder `out`."""
        token_ids = self._tokens(request)
        order = Order(
            out=str(out),
            admission=request.admission,
            level=level,
            max_bytes=max_bytes,
            selection=selection,
            alone=False,
            keep_cuda_graphs=keep_cuda_graphs,
            settings=request.settings | {"sglang_args": without_secrets(self._options.host_args), "seed": 0},
            changes=self._changes,
            argv=tuple(argv),
        )
        self._host.send("begin", order)
        self._host.receive("recording")
        self._progress(f"recording {len(request.prompts)} prompts")
        answers = self._ask(request, token_ids)
        self._host.send("finish", {"server_counts": answers.speculation})
        self._host.receive("sealed")
        self._progress(f"sealed {out}")
        return answers

    def _tokens(self, request: Request) -> list[list[int]]:
        self._host.send("tokenize", [asdict(prompt) for prompt in request.prompts])
        token_ids: list[list[int]] = self._host.receive("tokens")[0]
        for prompt, ids in zip(request.prompts, token_ids, strict=True):
            check_tokens(prompt.key, ids, self._target_config, request.max_new_tokens)
        longest = max(len(ids) for ids in token_ids) + request.max_new_tokens
        if self._device == "cpu" and longest > self._options.cache_tokens:
            raise PromptsError(
                f"a prompt and its answer need {longest} tokens, "
                f"the cache on CPU has {self._options.cache_tokens}: shorten it"
            )
        return token_ids

    def _ask(self, request: Request, token_ids: list[list[int]]) -> Answers:
        requests = list(zip(request.rids, token_ids, strict=True))
        self._host.send("generate", requests, request.batch_size, request.sampling)
        answers = Answers()
        started = time.monotonic()
        while (message := self._host.next())[0] != "answered":
            _, rid, answers.output_ids[rid], answers.texts[rid], answers.speculation[rid] = message
            seconds = time.monotonic() - started
            self._progress(f"{len(answers.output_ids)} of {len(requests)} prompts answered, {seconds:.0f} s")
        return answers
