"""A server with a recorder inside, of our own: started once, asked as often as one likes, recorded or not.

It is armed as one that its user started, and told over the same HTTP routes what to record; only that `record` alone
has its key, and may therefore say where the trace goes (`bodies.OwnStartBody`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import EagleTraceError, HostError, PromptsError, RecordingError, Terminated
from eagle_trace.prompts import check_tokens, tokenize
from eagle_trace.reader import open_trace
from eagle_trace.recording.hosts import find_host
from eagle_trace.recording.wanted import Wanted
from eagle_trace.store import Place
from eagle_trace.writer import prepare_output
from eagle_trace_serving.client import Question, ask_all, begun
from eagle_trace_serving.control import ARM_SECONDS
from eagle_trace_serving.described import silent_recorder
from eagle_trace_serving.exchange import LONGEST_SECONDS
from eagle_trace_serving.host import ServerOptions, ServingHost
from eagle_trace_serving.process import DEATH_SECONDS, ServerProcess
from eagle_trace_serving.remote import Remote, UnarmedError
from eagle_trace_serving.requests import Answers, Request, counts_of

#: how often a server that starts is asked whether it is up
POLL_SECONDS = 0.2
#: how long whoever interrupts a recording waits for its seal
KEEP_SECONDS = 30.0
#: the same after a SIGTERM, behind which a container sends SIGKILL in 10 s: the server is to be taken down by then, too
TERMINATED_SECONDS = 4.0
#: how often it is asked whether it still records, while it answers
WATCH_SECONDS = 1.0

Progress = Callable[[str], None]


@cache
def has_cuda() -> bool:
    """Whether an NVIDIA device can be used here; asked of torch in another process, since asking initialises CUDA."""
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


def resolve_device(device: str) -> str:
    """``cpu`` or ``cuda`` for ``auto``; raises HostError for CUDA that is not there, at which a server would fail."""
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if device == "cuda" and not has_cuda():
        raise HostError("there is no CUDA device here: use --device cpu")
    return device


class Server:
    """A running server. A context manager: on leaving, every process of it is gone.

    Args:
        options: what it is started with.
        progress: told what is going on.
        host: the server's program; by default the one that is installed.
        texts: whether it will be asked prompts that are not given as token ids.

    Raises:
        UsageError, CheckpointError: the options do not make sense.
        HostError: the program cannot be recorded, or there is no device of the kind asked for.
    """

    def __init__(
        self,
        options: ServerOptions,
        progress: Progress = lambda _: None,
        host: ServingHost | None = None,
        *,
        texts: bool = True,
    ) -> None:
        self._host: ServingHost = host or find_host("server")
        options.check()
        self._host.check(options)
        self._options = replace(options, device=resolve_device(options.device))
        self._progress = progress
        self._target_config = read_config(options.target)
        self._process = ServerProcess(
            self._host.title, lambda address, environment: self._host.launch(self._options, address, environment)
        )
        address = self._process.address
        self._remote = Remote(address.url, address.key, LONGEST_SECONDS, address.key)
        # loaded while the server starts
        self._tokenizer: Future[Any] | None = begun(self._load_tokenizer) if texts else None

    def __enter__(self) -> Server:
        self._process.__enter__()
        try:
            self._progress(f"starting {self._host.title} (this takes a while)")
            self._wait_until_ready()
        except BaseException as error:
            self._process.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(*error)

    def answer(self, request: Request) -> Answers:
        """Answer without recording."""
        return self._ask(request, self._tokens(request), recording=False)

    def record(
        self,
        request: Request,
        out: Place,
        *,
        argv: Sequence[str] = (),
        **kept: Any,
    ) -> Answers:
        """Answer, and leave a sealed trace in the empty folder `out`; where it is interrupted, of the rows so far.

        Args:
            request: what to ask.
            out: the folder.
            argv: the command line, for the manifest.
            kept: fields of `Wanted`.
        """
        token_ids = self._tokens(request)
        launch = self._process.launch
        body = Wanted(**kept).said() | {
            "out": str(out),
            "named": {rid: [number, request.prompts[number].key] for number, rid in enumerate(request.rids)},
            "settings": request.settings,
            "started": dict(launch.settings),
            "changes": list(launch.changes),
            "argv": list(argv),
        }
        with self._alive():
            try:
                self._remote.start(body)
                self._progress(f"recording {len(request.prompts)} prompts")
                answers = self._ask(request, token_ids, recording=True)
                ended = self._remote.finish({"server_counts": counts_of(answers)}, None).last
            except KeyboardInterrupt as interrupt:
                self._keep(out, interrupt)
                raise
            if ended.outcome != "sealed":
                words = [f"the recording failed, {self._host.title} did not: {ended.why}", ended.detail]
                raise RecordingError("\n".join(part for part in words if part))
        self._progress(f"sealed {out}")
        return answers

    def _keep(self, out: Place, interrupt: KeyboardInterrupt) -> None:
        """Seal what was recorded up to here while the server still lives; where that is no row, nothing stays."""
        seconds = TERMINATED_SECONDS if isinstance(interrupt, Terminated) else KEEP_SECONDS
        try:
            rows = begun(partial(self._sealed_rows, out)).result(seconds)
        except (EagleTraceError, TimeoutError):
            return  # the server is gone, or its disk hangs: what is whole there stays as it is
        if rows:
            interrupt.add_note(f"what was recorded up to here is sealed in {out}")

    def _sealed_rows(self, out: Place) -> int:
        # of a recording that has ended, or is being sealed, this changes nothing and tells when it is done
        self._remote.finish({}, "record was interrupted")
        rows = len(open_trace(out).rows)
        if not rows:
            prepare_output(out, force=True)
        return rows

    def _wait_until_ready(self) -> None:
        """Wait until the recorder has reported (HostError if it never will)."""
        deadline = None
        while True:
            self._process.require_alive()
            try:
                state = self._remote.status().state
            except UnarmedError:
                raise HostError(
                    f"{self._host.title} started without the plugin `eagle_trace`: is eagle-trace installed beside "
                    f"{self._host.title}, and does {self._host.title.upper()}_PLUGINS leave it out?"
                ) from None
            except HostError:
                state = "silent"
            if state == "ready":
                return
            if state == "starting":
                deadline = deadline or time.monotonic() + ARM_SECONDS
                if time.monotonic() > deadline:
                    raise HostError(silent_recorder(self._host.title))
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _alive(self) -> Any:
        """What goes wrong because the server died is told as its death."""
        try:
            yield
        except (HostError, RecordingError, PromptsError):
            self._process.require_alive(DEATH_SECONDS)
            raise

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(self._options.target), trust_remote_code=self._host.trusts_code(self._options)
            )
        except (OSError, ValueError):
            return None  # prompts given as input_ids need none; others are refused with a clear word

    def _tokens(self, request: Request) -> list[list[int]]:
        tokenizer = None if self._tokenizer is None else self._tokenizer.result()
        token_ids = [tokenize(prompt, tokenizer) for prompt in request.prompts]
        for prompt, ids in zip(request.prompts, token_ids, strict=True):
            check_tokens(prompt.key, ids, self._target_config, request.max_new_tokens)
        longest, room = max(len(ids) for ids in token_ids) + request.max_new_tokens, self._process.launch.room
        if room is not None and longest > room:
            raise PromptsError(
                f"a prompt and its answer need {longest} tokens, the cache on CPU has {room}: shorten it"
            )
        return token_ids

    def _ask(self, request: Request, token_ids: Sequence[Sequence[int]], *, recording: bool) -> Answers:
        """Ask `batch_size` prompts at a time, all of which reach the scheduler together."""
        questions = []
        for start in range(0, len(token_ids), request.batch_size):
            rids = request.rids[start : start + request.batch_size]
            ids = token_ids[start : start + request.batch_size]
            questions.append(Question(tuple(rids), self._host.ask_all(rids, ids, request)))
        with self._alive():
            answers, unanswered = ask_all(
                self._remote, self._host, questions, 1, self._progress,
                renew_seconds=WATCH_SECONDS if recording else None,
            )  # fmt: skip
            if unanswered:
                raise unanswered[0]
        return answers
