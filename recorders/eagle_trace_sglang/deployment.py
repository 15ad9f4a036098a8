"""What SGLang is asked to load: checks that need no start, and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config, text_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import without_secrets
from eagle_trace_serving.host import Address, Launch, ServerOptions
from eagle_trace_sglang.releases import check_release
from eagle_trace_sglang.targets import check_classes
from sglang_cpu_eagle import cpu_environment

TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size", "--attn-dp-size")
#: kinds of models whose latent attention SGLang rotates by a table of its own on a CPU
LATENT_KINDS = ("deepseek_v2", "deepseek_v3", "kimi_k2")
ONE_REPLICA = (
    "with data parallelism each replica answers other requests, and only one would be recorded: "
    "record without --dp-size, --attn-dp-size and --enable-dp-attention"
)


def tensor_parallel_size(extra: Sequence[str]) -> int:
    """Ranks that SGLang's own arguments ask for."""
    return _number(extra, TENSOR_PARALLEL)


def check_parallelism(extra: Sequence[str]) -> None:
    """Refuse SGLang arguments by which one recording would not hold all requests.

    Raises:
        UsageError: they ask for more than one replica.
    """
    if _number(extra, DATA_PARALLEL) > 1 or "--enable-dp-attention" in extra:
        raise UsageError(ONE_REPLICA)


def _number(extra: Sequence[str], names: Sequence[str]) -> int:
    """Value of the last of the options `names` among `extra`; 1 if there is none, or none that is a number."""
    found = 1
    words = list(extra)
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if not value:
            value = "".join(words[at + 1 : at + 2])
        if name in names and value.isascii() and value.isdecimal() and len(value) < 10:
            found = int(value)
    return found


def check_deployment(target: Path, draft: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configs of target and draft, if SGLang can load the pair at all.

    Only what must fail is refused here: a draft that loads and computes garbage is what a recording is for.

    Raises:
        CheckpointError: a folder is not what SGLang needs, or the two do not fit.
    """
    target_config, draft_config = read_config(target), read_config(draft)
    if "transformer_layer_config" in draft_config or "speculators_model_type" in draft_config:
        raise CheckpointError(
            f"the draft {draft} is in speculators format, which SGLang does not read: "
            f"convert it with `eagle-trace export {draft} OUT --target {target}` and give OUT"
        )
    if not any("Eagle3" in str(name) for name in draft_config.get("architectures") or []):
        raise CheckpointError(
            f"the draft {draft} is no EAGLE-3 draft for SGLang: its config says {draft_config.get('architectures')}, "
            'not ["LlamaForCausalLMEagle3"]'
        )
    if not any(any(draft.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt")):
        raise CheckpointError(f"the draft {draft} has no weights: SGLang loads *.safetensors, else *.bin, else *.pt")
    # a draft of another width says what it is fed, and keeps an embedding of its own
    wide = text_config(target_config).get("hidden_size")
    narrow = draft_config.get("target_hidden_size") or draft_config.get("hidden_size")
    if wide != narrow:
        raise CheckpointError(
            f"target and draft do not fit: the target is {wide} wide, and the draft takes features of {narrow}; "
            "use the target this draft was trained for"
        )
    return target_config, draft_config


def launch(options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
    """How SGLang is started for a recording; see `eagle_trace_serving.host.ServingHost.launch`."""
    check_release(options.device)
    check_classes(read_config(options.target), read_config(options.draft), options.host_args)
    arguments, changes = server_arguments(
        target=options.target,
        draft=options.draft,
        steps=options.steps,
        topk=options.topk,
        draft_tokens=options.verified_tokens,
        dtype=options.dtype,
        device=options.device,
        tokens=options.cache_tokens,
        keep_cuda_graphs=options.keep_cuda_graphs,
        extra=options.host_args,
    )
    on_cpu = options.device == "cpu"
    if on_cpu:
        for folder in (options.target, options.draft):
            check_cpu_rotation(folder, text_config(read_config(folder)))
        environment = cpu_environment(environment, ranks=tensor_parallel_size(options.host_args))
    return Launch(
        module="eagle_trace_sglang.launch",
        job={"server_args": arguments, "port": address.port, "key": address.key},
        environment=environment,
        changes=changes,
        settings={"sglang_args": without_secrets(options.host_args), "seed": 0},
        room=options.cache_tokens if on_cpu else None,
    )


def check_cpu_rotation(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse latent attention (MLA) that SGLang cannot rotate on a CPU, where it would end with a traceback.

    Raises:
        CheckpointError: the model in `folder` has no scaling of its rotary embedding, or rotates halves of its heads.
    """
    if config.get("kv_lora_rank") is None or config.get("model_type") not in LATENT_KINDS:
        return
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    lacks = (
        "names no scaling of its rotary embedding (rope_scaling)"
        if rope.get("rope_type", rope.get("type", "default")) == "default"
        else "has rope_interleave false"
        if config.get("rope_interleave") is False
        else ""
    )
    if lacks:
        raise CheckpointError(
            f"SGLang cannot compute {folder} on a CPU: its config {lacks}, and for latent attention SGLang has "
            "DeepSeek's interleaved yarn alone there; record on a GPU"
        )


def server_arguments(
    *,
    target: Path,
    draft: Path,
    steps: int,
    topk: int,
    draft_tokens: int,
    dtype: str,
    device: str,
    tokens: int,
    extra: Sequence[str],
    keep_cuda_graphs: bool = False,
) -> tuple[list[str], list[str]]:
    """SGLang's command line for a recording, and one sentence for each thing that recording changes.

    Args:
        tokens: room in the key/value cache, in tokens (used on CPU, where SGLang cannot work it out).
        extra: the user's own arguments; they come last and win.
        keep_cuda_graphs: whether SGLang may use its CUDA graphs.
    """
    arguments = {
        "--model-path": str(target),
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(draft),
        "--speculative-num-steps": str(steps),
        "--speculative-eagle-topk": str(topk),
        "--speculative-num-draft-tokens": str(draft_tokens),
        "--dtype": dtype,
        "--device": device,
        "--log-level": "info",
        "--random-seed": "0",
    }
    flags, changes = ["--skip-server-warmup"], []
    if not keep_cuda_graphs:
        flags.append("--disable-cuda-graph")
        changes.append("CUDA graphs off: Python hooks do not run inside a replayed graph")
    if "--enable-radix-cache" not in extra:
        flags.append("--disable-radix-cache")
        changes.append("prefix cache off: a cached position is not computed, so it could not be recorded")
    if device == "cpu":
        arguments |= {
            "--attention-backend": "intel_amx",
            "--mem-fraction-static": "0.3",
            "--max-total-tokens": str(tokens),
        }
        # an idle scheduler polls without a pause, which on two cores takes one from everybody else
        flags.append("--sleep-on-idle")
        changes.append("SGLang's CPU engine with eagle-trace's own attention and tree kernels")
    given = {word.split("=", 1)[0] for word in extra}
    line = [word for name, value in arguments.items() if name not in given for word in (name, value)]
    extra = [word for word in extra if word != "--enable-radix-cache"]
    return [*line, *flags, *extra], changes
