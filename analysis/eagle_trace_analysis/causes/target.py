"""Another target: revision, quantisation, rotation."""

from __future__ import annotations

import numpy as np

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.causes.embedding import own_embedding
from eagle_trace_analysis.checkpoint.files import as_float32
from eagle_trace_analysis.context import Context

TENSORS, ROWS = 12, 64
QUANTISING = ("--quantization", "--quantize-and-serve", "--torchao-config", "--modelopt-quant")
#: config entries that change what a model computes
TELLING = ("hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "rope_parameters",
           "rope_theta", "rope_scaling", "vocab_size", "quantization_config")  # fmt: skip


def check_target(context: Context) -> Outcome:
    """Whether both sides ran the same target."""
    features = context.features
    embedded = context.divergence("embed") is not None and own_embedding(context)[0] is not True
    if features is None and not embedded:
        if context.agrees("embed") and context.train.manifest.settings.get("features") == "serve":
            return not_tested(
                "the training side was given the server's own features", "record it with --features compute"
            )
        return not_tested(context.no_features, RECORD_VALUES)
    if features is not None and not embedded:
        if features.single:
            return not_tested("the server fed one layer only", "mend single-layer-features first and record again")
        if features.healthy:
            worst = max(features.matrix[k, k] for k in range(len(features.sites)))
            return ruled_out(f"features of {len(features.sites)} layers agree (channel error {worst:.1e} at most)")
    fact, differs = _static(context)
    site = "embed" if embedded else "target.hidden.0"
    if differs and (embedded or _same_layers(context)):
        return confirmed(f"{fact}; {site} differs", "serve the draft with the target it was trained for", site)
    if differs:
        return ruled_out(f"{fact}, but the layers fed differ in another way")
    if differs is None:
        return not_tested(
            fact, "give --target, or record the training side with --features compute on the server's target"
        )
    return ruled_out(fact)


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
    a, b = (facts.get("config") or {} for facts in (train, serve))
    changed = [key for key in TELLING if a and b and a.get(key) != b.get(key)]
    if changed:
        return f"the targets' configs differ in {', '.join(changed)}", True
    left, right = context.train_target, context.target
    if left is None or right is None or left.checkpoint is None or right.checkpoint is None:
        return "the weights of both targets are not there to compare", None
    if left.folder.resolve() == right.folder.resolve():
        return f"both sides ran the target in the same folder ({left.folder.name})", False
    theirs = right.checkpoint.tensors
    names = [name for name, one in left.checkpoint.tensors.items() if name in theirs and one.is_float]
    names = (
        [names[at] for at in np.unique(np.linspace(0, len(names) - 1, min(TENSORS, len(names))).astype(int))]
        if names
        else []
    )
    differing = []
    for name in names:
        x, y = left.checkpoint.tensors[name], theirs[name]
        if x.shape != y.shape or not y.is_float:
            differing.append(name)
            continue
        rows = np.unique(np.linspace(0, x.shape[0] - 1, min(ROWS, x.shape[0])).astype(np.int64))
        one, two = as_float32(x.rows(rows)), as_float32(y.rows(rows))
        if not np.allclose(one, two, rtol=2**-7 if x.dtype != y.dtype else 0.0, atol=0.0):
            differing.append(name)
    if differing:
        return (
            f"{len(differing)} of {len(names)} tensors compared differ between the two targets (first {differing[0]})",
            True,
        )
    return f"{len(names)} of {len(names)} tensors compared are equal in both targets", False if names else None


CAUSES = (
    Cause(
        "target-differs",
        "Low accept length; the right layers are fed, with other numbers.",
        "Configs and a sample of both targets' weights; features (or embeddings) differ, and no other layer fits.",
        "Serve the draft with the revision and precision of the target it was trained for.",
        ("target.hidden.0", "embed"),
        check_target,
    ),
)
