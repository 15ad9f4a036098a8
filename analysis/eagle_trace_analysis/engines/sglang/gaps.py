"""What of a training SGLang's draft class has no form of: one list, for `check`, `export` and the causes."""

from __future__ import annotations

from eagle_trace_analysis.engines.base import Gap
from eagle_trace_analysis.engines.sglang.engine import TITLE
from eagle_trace_analysis.trainers.base import Training

RESIDUAL = Gap(
    "norm_before_residual",
    f"norm_before_residual is true: {TITLE}'s residual starts from the hidden state before hidden_norm",
    "retrain with --no-norm-before-residual, or serve with an engine that has this form (vLLM)",
)


def gaps(training: Training) -> list[Gap]:
    """One entry per trained setting that the class cannot compute."""
    layer = training.decoder
    kind, activation = layer.get("model_type", "llama"), layer.get("hidden_act", "silu")
    retrain = "retrain with a llama layer (silu, no biases, no q/k norms)"
    found = [RESIDUAL] if training.norm_before_residual else []
    if training.own_embedding:
        why = f"the draft trained its own embedding: {TITLE} replaces it with the target's"
        found.append(Gap("embedding", why, "train without embed_requires_grad"))
    if kind != "llama":
        norms = " and has no q_norm and k_norm" if kind == "qwen3" else ""
        why = f"the decoder layer is {kind}: {TITLE}'s draft class computes llama layers{norms}"
        found.append(Gap("decoder", why, retrain))
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        why = f"the decoder layer has biases: {TITLE}'s draft class loads none"
        found.append(Gap("bias", why, retrain))
    if activation != "silu":
        why = f"the activation is {activation}: {TITLE}'s draft class has silu only"
        found.append(Gap("activation", why, retrain))
    return found
