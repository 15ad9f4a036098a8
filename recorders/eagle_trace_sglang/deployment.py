"""What SGLang is asked to load: checks that need no start, and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config, text_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import without_secrets
from eagle_trace_serving.arguments import PREFIX_CACHE_OFF, beneath, number
from eagle_trace_serving.host import Address, Launch, ServerOptions
from eagle_trace_serving.pair import check_fit, exchanged
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


def check(options: ServerOptions) -> None:
    """Refuse what cannot work; see `eagle_trace_serving.host.ServingHost.check`."""
    check_parallelism(options.host_args)
    check_deployment(options.target, options.draft)


def check_parallelism(extra: Sequence[str]) -> None:
    """Refuse SGLang arguments by which one recording would not hold all requests.

    Raises:
        UsageError: they ask for more than one replica.
    """
    if any(number(extra, [name]) > 1 for name in DATA_PARALLEL) or "--enable-dp-attention" in extra:
        raise UsageError(ONE_REPLICA)


def check_deployment(target: Path, draft: Path) -> None:
    """Refuse a pair that SGLang cannot load at all.

    Raises:
        CheckpointError: a folder is not what SGLang needs, or the two do not fit.
    """
    config = read_config(draft)
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        raise CheckpointError(
            f"the draft {draft} is in speculators format, which SGLang does not read: "
            f"convert it with `eagle-trace export {draft} OUT --target {target}` and give OUT"
        )
    if not any("Eagle3" in str(name) for name in config.get("architectures") or []):
        raise CheckpointError(
            f"the draft {draft} is no EAGLE-3 draft for SGLang: its config says {config.get('architectures')}, "
            f"not {['LlamaForCausalLMEagle3']}{exchanged(target)}"
        )
    check_fit("SGLang", target, draft)


def launch(options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
    """How SGLang is started for a recording; see `eagle_trace_serving.host.ServingHost.launch`."""
    check_release(options.device)
    check_classes(read_config(options.target), read_config(options.draft), options.host_args)
    arguments, changes = server_arguments(options)
    on_cpu = options.device == "cpu"
    if on_cpu:
        for folder in (options.target, options.draft):
            check_cpu_rotation(folder, text_config(read_config(folder)))
        environment = cpu_environment(environment, ranks=number(options.host_args, TENSOR_PARALLEL))
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


def server_arguments(options: ServerOptions) -> tuple[list[str], list[str]]:
    """SGLang's command line for a recording, and one sentence for each thing that recording changes.

    The user's own arguments come last and win.
    """
    arguments = {
        "--model-path": str(options.target),
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(options.draft),
        "--speculative-num-steps": str(options.steps),
        "--speculative-eagle-topk": str(options.topk),
        "--speculative-num-draft-tokens": str(options.verified_tokens),
        "--dtype": options.dtype,
        "--device": options.device,
        "--log-level": "info",
        "--random-seed": "0",
    }
    extra, flags, changes = options.host_args, ["--skip-server-warmup"], []
    if not options.keep_cuda_graphs:
        flags.append("--disable-cuda-graph")
        changes.append("CUDA graphs off: Python hooks do not run inside a replayed graph")
    if "--enable-radix-cache" not in extra:
        flags.append("--disable-radix-cache")
        changes.append(PREFIX_CACHE_OFF)
    if options.device == "cpu":
        arguments |= {
            "--attention-backend": "intel_amx",
            "--mem-fraction-static": "0.3",
            # room in the cache, which SGLang cannot work out here
            "--max-total-tokens": str(options.cache_tokens),
        }
        # an idle scheduler polls without a pause, which on two cores takes one from everybody else
        flags.append("--sleep-on-idle")
        changes.append("SGLang's CPU engine with eagle-trace's own attention and tree kernels")
    users = [word for word in extra if word != "--enable-radix-cache"]
    return [*beneath(arguments, users), *flags, *users], changes
