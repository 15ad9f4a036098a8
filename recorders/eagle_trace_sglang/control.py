"""Recording, seen from SGLang's main process: starts and ends it in every scheduler process, and knows how it went.

One `Control` lives in the process that owns the server (HTTP) or the engine. It is made by the plugin, before SGLang
starts its scheduler processes, which find it through their environment.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import checkpoint_facts, read_config, target_sample
from eagle_trace.errors import CheckpointError, HostError, RecordingError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.store import as_place, join
from eagle_trace.writer import prepare_output
from eagle_trace_sglang.deployment import ONE_REPLICA
from eagle_trace_sglang.orders import Order
from eagle_trace_sglang.plugin import SESSION
from eagle_trace_sglang.session import Message, Session

#: how long after SGLang is ready its recorders may take to report; they do so before that, unless they never loaded
ARM_SECONDS = 10.0
#: how long a recorder may take to begin, and to write its seal
BEGIN_SECONDS = 60.0
SEAL_SECONDS = 600.0
WATCH_SECONDS = 0.2

logger = logging.getLogger(__name__)

#: what a client may know of the server
_TOLD = ("target", "draft", "steps", "topk", "draft_tokens", "vocab_size", "context_length")


class _Rank:
    """The recorder in one scheduler process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.facts: dict[str, Any] = {}
        self.said: dict[str, tuple[Any, ...]] = {}
        self.alive = True


