"""What a server's own package says of it: everything else about recording a server is in this package.

`ServingHost` is what ``record`` needs, in a process that imports nothing of the server. `DraftWorker` is the draft in
the running server, in each process that computes it. The server's plugin brings both together: in the main process it
calls `attached.arm`, and where the draft runs it makes a `recorder.ServeRecorder` and tells it what the scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle_trace.errors import UsageError
from eagle_trace.families import EAGLE3
from eagle_trace.recording.hosts import Host

if TYPE_CHECKING:
    from eagle_trace.prompts import Prompt
    from eagle_trace.recording.hooks import Hooks
    from eagle_trace.writer import TraceWriter
    from eagle_trace_serving.orders import Order
    from eagle_trace_serving.recording import Recording
    from eagle_trace_serving.requests import Answer, Request

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with; see `eagle_trace_serving.record.record` for the meaning of each.

    `cache_tokens` is the room in the key/value cache on CPU, where a server may not be able to work it out.
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

    def check(self) -> None:
        """Refuse an option that makes no sense whatever the server is (UsageError)."""
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("steps", "topk", "verified_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Address:
    """Where a server that `record` starts is to listen, and the key that it is to ask for.

    Attributes:
        port: on 127.0.0.1, and nowhere else.
        key: its API key and, if it has such a thing, its admin key.
    """

    port: int
    key: str = field(repr=False)

    @property
    def url(self) -> str:
        """As a client has it."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Launch:
    """How a server is started.

    Attributes:
        module: run as ``python -m MODULE FILE``, FILE being a JSON file with `job` that only this user can read. It
            serves until its standard input ends, and then ends by itself.
        job: what the module is told.
        environment: all of the process's.
        changes: what recording changes about the server, one sentence each.
        settings: what the manifest says it was started with.
        room: tokens that a prompt and its answer may have; None where the server says so itself.
    """

    module: str
    job: Mapping[str, Any]
    environment: Mapping[str, str]
    changes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    room: int | None = None


@dataclass(frozen=True)
class Ask:
    """One HTTP request to a server.

    Attributes:
        path, body: POSTed there, as JSON.
        admin: whether it is one that an admin key guards, where there is such a key.
    """

    path: str
    body: Mapping[str, Any]
    admin: bool = False


class ServingHost(Host, Protocol):
    """A server, as ``record`` sees it."""

    def check(self, options: ServerOptions) -> None:
        """Refuse what cannot work, in a second and before anything starts.

        Raises:
            UsageError: an option makes no sense.
            CheckpointError: the server cannot load the pair.
        """
        ...

    def launch(self, options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
        """How to start the server such that it listens at `address` and nowhere else.

        Args:
            options: what was asked for; `device` is not `auto`.
            address: where, and by which key.
            environment: of the process, without what the device needs.

        Raises:
            HostError: the release that is installed cannot be recorded.
            CheckpointError: it has no class for the pair.
        """
        ...

    def trusts_code(self, options: ServerOptions) -> bool:
        """Whether the user lets checkpoints bring code along (for the target's tokenizer)."""
        ...

    def ask(self, prompt: Prompt, rid: str, request: Request) -> Ask:
        """Have one prompt answered, whatever it consists of; the server applies its own chat template to messages."""
        ...

    def ask_all(self, rids: Sequence[str], token_ids: Sequence[Sequence[int]], request: Request) -> Ask:
        """Have several prompts answered that arrive at once."""
        ...

    def answers(self, reply: Any, rids: Sequence[str]) -> list[Answer]:
        """What the JSON `reply` to `ask` or `ask_all` says, one answer per request id.

        Raises:
            ValueError: it is no such reply.
        """
        ...

    def abort(self, rid: str) -> Ask | None:
        """Give a request up; None where the server does so when its connection ends."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a manifest says of a server, and only the process with the draft knows. Travels between processes.

    Attributes:
        host: name of the server, e.g. ``sglang``.
        packages: versions.
        target, draft: folders of the checkpoints, or their names on a hub.
        device, dtype: what the draft computes on and in.
        architecture: the class of the draft.
        family: the name of its family (`eagle_trace.families`).
        settings: ``algorithm``, ``steps``, ``topk``, ``draft_tokens``, ``prefix_cache``, ``kv_cache_dtype``, and what
            else should be known.
        vocab_size, context_length: the target's.
        rank, ranks: this process among those that run the draft together.
        replicas: groups of ranks that answer requests of their own.
        dropped_keys: tensors of the draft's checkpoint that the server does not load.
        not_materialised: sites that are never computed, as a manifest has them.
        warnings: one sentence each.
        refused: why this server cannot be recorded, or nothing.
    """

    host: str
    packages: Mapping[str, str]
    target: str
    draft: str
    device: str
    dtype: str
    architecture: str
    settings: Mapping[str, Any]
    vocab_size: int | None = None
    context_length: int | None = None
    rank: int = 0
    ranks: int = 1
    replicas: int = 1
    dropped_keys: Sequence[str] = ()
    not_materialised: Sequence[Mapping[str, str]] = ()
    warnings: Sequence[str] = ()
    refused: str = ""
    family: str = EAGLE3.name


class DraftWorker(Protocol):
    """The draft inside a running server, in one of the processes that compute it.

    Attributes:
        rank, ranks: this process among those that run the draft together.
    """

    rank: int
    ranks: int

    def facts(self) -> Facts:
        """What the manifest says of the server."""
        ...

    def params(self) -> Iterable[dict[str, Any]]:
        """Rows of params.parquet: what this process holds of each parameter of the draft."""
        ...

    def recording(self, order: Order, writer: TraceWriter) -> Recording:
        """A recording of this draft."""
        ...

    def hang(self, hooks: Hooks, recording: Any) -> None:
        """Hang everything that tells a recording of the draft's forwards.

        Args:
            hooks: takes all of it off again; what is hung may raise, which ends the recording and not the server.
            recording: one that `recording` made. What this changes about the server, and what the draft has no place
                for, is noted in its writer's manifest.
        """
        ...
