"""A train recording: `record` checks what was asked, has the trainer load the draft, leaves a sealed trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace import __version__
from eagle_trace.checkpoints import read_config
from eagle_trace.errors import PromptsError, UsageError
from eagle_trace.manifest import Manifest
from eagle_trace.prompts import Prompt, check_tokens, prompts_digest, read_prompts, tokenize
from eagle_trace.recording.device import device_for
from eagle_trace.recording.wanted import Wanted
from eagle_trace.store import Place, same_place
from eagle_trace.writer import TraceWriter, prepare_output, remove_empty
from eagle_trace_training.replay import Task, open_replay, replay_tasks

if TYPE_CHECKING:
    from eagle_trace.reader import Trace
    from eagle_trace_training.host import LoadedDraft, TrainingHost

DEFAULT_STEPS = 3

Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrainOptions(Wanted):
    """What a train recording is asked to do; names as on the command line.

    Attributes:
        draft: folder of the draft.
        out: folder of the trace to write, or its URL.
        target: folder of the target; needed for features ``compute``, for text prompts, and for a draft whose
            checkpoint has no embedding or no head.
        prompts: prompts file: the draft is fed each prompt's own tokens.
        replay: serve trace: the draft is fed that server's tokens and chains. One of the two is given.
        features: ``compute`` (run the target), ``serve`` (what the replayed server fed), or a folder of the
            trainer's own training data.
        steps: number of draft forwards, the first one included; None for as many as the draft was
            trained with, or as the server did.
        dtype: on-disk dtype name, or ``auto``: the replayed trace's, else the draft checkpoint's.
        device: ``auto``, ``cpu`` or ``cuda``.
        chosen: in words, whose forward is run and why: said before it is, and kept in the manifest.
        force: replace the trace at `out`.
        argv: command line, for the manifest.
    """

    draft: Path
    out: Place
    target: Path | None = None
    prompts: Path | None = None
    replay: Place | None = None
    features: str = "compute"
    steps: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    chosen: str = ""
    force: bool = False
    argv: list[str] | tuple[str, ...] = ()

    def check(self) -> None:
        """Raises UsageError if the options do not make sense together."""
        if (self.prompts is None) == (self.replay is None):
            raise UsageError("give one of --prompts (the draft on its own tokens) and --replay (on a server's)")
        if self.features == "serve" and self.replay is None:
            raise UsageError("--features serve takes them from the trace given with --replay, and there is none")
        if self.features == "compute" and self.target is None:
            raise UsageError("--features compute runs the target: give --target, or take --features serve")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps must be 1 or more, not {self.steps}")
        if self.replay is not None and same_place(self.out, self.replay):
            raise UsageError(f"--out {self.out} is the trace to replay: choose another")


def record(trainer: Callable[[], TrainingHost], *, progress: Progress = lambda _: None, **options: Any) -> Place:
    """Record a trainer's forward of a draft and return the sealed trace's folder.

    Args:
        trainer: gives the trainer, which takes seconds; asked when the options make sense.
        progress: receives messages.
        options: those of `TrainOptions`.

    Raises:
        UsageError, PromptsError, CheckpointError, TraceError: the input does not make sense.
        OutputExistsError: `out` is taken.
        HostError: the trainer or the device is not there.
        RecordingError: the recording failed.
    """
    asked = TrainOptions(**options)
    asked.check()
    asked = replace(asked, device=_device(asked.device))
    host = trainer()
    warnings = host.check()
    if asked.chosen:
        progress(asked.chosen)
    if not asked.force:
        prepare_output(asked.out)  # refuse before the work; with --force, what is there goes only when all is ready
    try:
        return _record(host, asked, warnings, progress)
    except BaseException:
        remove_empty(asked.out)
        raise


def _device(asked: str) -> str:
    """``cpu`` or ``cuda``; raises HostError for CUDA that is not there."""

    def has_cuda() -> bool:
        import torch

        return bool(torch.cuda.is_available())

    return device_for(asked, has_cuda)


def _record(host: TrainingHost, asked: TrainOptions, warnings: list[str], progress: Progress) -> Place:
    from eagle_trace_training.config import check_tables
    from eagle_trace_training.features import Precision, open_features
    from eagle_trace_training.floors import REFERENCE
    from eagle_trace_training.numerics import check_dtype, threads_for
    from eagle_trace_training.session import Session
    from eagle_trace_training.weights import stored_dtype

    trace = open_replay(asked.replay) if asked.replay is not None else None
    if trace is not None and trace.manifest.ended_early:
        progress(f"{trace.path}: {trace.manifest.ended_early}; what it holds is replayed")
    dtype, device = asked.dtype, asked.device
    if dtype == "auto":
        dtype = trace.manifest.dtype if trace is not None and trace.manifest.dtype else stored_dtype(asked.draft)
    dtype = check_dtype(dtype)
    progress(f"loading the draft {asked.draft} in {dtype} on {device}")
    draft = host.load(asked.draft, asked.target, dtype, device)
    check_tables(asked.draft, draft.model)
    manifest = _manifest(asked, host, draft, trace, dtype, device)
    manifest.warnings += warnings
    tasks, steps = _tasks(asked, draft, trace, manifest)
    with threads_for(device, draft.hidden_size):
        source = open_features(
            asked.features,
            host=host,
            tasks=tasks,
            replay=trace,
            target=asked.target,
            layer_ids=draft.layer_ids,
            width=draft.fused_width,
            precision=Precision(dtype, REFERENCE[dtype], device),
            progress=progress,
        )
        prepare_output(asked.out, force=asked.force)
        writer = TraceWriter(asked.out, manifest, max_bytes=asked.max_bytes, max_wait=None)
        try:
            Session(host, draft, tasks, source, steps, dtype, writer, progress, asked.selection).run()
        except BaseException as error:
            writer.abort(error)
            raise
    return writer.seal()


def _tasks(asked: TrainOptions, draft: LoadedDraft, trace: Trace | None, manifest: Manifest) -> tuple[list[Task], int]:
    """The prompts and the number of steps; both are noted in the manifest."""
    if trace is not None:
        tasks, steps = tasks_of(trace, asked.steps, manifest)
    elif asked.prompts is not None:
        tasks = prompt_tasks(read_prompts(asked.prompts), asked.target)
        steps = asked.steps or draft.steps or DEFAULT_STEPS
    else:
        raise UsageError("there are neither prompts nor a trace to replay")
    manifest.settings = {
        "steps": steps,
        "features": asked.features,
        "replay": str(asked.replay) if asked.replay else None,
        "replayed": trace.manifest.recording if trace is not None else None,
        "prompts": str(asked.prompts) if asked.prompts else None,
        "seed": 0,
    }
    if asked.chosen:
        manifest.settings["chosen"] = asked.chosen
    if left_out := asked.selection.to_dict():
        manifest.settings["selection"] = left_out
    manifest.prompts_digest = prompts_digest(keys_of(tasks))
    return tasks, steps


def tasks_of(trace: Trace, most: int | None, manifest: Manifest) -> tuple[list[Task], int]:
    """The prompts of a serve trace to replay, and in how many steps; what of it is not replayed goes to the manifest.

    Args:
        trace: the serve trace.
        most: most steps; None for as many as the server did.
        manifest: of the trace to be written.
    """
    tasks, unpaired = replay_tasks(trace, most)
    steps = 1 + max((len(path) for task in tasks for _, path in task.chains or ()), default=0)
    if unpaired:
        why = "the server let them attend to another branch of its draft tree, which training never does"
        rows = f"{unpaired} rows of the replayed trace"
        manifest.not_materialised.append({"site": "*", "rows": rows, "why": why})
    if early := trace.manifest.ended_early:
        manifest.warnings.append(f"of the replayed trace {trace.path} {early}")
    return tasks, steps


def keys_of(tasks: Sequence[Task]) -> list[str]:
    """Prompt keys by prompt number: a server notes its prompts in the order they came."""
    records = sorted((task.record for task in tasks), key=lambda record: int(record["prompt_id"]))
    return [str(record["prompt_key"]) for record in records]


def load_tokenizer(target: Path) -> Any:
    """The tokenizer that lies in a target's folder, as training loads it.

    Raises:
        PromptsError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise PromptsError(f"cannot load the tokenizer of {target}: give the prompts as input_ids") from error


