"""Another target: revision, quantisation, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from eagle_trace.checkpoints import text_config
from eagle_trace_analysis.causes.base import (
    ONE_LAYER_FED,
    RECORD_VALUES,
    Cause,
    Outcome,
    confirmed,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.causes.embedding_replaced import own_embedding
from eagle_trace_analysis.checkpoint.files import DTYPE_NAMES, StoredTensor, as_float32
from eagle_trace_analysis.checkpoint.subject import Target
from eagle_trace_analysis.comparison.tolerance import UNIT
from eagle_trace_analysis.engines.sglang.target_classes import HELD_IN_BFLOAT16
from eagle_trace_analysis.evidence.context import Context

#: tensors of the two folders that are compared, and rows of each
TENSORS, ROWS = 2048, 8
QUANTISING = ("--quantization", "--quantize-and-serve", "--torchao-config", "--modelopt-quant")
HOLD_ALIKE = (
    "round these tensors of the target to bfloat16, as they are published: both sides then compute with the same; the "
    "draft is not at fault"
)
NORM_ALIKE = (
    "take the training's features from an engine that reads rms_norm_eps (--features FOLDER of what the draft was "
    "trained on, or --features serve); the draft is not at fault"
)
#: kinds of text models whose latents transformers 5 norms with an eps of its own, and that eps
LATENT_TARGETS, LATENT_EPS = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"}), 1e-6
#: config entries that change what a model computes
TELLING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "rope_parameters",
           "rope_theta", "rope_scaling", "vocab_size", "quantization_config",
           # which experts a token goes to, and what they weigh
           "num_experts_per_tok", "num_local_experts", "n_routed_experts", "n_group", "topk_group", "topk_method",
           "scoring_func", "norm_topk_prob", "routed_scaling_factor")  # fmt: skip


def check(context: Context) -> Outcome:
    """Whether both sides ran the same target.

    No sample of the weights proves that they did. So features that differ, and that no other cause is proved to
    explain, leave it open unless a difference of the targets was seen.
    """
    features = context.features
    embedded = context.divergence("embed") is not None and own_embedding(context)[0] is not True
    if features is None and not embedded:
        if context.agrees("embed") and context.train.manifest.settings.get("features") == "serve":
            return not_tested(
                "the training side was given the server's own features", "record it with --features compute"
            )
        return not_tested(context.no_features, RECORD_VALUES)
    fact, differs = _static(context)
    if features is not None and not embedded:
        if features.single:
            return not_tested(*ONE_LAYER_FED)
        if features.healthy:
            worst = max(features.matrix[k, k] for k in range(len(features.sites)))
            agree = f"features of {len(features.sites)} layers agree (channel error {worst:.1e} at most)"
            if differs:
                return not_tested(
                    f"{fact}, and {agree}: what differs is within the rounding, or not in these layers",
                    "record both sides in float32",
                )
            return ruled_out(agree)
    site = "embed" if embedded else _first_site(context)
    if differs and (embedded or _same_layers(context)):
        return confirmed(f"{fact}; {site} differs", "serve the draft with the target it was trained for", site)
    if differs:
        return ruled_out(f"{fact}, but the layers fed differ in another way")
    if not embedded and (known := _engines_own(context)) is not None and _same_layers(context):
        return confirmed(*known, site)
    if (other := _explained(context, site)) is not None:
        return ruled_out(f"{fact}; {other} explains {site}")
    return not_tested(
        f"{site} differs, which no other cause is proved to explain; {fact}, which does not prove that the targets are "
        "one",
        "give --target, or record the training side with --features compute on the server's target",
    )


def _engines_own(context: Context) -> tuple[str, str] | None:
    """What SGLang's class of the target computes otherwise than transformers', and what to do; None for nothing."""
    if context.serve.manifest.host != "sglang" or context.target is None:
        return None
    if (held := _held_in_bfloat16(context, context.target)) is not None:
        return held, HOLD_ALIKE
    if (normed := _latents_normed_otherwise(context, context.target)) is not None:
        return normed, NORM_ALIKE
    return None


def _latents_normed_otherwise(context: Context, target: Target) -> str | None:
    """DeepSeek's kin norm the latents of queries, keys and values: each host with an eps of its own."""
    eps = target.config.get("rms_norm_eps")
    computed = context.train.manifest.settings.get("features") == "compute"
    if not computed or target.config.get("model_type") not in LATENT_TARGETS or eps in (None, LATENT_EPS):
        return None
    return (
        f"SGLang's {target.architecture} norms the target's latents with its rms_norm_eps ({eps:g}), transformers with "
        f"{LATENT_EPS:g} whatever the config says"
    )


