"""`eagle-trace record --mode serve`: start SGLang, send it the prompts, keep what its draft computes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle_trace import __version__
from eagle_trace.errors import HostError, PromptsError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import Prompt, prompts_digest, read_prompts
from eagle_trace.reader import open_trace
from eagle_trace.writer import prepare_output
from eagle_trace_sglang.deployment import check_deployment, server_arguments
from eagle_trace_sglang.host import Host

DTYPES = ("auto", "float32", "float16", "bfloat16")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """What a serve recording is asked to do; names as on the command line."""

    target: Path
    draft: Path
    prompts: Path
    out: Path
    steps: int = 3
    topk: int = 1
    draft_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 48
    batch_size: int = 8
    level: str = "values"
    max_bytes: int | None = None
    force: bool = False
    record: bool = True
    sglang_args: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()


@dataclass
class Answers:
    """What the server answered, by request id."""

    output_ids: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    speculation: dict[str, dict[str, float]] = field(default_factory=dict)


def has_cuda() -> bool:
    """Whether an NVIDIA device can be used here; asked of torch in another process, since asking initialises CUDA."""
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


def record(*, progress: Progress = lambda _: None, **options: Any) -> Path:
    """Record the serving forward and return the sealed trace's folder; `options` are those of `ServeOptions`.

    Raises:
        CheckpointError, PromptsError, UsageError: the input does not make sense.
        OutputExistsError: `out` is taken.
        HostError: SGLang did not start, or died.
        RecordingError: the recording failed.
    """
    asked = ServeOptions(**options)
    prompts = read_prompts(asked.prompts)
    check_deployment(asked.target, asked.draft)
    prepare_output(asked.out, force=asked.force)
    try:
        serve(asked, prompts, progress)
    except BaseException:
        # where nothing was recorded, leave no empty folder behind for the next try to stumble over
        with contextlib.suppress(OSError):
            asked.out.rmdir()
        raise
    if not len(open_trace(asked.out).rows):
        raise HostError(f"SGLang answered, but its draft was never run: {asked.out} holds no rows; is speculation on?")
    return asked.out


def serve(options: ServeOptions, prompts: list[Prompt], progress: Progress = lambda _: None) -> Answers:
    """Start SGLang, answer `prompts`, record into `options.out` (unless `options.record` is off), stop SGLang."""
    _check_options(options)
    target_config, draft_config = check_deployment(options.target, options.draft)
    device = options.device
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
    arguments, changes = server_arguments(
        target=options.target,
        draft=options.draft,
        steps=options.steps,
        topk=options.topk,
        draft_tokens=_draft_tokens(options),
        dtype=options.dtype,
        device=device,
        tokens=_cache_tokens(options),
        extra=options.sglang_args,
    )
    manifest = Manifest("serve", options.level, "sglang", changes=changes, argv=list(options.argv), device=device)
    manifest.target = _checkpoint_facts(options.target, target_config)
    manifest.draft = _checkpoint_facts(options.draft, draft_config)
    manifest.prompts_digest = prompts_digest([prompt.key for prompt in prompts])
    manifest.created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest.settings = {
        "steps": options.steps,
        "topk": options.topk,
        "draft_tokens": _draft_tokens(options),
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "sglang_args": list(options.sglang_args),
        "seed": 0,
    }
    progress("starting SGLang (this takes a while)")
    with Host(options.target, arguments, prompts, device) as host:
        return _Recording(host, options, manifest, prompts, progress).run()


def _check_options(options: ServeOptions) -> None:
    if options.dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, not {options.dtype!r}")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu or cuda, not {options.device!r}")
    for name in ("steps", "topk", "max_new_tokens", "batch_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    given = " ".join(options.sglang_args)
    if any(word in given for word in ("--tp ", "--tp=", "--tp-size", "--tensor-parallel-size")):
        raise UsageError("recording one rank of several would keep a part of each site only: record with one GPU")


def _draft_tokens(options: ServeOptions) -> int:
    """SGLang's own default: a chain verifies its steps and the token before them, a tree 8 tokens."""
    if options.draft_tokens is not None:
        return options.draft_tokens
    return options.steps + 1 if options.topk == 1 else 8


def _cache_tokens(options: ServeOptions) -> int:
    return max(8192, options.batch_size * 1024)