class Control:
    """Starts and ends recordings. Every method may be called from any thread; one recording runs at a time."""

    def __init__(self) -> None:
        self._session = Session(SESSION)
        self._ranks: list[_Rank] = []
        self._changed = threading.Condition()
        self._ordering = threading.Lock()
        self._order: Order | None = None
        self._last: dict[str, Any] = {}
        self._closing = False
        self._renewed = 0.0
        self._thread = threading.Thread(target=self._listen, name="eagle-trace-control", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def environment(self) -> dict[str, str]:
        """What the processes that SGLang starts need in their environment to find this one."""
        return self._session.environment

    def close(self, seconds: float = SEAL_SECONDS) -> None:
        """Seal what is being recorded, in at most so many seconds, and let go of the recorders."""
        if self._closing:
            return
        try:
            self.finish(stopped="the server ended", seconds=seconds)
        except RecordingError as error:
            logger.error("eagle-trace: %s", error)  # noqa: TRY400 (a sentence, not a bug)
        self._closing = True
        self._session.close()

    # ---- orders -----------------------------------------------------------------------------------------------

    def wait_until_armed(self) -> list[dict[str, Any]]:
        """Facts of every recorder, by rank.

        Raises:
            HostError: they do not report; call it when SGLang is ready, they should have by then.
        """
        if not self._wait(self._armed, ARM_SECONDS):
            raise HostError(
                "SGLang started, but its recorder did not report: the plugin `eagle_trace` was not loaded or found no "
                "draft worker; is speculation on, is this a supported SGLang, and does SGLANG_PLUGINS leave it out?"
            )
        return [rank.facts for rank in self._ranks]

    def start(self, order: Order) -> None:
        """Begin to record. Returns when every recorder has its hooks in place.

        Raises:
            UsageError: a recording is going on.
            OutputExistsError: `order.out` is taken.
            RecordingError: a recorder cannot begin.
        """
        with self._ordering:
            if self._order is not None:
                raise UsageError(
                    f"{self._order.out} is being recorded: wait for it, or end it with POST /eagle_trace/finish "
                    "(a server started with EAGLE_TRACE_REQUESTS=0 records only when asked)"
                )
            facts = self.wait_until_armed()
            prepare_output(as_place(order.out))
            manifest = _manifest(order, facts[0])
            self._last = {}
            self._order = order
            for rank in self._ranks:
                rank.said = {}
                self._send(rank, "begin", order, manifest)
            if not self._wait(lambda: self._all_said("recording"), BEGIN_SECONDS):
                self._order = None
                raise RecordingError(f"the recorder did not begin within {BEGIN_SECONDS:.0f} s")
            self.raise_failure()
        if order.seconds is not None or order.lease is not None:
            self.renew()
            threading.Thread(target=self._watch, args=(order,), name="eagle-trace-watch", daemon=True).start()

    def renew(self) -> None:
        """Somebody waits for the recording that is going on."""
        self._renewed = time.monotonic()

    def finish(
        self, settings: dict[str, Any] | None = None, stopped: str | None = None, seconds: float = SEAL_SECONDS
    ) -> str | None:
        """End the recording that is going on, and return the trace's place; None if nothing was.

        Args:
            settings: added to the manifest's.
            stopped: why it ends before its requests did; noted only if some did not.
            seconds: how long to wait for the seal.

        Raises:
            RecordingError: a recorder failed, or is not done in time.
        """
        with self._ordering:
            order = self._order
            if order is None:
                return None
            for rank in self._ranks:
                self._send(rank, "finish", settings or {}, stopped)
            if not self._wait(lambda: self._order is None, seconds):
                raise RecordingError(f"{order.out} was not sealed within {seconds:.0f} s")
            self.raise_failure()
            return order.out

    def status(self) -> dict[str, Any]:
        """``state`` (starting, ready, recording), place and counts of the recording, and how the last one ended."""
        order = self._order
        state = "recording" if order is not None else "ready" if self._armed() else "starting"
        counts: dict[str, int] = {}
        if order is not None and self._ordering.acquire(timeout=0.1):
            try:
                self._ranks[0].said.pop("counts", None)
                self._send(self._ranks[0], "counts")
                self._wait(lambda: "counts" in self._ranks[0].said or self._order is None, 5.0)
                counts = self._ranks[0].said.get("counts", ({},))[0]
            finally:
                self._ordering.release()
        facts = self._ranks[0].facts if self._armed() else {}
        return {
            "state": state,
            "out": order.out if order is not None else None,
            **counts,
            "last": self._last,
            "server": {name: facts[name] for name in _TOLD if name in facts},
        }

    def raise_failure(self) -> None:
        """Raise RecordingError if the last recording failed."""
        if self._last.get("outcome") == "failed":
            words = [f"the recording failed, SGLang did not: {self._last['why']}", self._last["detail"]]
            raise RecordingError("\n".join(part for part in words if part))

    def wait_until_ended(self, seconds: float | None = None) -> bool:
        """Wait until no recording is going on; False if one still is after so many seconds."""
        return self._wait(lambda: self._order is None, seconds)

    def _watch(self, order: Order) -> None:
        """End a recording whose time is up, or whose client went away."""
        started = time.monotonic()
        why = None
        while why is None:
            if self._wait(lambda: self._order is not order, WATCH_SECONDS):
                return
            now = time.monotonic()
            if order.seconds is not None and now - started >= order.seconds:
                why = f"time limit ({order.seconds:g} s)"
            elif order.lease is not None and now - self._renewed >= order.lease:
                why = "its client went away"
        with contextlib.suppress(RecordingError):  # kept in the status
            self.finish(stopped=why)

    # ---- what the recorders say -------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take in what the recorders say until the process ends."""
        while not self._closing:
            try:
                sources: list[Any] = [self._session, *(rank.connection for rank in self._ranks if rank.alive)]
                ready: list[Any] = wait(sources, timeout=0.5)
                if self._session in ready:
                    ready.remove(self._session)
                    self._ranks.append(_Rank(self._session.accept()[1]))
            except (OSError, ValueError):
                return  # closed under our hands
            for source in ready:
                rank = next(rank for rank in self._ranks if rank.connection is source)
                try:
                    message: Message = rank.connection.recv()
                except (EOFError, OSError):
                    rank.alive = False
                    message = ("failed", "the scheduler process ended", "")
                self._take(rank, message)

    def _take(self, rank: _Rank, message: Message) -> None:
        name, *arguments = message
        with self._changed:
            if name == "armed":
                rank.facts = arguments[0]
                self._ranks.sort(key=lambda one: one.facts.get("rank", 0))
            rank.said[name] = tuple(arguments)
            failed = any("failed" in one.said for one in self._ranks)
            if self._order is not None and (failed or self._all_said("sealed")):
                self._last = {"out": self._order.out, **self._outcome()}
                self._order = None
            self._changed.notify_all()

    def _outcome(self) -> dict[str, Any]:
        failures = [one.said["failed"] for one in self._ranks if "failed" in one.said]
        if failures:
            return {"outcome": "failed", "why": failures[0][0], "detail": failures[0][1]}
        return {"outcome": "sealed", **self._ranks[0].said["sealed"][0]}

    def _armed(self) -> bool:
        facts = [rank.facts for rank in self._ranks if rank.facts]
        return bool(facts) and len(facts) >= facts[0]["ranks"] * facts[0]["replicas"]

    def _all_said(self, name: str) -> bool:
        said = [name in rank.said or "failed" in rank.said for rank in self._ranks]
        return all(said) and bool(said)

    def _send(self, rank: _Rank, *message: Any) -> None:
        if not rank.alive:
            raise HostError("SGLang's scheduler process ended: nothing can be recorded any more")
        rank.connection.send(message)

    def _wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, seconds)