def _held_in_bfloat16(context: Context, target: Target) -> str | None:
    """Tensors of the target that its class rounds although the server computes in a finer dtype; None for none."""
    ending = HELD_IN_BFLOAT16.get(target.architecture or "")
    if ending is None or target.checkpoint is None or context.serve.manifest.dtype == "bfloat16":
        return None
    stored = [as_float32(one.read()) for one in target.checkpoint.tensors.values() if one.name.endswith(ending)]
    rounded = sum(bool((one.astype(ml_dtypes.bfloat16).astype(np.float32) != one).any()) for one in stored)
    if not rounded:
        return None
    return (
        f"SGLang's {target.architecture} holds {ending.removeprefix('.')} in bfloat16 whatever the dtype "
        f"({context.serve.manifest.dtype} here), and {rounded} of {len(stored)} such tensors of the target are finer "
        "than that"
    )


def _first_site(context: Context) -> str:
    """The first of the features that differs."""
    for site in context.feature_sites:
        if context.divergence(site) is not None:
            return site
    features = context.features
    wrong = [] if features is None else [
        site for k, site in enumerate(features.sites)
        if k < len(features.matrix) and features.matrix[k, k] > features.allowed[site]
    ]  # fmt: skip
    return wrong[0] if wrong else "target.hidden.0"


def _explained(context: Context, site: str) -> str | None:
    """The confirmed cause that is about what the draft is fed, if there is one."""
    given = ("embed",) if site == "embed" else ("target.hidden.", "fused", "token", "position")
    for name, one in context.outcomes.items():
        if one.verdict == "confirmed" and (one.site or "").startswith(given):
            return name
    tipped = context.diff.tipped
    return "router-tipped" if site != "embed" and tipped is not None and tipped.verdict == "many" else None


def _same_layers(context: Context) -> bool:
    """Whether each layer fed is nearest to the trained one, so that it is the same layer with other numbers."""
    features = context.features
    if features is None or features.single:
        return False
    for j, rows in enumerate(features.served):
        near, ids = features.nearest(rows), context.trained_ids
        if near is not None and ids and j < len(ids):
            # a target of other weights is near no layer; what must not be is another layer that fits
            if near[0] != ids[j] and near[1] <= features.allowed[features.sites[j]]:
                return False
        elif int(features.matrix[j].argmin()) != j and features.matrix[j].min() <= features.allowed[features.sites[j]]:
            return False
    return True


def _static(context: Context) -> tuple[str, bool | None]:
    """What is known of the two targets, and whether they differ (None: not to be known)."""
    train, serve = context.train.manifest.target, context.serve.manifest.target
    words = [str(word) for word in context.serve.manifest.settings.get("sglang_args", [])]
    if asked := [word for word in words if word.startswith(QUANTISING)]:
        return f"the server quantises the target ({asked[0]})", True
    # a model of images and text keeps its language model's entries within
    a, b = ({**config, **text_config(config)} for config in (facts.get("config") or {} for facts in (train, serve)))
    changed = [key for key in TELLING if a and b and a.get(key) != b.get(key)]
    if changed:
        return f"the targets' configs differ in {', '.join(changed)}", True
    sampled = _by_samples(context, train.get("tensors"), serve.get("tensors"))
    if sampled is not None and sampled[1]:
        return sampled
    left, right = context.train_target, context.target
    if left is None or right is None:
        return sampled or ("the weights of both targets are not there to compare", None)
    if left.folder.resolve() == right.folder.resolve():
        return sampled or (f"both sides name the same folder ({left.folder.name})", None)
    if left.checkpoint is None or right.checkpoint is None:
        return sampled or ("the weights of both targets are not there to compare", None)
    return _by_folders(context, left.checkpoint.tensors, right.checkpoint.tensors)


