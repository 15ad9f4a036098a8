"""What vLLM is asked to load: checks that need no start, and its command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_trace.checkpoints import read_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace.manifest import without_secrets
from eagle_trace_serving.arguments import PREFIX_CACHE_OFF, beneath, names_of, number, value
from eagle_trace_serving.host import Address, Launch, ServerOptions
from eagle_trace_serving.pair import check_fit, exchanged
from eagle_trace_vllm.asking import PLAIN_IDS
from eagle_trace_vllm.releases import check_release

SPECULATION = ("--speculative-config", "--speculative_config", "-sc")
TENSOR_PARALLEL = ("--tensor-parallel-size", "--tensor_parallel_size", "-tp")
PREFIX_CACHE = ("--enable-prefix-caching", "--enable_prefix_caching")
API_KEY = ("--api-key", "--api_key")
#: by these one recording would not hold all requests
REPLICAS = ("--data-parallel-size", "-dp", "--api-server-count", "-asc")
ONE_REPLICA = (
    "with several replicas or API servers each answers other requests, and only one would be recorded: record without "
    "--data-parallel-size and --api-server-count"
)
#: names in a config's `architectures` that vLLM's Llama and Qwen3 draft classes are registered under (0.28 to 0.33)
DRAFTS = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
)
LAYERS = ("llama", "qwen3")


def check(options: ServerOptions) -> None:
    """Refuse what cannot work; see `eagle_trace_serving.host.ServingHost.check`."""
    if options.topk != 1:
        raise UsageError(f"vLLM drafts chains and no trees: record without --topk {options.topk}")
    if options.verified_tokens != options.steps + 1:
        raise UsageError(
            f"vLLM verifies the {options.steps} drafted tokens and the one before them: record without --draft-tokens"
        )
    if options.keep_cuda_graphs:
        raise UsageError(
            "nothing can be recorded at the boundaries of vLLM's CUDA graphs: --keep-cuda-graphs is SGLang's"
        )
    if any(number(options.host_args, [name]) > 1 for name in REPLICAS):
        raise UsageError(ONE_REPLICA)
    if names_of(options.host_args).intersection(API_KEY):
        raise UsageError(
            "the server that record starts is for record alone, and has a key of its own: leave out --api-key"
        )
    speculation(options)
    check_pair(options.target, options.draft)


def check_pair(target: Path, draft: Path) -> None:
    """Refuse a draft that vLLM has no class for, or none that can be recorded.

    Raises:
        CheckpointError: a folder is not what vLLM needs, or the two do not fit.
    """
    config = read_config(draft)
    if kind := config.get("speculators_model_type"):
        layer = (config.get("transformer_layer_config") or {}).get("model_type", "llama")
        if kind != "eagle3" or layer not in LAYERS:
            what = f"a draft of the kind {kind}" if kind != "eagle3" else f"an EAGLE-3 draft with a {layer} layer"
            raise CheckpointError(
                f"{draft} is {what}, and of vLLM's drafts EAGLE-3 with a Llama or Qwen3 layer is recorded"
            )
    elif not any(name in DRAFTS for name in config.get("architectures") or ()):
        raise CheckpointError(
            f"{draft} is not a draft that is recorded on vLLM: its config says {config.get('architectures')}, "
            f"not one of {', '.join(DRAFTS)}, and it is not in speculators format"
            f"{exchanged(target)}"
        )
    check_fit("vLLM", target, draft)


def speculation(options: ServerOptions) -> dict[str, Any]:
    """vLLM's speculative config: ours, and whatever the user's own says over it.

    Raises:
        UsageError: theirs is not JSON, or asks for another method.
    """
    given: dict[str, Any] = {}
    if text := value(options.host_args, SPECULATION):
        try:
            given = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{SPECULATION[0]} takes a JSON object, not {text}") from error
    if (method := given.get("method", "eagle3")) != "eagle3":
        raise UsageError(f"an EAGLE-3 draft is recorded, and {SPECULATION[0]} asks for the method {method}")
    return {"model": str(options.draft), "method": "eagle3", "num_speculative_tokens": options.steps} | given


def launch(options: ServerOptions, address: Address, environment: Mapping[str, str]) -> Launch:
    """How vLLM is started for a recording; see `eagle_trace_serving.host.ServingHost.launch`."""
    check_release(options.device)
    arguments = {
        "--model": str(options.target),
        "--dtype": options.dtype,
        "--seed": "0",
        # a checkpoint's own sampling defaults are not what was asked for
        "--generation-config": "vllm",
    }
    flags, changes = [], []
    if not any(word in PREFIX_CACHE for word in options.host_args):
        flags.append("--no-enable-prefix-caching")
        changes.append(PREFIX_CACHE_OFF)
    if not any(options.target.glob("tokenizer*")):
        # it would not start; prompts are sent as token ids
        flags.append("--skip-tokenizer-init")
    told = {**environment, "VLLM_API_KEY": address.key, PLAIN_IDS: "0"}
    if options.device == "cpu":
        flags.append("--enforce-eager")
        changes.append("torch.compile off (--enforce-eager)")
        told = cpu_environment(told, number(options.host_args, TENSOR_PARALLEL))
    ours = {
        "--speculative-config": json.dumps(speculation(options)),
        "--host": "127.0.0.1",
        "--port": str(address.port),
    }
    # the last of an option counts
    last = [word for item in ours.items() for word in item]
    return Launch(
        module="eagle_trace_vllm.launch",
        job={"arguments": [*beneath(arguments, options.host_args), *flags, *options.host_args, *last]},
        environment=told,
        changes=changes,
        settings={"vllm_args": without_secrets(options.host_args), "seed": 0},
    )


def cpu_environment(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What vLLM needs on a CPU, where the user has not said otherwise: a small cache, and threads for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    bound = "|".join(",".join(map(str, cores[n * each : (n + 1) * each] or cores[-1:])) for n in range(ranks))
    told = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound if ranks > 1 else "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return told | dict(environment)
