"""Features that are a part of a layer's input: what was added last, or the stream that it was added to."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_trace_analysis.causes.base import RECORD_VALUES, Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import CLEARLY, Features
from eagle_trace_analysis.evidence.layers import layer_words

OLDER = "the training's trace does not keep what each layer adds to its stream"


@dataclass(frozen=True)
class _Part:
    """A layer the server fed that is a part of a target layer's input."""

    served: int
    layer: int
    branch: bool
    error: float
    whole: float


def check(context: Context) -> Outcome:
    """Either summand of a layer's input where the sum was trained."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.single:
        return ruled_out("the server fed one layer only: see single-layer-features")
    if features.healthy:
        return ruled_out(f"all {len(features.sites)} layers agree as wholes")
    if features.branches is None:
        return not_tested(OLDER, "record the training side with this version, with --features compute")
    found = [part for j in range(len(features.served)) if (part := _part(features, j)) is not None]
    if not found:
        return ruled_out("no layer the server fed is nearer to a part of a layer's input than to the whole of one")
    one = found[0]
    layers = ", ".join(str(part.layer) for part in found)
    whole = layer_words(one.layer, None)
    if one.branch:
        evidence = (
            f"what the server fed as layers {[part.served for part in found]} is what the layer before adds last "
            f"(channel error {one.error:.1e}), without the stream it is added to: {whole} itself is {one.whole:.1e} off"
        )
    else:
        evidence = (
            f"what the server fed as layers {[part.served for part in found]} is the stream before the layer before "
            f"adds its last branch (channel error {one.error:.1e}): {whole} itself is {one.whole:.1e} off"
        )
    return confirmed(evidence, _fix(context, layers, branch=one.branch), f"target.hidden.{one.served}")


def _part(features: Features, j: int) -> _Part | None:
    """The part of a layer's input that served layer j is; None where the whole of one is as near."""
    rows = features.served[j]
    whole = features.nearest(rows)
    if whole is None:
        return None
    for branch in (True, False):
        near = features.nearest_part(rows, branch=branch)
        if near is not None and near[1] <= CLEARLY * whole[1]:
            site = features.sites[min(j, len(features.sites) - 1)]
            if near[1] <= 4 * features.allowed[site]:
                return _Part(j, near[0], branch, near[1], whole[2][near[0]])
    return None


def _fix(context: Context, layers: str, *, branch: bool) -> str:
    manifest = context.serve.manifest
    name = manifest.target.get("architecture")
    release = manifest.packages.get("sglang")
    where = f"{name or 'the target class'} in SGLang {release}" if release else name or "the server's target class"
    takes = "the last branch alone" if branch else "the stream without the last branch"
    return (
        f"{where} captures {takes} for the inputs of layers {layers}: capture hidden_states + residual there, or serve "
        "with a release whose class does; until then no draft trained on whole hidden states is served as trained"
    )


CAUSE = Cause(
    "features-without-residual",
    "Low accept length on one family of targets, whatever the draft.",
    "The server's features against both summands of every target layer's input, channel by channel: what the layer "
    "before added last, and the stream it was added to.",
    "Capture hidden_states + residual in the target's class.",
    ("target.hidden.0",),
    check,
)