def prompt_tasks(prompts: list[Prompt], target: Path | None) -> list[Task]:
    """Prompts as tasks on their own tokens.

    Raises:
        PromptsError: a prompt cannot be tokenized with what the target's folder holds.
    """
    asks = target is not None and any(prompt.input_ids is None for prompt in prompts)
    tokenizer = load_tokenizer(target) if asks and target is not None else None
    tasks = []
    for number, prompt in enumerate(prompts):
        token_ids = tokenize(prompt, tokenizer)
        if target is not None:
            check_tokens(prompt.key, token_ids, read_config(target))
        row = {
            "prompt_id": number,
            "prompt_key": prompt.key,
            "request_id": "",
            "token_ids": token_ids,
            "num_prompt_tokens": len(token_ids),
            "text": prompt.text or "",
            "output_ids": [],
        }
        tasks.append(Task(row, tuple(token_ids)))
    return tasks


def _manifest(
    asked: TrainOptions, host: TrainingHost, draft: LoadedDraft, trace: Trace | None, dtype: str, device: str
) -> Manifest:
    from eagle_trace_training.weights import target_facts

    if asked.target is not None:
        target = target_facts(asked.target)
    else:
        target = dict(trace.manifest.target) if trace is not None else {}
    return Manifest(
        side="train",
        level=asked.level,
        host=host.name,
        packages=package_versions(host),
        target=target,
        draft=draft.facts,
        dtype=dtype,
        device=device,
        changes=host.changes(dtype),
        argv=list(asked.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        warnings=list(draft.warnings),
    )


def package_versions(host: TrainingHost) -> dict[str, str]:
    """Versions of the packages that compute the trainer's forward, and of this one; ``unknown`` for what has none."""
    found = {"eagle-trace": __version__}
    for package in host.packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