def _checkpoint_facts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(config, sort_keys=True).encode()
    return {"path": str(folder.resolve()), "config_digest": hashlib.sha256(text).hexdigest()[:16], "config": config}


class _Recording:
    """One recording as an exchange of messages with the engine and the recorder."""

    def __init__(
        self, host: Host, options: ServeOptions, manifest: Manifest, prompts: list[Prompt], progress: Progress
    ) -> None:
        self._host = host
        self._options = options
        self._manifest = manifest
        self._prompts = prompts
        self._progress = progress

    def run(self) -> Answers:
        """Start, begin, ask, finish."""
        token_ids, texts, packages = self._host.receive("engine", "ready")
        self._take_facts(self._host.receive("recorder", "armed")[0])
        self._manifest.packages = packages | {"eagle-trace": __version__}
        rids = [f"eagle-trace-{number}" for number in range(len(self._prompts))]
        if self._options.record:
            self._begin(rids)
        answers = self._ask(rids, token_ids)
        if self._options.record:
            self._finish(rids, token_ids, texts, answers)
        self._host.stop()
        return answers

    def _take_facts(self, facts: dict[str, Any]) -> None:
        if facts["tp_size"] != 1:
            raise UsageError("recording one rank of several would keep a part of each site only: record with one GPU")
        manifest = self._manifest
        manifest.dtype, manifest.device = facts["dtype"], facts["device"]
        manifest.draft |= {name: facts[name] for name in ("architecture", "dropped_keys")}
        manifest.settings["algorithm"] = facts["algorithm"]
        if facts["dropped_keys"]:
            manifest.warnings.append(f"SGLang dropped from the draft's checkpoint: {', '.join(facts['dropped_keys'])}")
        for site in ("logits", "topk.draft_id", "topk.target_id"):
            why = "SGLang computes logits for the last row of a prefill only"
            manifest.not_materialised.append({"site": site, "rows": "prefill", "why": why})
        if facts["fused_mlp"]:
            why = "SGLang runs gate, up and activation in one kernel on this GPU"
            manifest.not_materialised += [
                {"site": f"layer.0.mlp.{name}", "rows": "all", "why": why} for name in ("gate", "up", "act")
            ]

    def _begin(self, rids: list[str]) -> None:
        numbers = {rid: number for number, rid in enumerate(rids)}
        self._host.send("recorder", "begin", str(self._options.out), self._manifest, numbers, self._options.max_bytes)
        self._host.receive("recorder", "recording")
        self._progress(f"recording {len(rids)} prompts")

    def _ask(self, rids: list[str], token_ids: list[list[int]]) -> Answers:
        options = self._options
        longest = max(len(ids) for ids in token_ids) + options.max_new_tokens
        if self._manifest.device == "cpu" and longest > _cache_tokens(options):
            raise PromptsError(
                f"a prompt and its answer need {longest} tokens, the cache has {_cache_tokens(options)}: "
                "shorten it, or give SGLang more with `-- --max-total-tokens N`"
            )
        sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
        requests = list(zip(rids, token_ids, strict=True))
        self._host.send("engine", "generate", requests, options.batch_size, sampling)
        answers = Answers()
        started = time.monotonic()
        while (message := self._host.next("engine"))[0] != "answered":
            _, rid, output_ids, text, speculation = message
            answers.output_ids[rid], answers.texts[rid], answers.speculation[rid] = output_ids, text, speculation
            seconds = time.monotonic() - started
            self._progress(f"{len(answers.output_ids)} of {len(rids)} prompts answered, {seconds:.0f} s")
        return answers

    def _finish(self, rids: list[str], token_ids: list[list[int]], texts: list[str], answers: Answers) -> None:
        records = []
        for number, (prompt, rid) in enumerate(zip(self._prompts, rids, strict=True)):
            ids, output = token_ids[number], answers.output_ids[rid]
            records.append(
                {
                    "prompt_id": number,
                    "prompt_key": prompt.key,
                    "request_id": rid,
                    "token_ids": ids,
                    "num_prompt_tokens": len(ids),
                    "text": texts[number] + answers.texts[rid],
                    "output_ids": output,
                }
            )
        self._host.send("recorder", "finish", records, {"server_counts": answers.speculation})
        self._host.receive("recorder", "sealed")
        self._progress(f"sealed {self._options.out}")