def _by_samples(context: Context, train: Any, serve: Any) -> tuple[str, bool | None] | None:
    """By the samples that both recorders took; None if they took none."""
    if not isinstance(train, Mapping) or not isinstance(serve, Mapping):
        return None
    names = [name for name in train if name in serve]
    if not names:
        return None
    pairs = {name: (str(train[name]).split(" "), str(serve[name]).split(" ")) for name in names}
    dtypes = [name for name, (a, b) in pairs.items() if a[0] != b[0]]
    differing = [name for name, (a, b) in pairs.items() if a[0] == b[0] and a != b]
    if differing:
        return (
            f"{len(differing)} of {len(names)} tensors sampled differ in the two targets (first {differing[0]})",
            True,
        )
    if dtypes:
        a, b = pairs[dtypes[0]]
        text = f"the target is stored in {b[0]} in serving and in {a[0]} in training ({len(dtypes)} tensors)"
        return text, True if _shows(context, a[0], b[0]) else None
    return f"samples of {len(names)} tensors are equal in both targets", None


def _shows(context: Context, *stored: str) -> bool:
    """Whether two dtypes in storage are two in computing: not where both sides round to one that is coarser."""
    computed = [UNIT.get(trace.manifest.dtype, 0.0) for trace in (context.train, context.serve)]
    held = [UNIT.get(DTYPE_NAMES.get(name, ""), 1.0) for name in stored]
    return len({max(one, two) for one, two in zip(computed, held, strict=True)}) > 1


def _by_folders(
    context: Context, mine: Mapping[str, StoredTensor], theirs: Mapping[str, StoredTensor]
) -> tuple[str, bool | None]:
    """By some rows of every tensor of both folders."""
    names = [name for name, one in mine.items() if name in theirs and one.is_float]
    if not names:
        return "the two targets have no tensor in common", True
    names = [names[at] for at in np.unique(np.linspace(0, len(names) - 1, min(TENSORS, len(names))).astype(int))]
    differing = [name for name in names if not _alike(mine[name], theirs[name])]
    if differing:
        return (
            f"{len(differing)} of {len(names)} tensors compared differ in the two targets (first {differing[0]})",
            True,
        )
    stored = {(mine[name].dtype, theirs[name].dtype) for name in names}
    for a, b in stored:
        if a != b and _shows(context, a, b):
            return f"the target is stored in {b} in serving and in {a} in training", True
    return f"some rows of {len(names)} tensors are equal in both targets", None


def _alike(x: StoredTensor, y: StoredTensor) -> bool:
    """Whether some rows of two tensors are equal once they are rounded to the coarser of their dtypes."""
    if x.shape != y.shape or not y.is_float or not x.shape:
        return x.shape == y.shape and y.is_float
    rows = np.unique(np.linspace(0, x.shape[0] - 1, min(ROWS, x.shape[0])).astype(np.int64))
    one, two = x.rows(rows), y.rows(rows)
    coarser = min((one.dtype, two.dtype), key=lambda dtype: ml_dtypes.finfo(dtype).nmant)
    return bool(
        np.array_equal(as_float32(as_float32(one).astype(coarser)), as_float32(as_float32(two).astype(coarser)))
    )


CAUSE = Cause(
    "target-differs",
    "Low accept length; the right layers are fed, with other numbers.",
    "Configs, and a sample of every tensor of both targets, as the recorders took it or from the folders; features "
    "(or embeddings) differ, and no other layer fits. Equal samples do not rule it out.",
    "Serve the draft with the revision and precision of the target it was trained for.",
    ("target.hidden.0", "embed"),
    check,
    last=True,
)