def _manifest(order: Order, facts: dict[str, Any]) -> Manifest:
    """What a trace of this server says of itself."""
    if facts["replicas"] != 1:
        raise UsageError(ONE_REPLICA)
    manifest = Manifest("serve", order.level, "sglang", packages=dict(facts["packages"]))
    manifest.target, manifest.draft = _checkpoint(facts["target"]), _checkpoint(facts["draft"])
    manifest.target |= target_sample(Path(facts["target"]))
    manifest.dtype, manifest.device = facts["dtype"], facts["device"]
    manifest.draft |= {name: facts[name] for name in ("architecture", "dropped_keys")}
    manifest.created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest.argv, manifest.changes = list(order.argv), list(order.changes)
    manifest.settings = {name: facts[name] for name in ("algorithm", "steps", "topk", "draft_tokens")}
    manifest.settings |= {"prefix_cache": facts["prefix_cache"], **order.settings}
    if left_out := order.selection.to_dict():
        manifest.settings["selection"] = left_out
    if facts["dropped_keys"]:
        manifest.warnings.append(f"SGLang dropped from the draft's checkpoint: {', '.join(facts['dropped_keys'])}")
    for site in ("logits", "topk.draft_id", "topk.target_id"):
        why = "SGLang computes logits for the last row of a prefill only"
        manifest.not_materialised.append({"site": site, "rows": "prefill", "why": why})
    for site in facts["partial_sums"]:
        why = "SGLang leaves this sum unfinished on each rank and completes it in a later kernel"
        manifest.not_materialised.append({"site": site, "rows": "all", "why": why})
    manifest.warnings += facts["warnings"]
    if facts["fused_mlp"]:
        why = "SGLang runs gate, up and activation in one kernel on this GPU"
        manifest.not_materialised += [
            {"site": f"layer.0.mlp.{name}", "rows": "all", "why": why} for name in ("gate", "up", "act")
        ]
    return manifest


def _checkpoint(path: str) -> dict[str, Any]:
    """Facts of a checkpoint; of one that is no folder here (a name on a hub) its name."""
    folder = Path(path)
    try:
        return checkpoint_facts(folder, read_config(folder))
    except CheckpointError:
        return {"path": path}


def next_place(folder: str) -> str:
    """A place below `folder`, or below a URL, that no trace has yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return join(as_place(folder), f"{stamp}-{secrets.token_hex(2)}.trace")
