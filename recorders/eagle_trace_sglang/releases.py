"""Which SGLang is installed here, and whether a recorder can be hung into it; asked before anything starts."""

from __future__ import annotations

from eagle_trace.extras import way_to
from eagle_trace_serving.releases import Releases
from eagle_trace_serving.sources import HookPoint, missing_names

#: releases whose recording was compared with the training forward and agreed (docs/support.md), newest first
TESTED = ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.19")

HOOK_POINTS = (
    HookPoint("plugins/hook_registry.py", ("HookRegistry", "HookType"), "plugins"),
    HookPoint(
        "speculative/eagle_worker_v2.py",
        ("EagleDraftWorker.init_lm_head", "EAGLEWorkerV2.verify", "select_top_k_tokens"),
        "the draft worker",
    ),
    HookPoint("models/llama_eagle3.py", ("LlamaForCausalLMEagle3", "LlamaModel"), "the draft's class"),
    HookPoint(
        "model_executor/forward_batch_info.py",
        tuple(f"ForwardBatch.{field}" for field in ("rids", "positions", "extend_seq_lens", "spec_info")),
        "which row belongs to which request",
    ),
    HookPoint(
        "speculative/eagle_info.py",
        (
            "EagleVerifyInput.retrieve_next_token",
            "EagleVerifyInput.retrieve_next_sibling",
            "EagleDraftExtendInput.num_accept_tokens",
        ),
        "what was proposed and accepted",
    ),
    HookPoint("runtime_context.py", ("get_spec", "get_memory"), "the settings of the server"),
    HookPoint(
        "managers/scheduler.py",
        ("Scheduler._add_request_to_queue", "Scheduler.process_batch_result"),
        "when a request begins and ends",
    ),
    HookPoint(
        "entrypoints/http_server.py",
        ("_setup_and_run_http_server", "_wait_and_warmup"),
        "recording in a server that its user started",
    ),
    HookPoint("utils/auth.py", ("AuthLevel.ADMIN_OPTIONAL", "auth_level"), "who may record over HTTP"),
    HookPoint("managers/utils.py", ("GenerationBatchResult.accept_lens",), "how much of it was accepted"),
    HookPoint("layers/attention/attention_registry.py", ("ATTENTION_BACKENDS",), "attention on a CPU", cpu=True),
    HookPoint("speculative/draft_utils.py", ("DraftBackendFactory._create_backend",), "drafting on a CPU", cpu=True),
    HookPoint("speculative/eagle_utils.py", ("_is_cpu",), "verification on a CPU", cpu=True),
)

WRONG_ON_CPU = dict.fromkeys(
    ("0.5.18", "0.5.17", "0.5.16"),
    "its CPU attention takes the committed length for that of every verify and draft step (repaired in 0.5.19)",
)

#: a release from before it decides to verify greedily inside a longer function, where nobody can object
SAMPLING = HookPoint("speculative/eagle_utils.py", ("_verify_uses_greedy",), "sampling on a CPU", cpu=True)


RELEASES = Releases(
    title="SGLang",
    package="sglang",
    folder="srt",
    install=way_to("serve"),
    tested=TESTED,
    hook_points=HOOK_POINTS,
    wrong_on_cpu=WRONG_ON_CPU,
)


def check_release(device: str) -> list[str]:
    """What a recording on a device must be warned of, or HostError; see `Releases.check`."""
    warnings = RELEASES.check(device)
    name, folder = RELEASES.installed()
    if device == "cpu" and missing_names(folder, SAMPLING):
        warnings.append(
            f"SGLang {name} verifies greedily on a CPU: there a temperature counts for the first token only"
        )
    return warnings
