"""One target layer fed where several were trained."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.checkpoint.width import has_fc
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.layers import layer_words, target_layers


def _widths(context: Context) -> tuple[int | None, int | None]:
    sides = []
    for trace in (context.train, context.serve):
        widths = {width for width, _ in trace.shapes.get("fused", set())}
        widths |= {one.width for one in trace.site_data("fused")}
        sides.append(max(widths) if widths else None)
    return sides[0], sides[1]


def check(context: Context) -> Outcome:
    """One target layer where several were trained."""
    trained, served = _widths(context)
    if trained is None or served is None:
        return not_tested("the width of the fused features was not recorded", "record both sides with this version")
    if served >= trained:
        width = context.form.target_width if context.form else 0
        if width and served == trained == width:
            return ruled_out(f"both sides feed one layer ([T, {served}]): the flag that says so is right")
        return ruled_out(f"fused features are [T, {served}] in serving, [T, {trained}] in training")
    width = context.form.target_width if context.form else 0
    count = max(len(context.feature_sites), 1)
    evidence = f"fused features are [T, {served}] in serving (one layer, so fc is skipped), [T, {trained}] in training"
    if width and served != width:
        evidence = (
            f"fused features are [T, {served}] in serving, [T, {trained}] in training ({count} layers of {width})"
        )
    features = context.features
    if features is not None and features.single and (near := features.nearest(features.served[0])) is not None:
        layers = target_layers(context)
        number, error, _ = near
        evidence += f"; the layer fed is nearest to {layer_words(number, layers)} (channel error {error:.1e})"
    if context.other_algorithm is not None:
        evidence += f"; with {context.other_algorithm} it also takes the target's head and uses no d2t"
    return confirmed(evidence, _single_fix(context), "fused")


def _single_fix(context: Context) -> str:
    found = context.failed("aux-hidden-state")
    if found is not None:
        return found.fix
    if context.subject is not None and context.subject.kind is None and not has_fc(context.subject):
        # with several layers fed, an fc that was never stored would be random
        return (
            "deploy the draft that was trained here: the deployed one holds no fc, so it is a head of one feature, for "
            "which its flag is right"
        )
    if context.served and not context.engine.uses_aux_hidden_state(context.served):
        return "set eagle_config.use_aux_hidden_state to true in the deployed config"
    if context.other_algorithm is not None:
        return f"serve with --speculative-algorithm EAGLE3 (it was {context.other_algorithm})"
    return _class_fix(context)


def _class_fix(context: Context) -> str:
    """The config asks for several layers, so it is the target's class that fed one."""
    manifest = context.serve.manifest
    release = manifest.packages.get("sglang")
    host = f"SGLang {release}" if release else "this server"
    name = manifest.target.get("architecture") or (context.target.architecture if context.target else None)
    named = f"the target class {name} in {host}" if name else f"the target's class in {host}"
    layers = manifest.target.get("captured_inputs")
    if manifest.target.get("captures") and layers:
        fed = f"was told to capture the inputs of layers {layers} and fed one all the same"
    elif manifest.target.get("captures") is False:
        fed = "was never told to capture (its capture_aux_hidden_states is false) and fed one"
    else:
        fed = "fed one"
    count = context.engine.num_aux_hidden_states(context.served) if context.served else len(context.feature_sites)
    return (
        f"the config asks for {count} layers, {named} {fed}: serve this target with a release or an engine whose class "
        "captures them; no change to the draft or its config helps"
    )


CAUSE = Cause(
    "single-layer-features",
    "Accept length 1.00: the server feeds [T, H] where [T, n H] was trained, and skips fc without a word.",
    "Widths of the fused features on both sides; which target layer the one is nearest to.",
    "Set eagle_config.use_aux_hidden_state to true and serve with --speculative-algorithm EAGLE3.",
    ("fused",),
    check,
)
