"""SGLang with a recorder inside: started once, asked as often as one likes, recorded or not."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_trace import __version__
from eagle_trace.checkpoints import checkpoint_facts
from eagle_trace.errors import PromptsError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import Prompt, check_tokens, prompts_digest
from eagle_trace_sglang.deployment import check_deployment, server_arguments
from eagle_trace_sglang.host import Host
from eagle_trace_sglang.releases import check_release, installed
from eagle_trace_sglang.sites import tell_missing

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ServerOptions:
    """What SGLang is started with; see `eagle_trace_sglang.record.record` for the meaning of each.

    `cache_tokens` is the room in the key/value cache on CPU, where SGLang cannot work it out.
    """

    target: Path
    draft: Path
    steps: int = 3
    topk: int = 1
    draft_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    sglang_args: tuple[str, ...] = ()
    cache_tokens: int = 16384

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
        ranks = ("--tp", "--tp-size", "--tensor-parallel-size")
        if any(word.split("=")[0] in ranks for word in self.sglang_args):
            raise UsageError("recording one rank of several would keep a part of each site only: record with one GPU")
        return check_deployment(self.target, self.draft)


@dataclass(frozen=True)
class Request:
    """Prompts to answer greedily, `batch_size` at a time."""

    prompts: Sequence[Prompt]
    max_new_tokens: int = 48
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")

    @property
    def rids(self) -> list[str]:
        """Request ids, one a prompt: what the recorder knows them by."""
        return [f"eagle-trace-{number}" for number in range(len(self.prompts))]


@dataclass
class Answers:
    """What the server answered, by request id; `speculation` is its own count of rounds and accepted tokens."""

    output_ids: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    speculation: dict[str, dict[str, float]] = field(default_factory=dict)


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
        arguments, changes = server_arguments(
            target=options.target,
            draft=options.draft,
            steps=options.steps,
            topk=options.topk,
            draft_tokens=options.verified_tokens,
            dtype=options.dtype,
            device=device,
            tokens=options.cache_tokens,
            extra=options.sglang_args,
        )
        self._options = options
        self._progress = progress
        self._device = device
        # everything in the manifest that does not depend on what is asked
        self._made_by = Manifest("serve", "values", "sglang", changes=changes)
        self._made_by.target = checkpoint_facts(options.target, target_config)
        self._made_by.draft = checkpoint_facts(options.draft, draft_config)
        progress("starting SGLang (this takes a while)")
        self._host = Host(options.target, arguments, device)

    def __enter__(self) -> Server:
        self._host.__enter__()
        try:
            packages = self._host.receive("engine", "ready")[0]
            self._made_by.packages = packages | {"eagle-trace": __version__}
            _take_facts(self._made_by, self._host.receive("recorder", "armed")[0])
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
        token_ids, _ = self._tokens(request)
        return self._ask(request, token_ids)

    def record(
        self,
        request: Request,
        out: Path,
        *,
        level: str = "values",
        max_bytes: int | None = None,
        argv: Sequence[str] = (),
    ) -> Answers:
        """Answer, and leave a sealed trace in the empty folder `out`."""
        token_ids, texts = self._tokens(request)
        manifest = self._manifest(request, level, argv)
        numbers = {rid: number for number, rid in enumerate(request.rids)}
        self._host.send("recorder", "begin", str(out), manifest, numbers, max_bytes)
        self._host.receive("recorder", "recording")
        self._progress(f"recording {len(request.prompts)} prompts")
        answers = self._ask(request, token_ids)
        prompts = [
            {
                "prompt_id": number,
                "prompt_key": prompt.key,
                "request_id": rid,
                "token_ids": token_ids[number],
                "num_prompt_tokens": len(token_ids[number]),
                "text": texts[number] + answers.texts[rid],
                "output_ids": answers.output_ids[rid],
            }
            for number, (prompt, rid) in enumerate(zip(request.prompts, request.rids, strict=True))
        ]
        self._host.send("recorder", "finish", prompts, {"server_counts": answers.speculation})
        self._host.receive("recorder", "sealed")
        self._progress(f"sealed {out}")
        return answers

    def _manifest(self, request: Request, level: str, argv: Sequence[str]) -> Manifest:
        manifest = copy.deepcopy(self._made_by)
        manifest.level = level
        manifest.argv = list(argv)
        manifest.created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest.prompts_digest = prompts_digest([prompt.key for prompt in request.prompts])
        options = self._options
        manifest.settings |= {
            "steps": options.steps,
            "topk": options.topk,
            "draft_tokens": options.verified_tokens,
            "max_new_tokens": request.max_new_tokens,
            "batch_size": request.batch_size,
            "sglang_args": list(options.sglang_args),
            "seed": 0,
        }
        return manifest

    def _tokens(self, request: Request) -> tuple[list[list[int]], list[str]]:
        self._host.send("engine", "tokenize", [asdict(prompt) for prompt in request.prompts])
        token_ids, texts = self._host.receive("engine", "tokens")
        for prompt, ids in zip(request.prompts, token_ids, strict=True):
            check_tokens(prompt.key, ids, self._made_by.target["config"], request.max_new_tokens)
        longest = max(len(ids) for ids in token_ids) + request.max_new_tokens
        if self._device == "cpu" and longest > self._options.cache_tokens:
            raise PromptsError(
                f"a prompt and its answer need {longest} tokens, "
                f"the cache on CPU has {self._options.cache_tokens}: shorten it"
            )
        return token_ids, texts

    def _ask(self, request: Request, token_ids: list[list[int]]) -> Answers:
        sampling = {"temperature": 0, "max_new_tokens": request.max_new_tokens}
        requests = list(zip(request.rids, token_ids, strict=True))
        self._host.send("engine", "generate", requests, request.batch_size, sampling)
        answers = Answers()
        started = time.monotonic()
        while (message := self._host.next("engine"))[0] != "answered":
            _, rid, output_ids, text, speculation = message
            answers.output_ids[rid], answers.texts[rid], answers.speculation[rid] = (
                output_ids,
                text,
                speculation,
            )
            seconds = time.monotonic() - started
            self._progress(f"{len(answers.output_ids)} of {len(requests)} prompts answered, {seconds:.0f} s")
        return answers


def _take_facts(manifest: Manifest, facts: dict[str, Any]) -> None:
    """What the recorder found inside SGLang, into the manifest."""
    if facts["tp_size"] != 1:
        raise UsageError("recording one rank of several would keep a part of each site only: record with one GPU")
    manifest.dtype, manifest.device = facts["dtype"], facts["device"]
    manifest.draft |= {name: facts[name] for name in ("architecture", "dropped_keys")}
    manifest.settings["algorithm"] = facts["algorithm"]
    if facts["dropped_keys"]:
        manifest.warnings.append(f"SGLang dropped from the draft's checkpoint: {', '.join(facts['dropped_keys'])}")
    manifest.warnings += facts["warnings"]
    tell_missing(manifest, facts["missing_sites"])
    for site in ("logits", "topk.draft_id", "topk.target_id"):
        why = "SGLang computes logits for the last row of a prefill only"
        manifest.not_materialised.append({"site": site, "rows": "prefill", "why": why})
    if facts["fused_mlp"]:
        why = "SGLang runs gate, up and activation in one kernel on this GPU"
        manifest.not_materialised += [
            {"site": f"layer.0.mlp.{name}", "rows": "all", "why": why} for name in ("gate", "up", "act")
        ]
