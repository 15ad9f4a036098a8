"""What the draft is fed: one layer or several, in which order, normed or not, zeros, somebody else's rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.causes.base import (
    RECORD_VALUES,
    Cause,
    Outcome,
    clipped,
    confirmed,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.checkpoint.files import as_float32
from eagle_trace_analysis.checkpoint.width import has_fc
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import CLEARLY, Features, channel_error
from eagle_trace_analysis.evidence.misplaced import misplaced
from eagle_trace_analysis.pairing.keys import lookup
from eagle_trace_analysis.replay.inputs import rms

Real = NDArray[Any]


def _widths(context: Context) -> tuple[int | None, int | None]:
    sides = []
    for trace in (context.train, context.serve):
        widths = {width for width, _ in trace.shapes.get("fused", set())}
        widths |= {one.width for one in trace.site_data("fused")}
        sides.append(max(widths) if widths else None)
    return sides[0], sides[1]


def check_single(context: Context) -> Outcome:
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
        layers = _target_layers(context)
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


def _target_layers(context: Context) -> int | None:
    for facts in (context.train.manifest.target, context.serve.manifest.target):
        config = facts.get("config", {})
        text = config.get("text_config", config)
        layers = facts.get("num_hidden_layers") or text.get("num_hidden_layers")
        if layers:
            return int(layers)
    return context.target.layers if context.target else None


def layer_words(number: int, layers: int | None) -> str:
    """A target layer in words: Hugging Face `hidden_states[i]`, L + 1 for after the final norm."""
    if number == 0:
        return "the embedding's output (0)"
    if layers is not None and number == layers + 1:
        return "the last layer's output after the final norm"
    if layers is not None and number == layers:
        return f"the last layer's output ({number})"
    return f"the input of layer {number}"


def check_permuted(context: Context) -> Outcome:
    """The same layers side by side in another order."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.single or len(features.served) != len(features.sites):
        return ruled_out("the server fed another number of layers: there is no order to compare")
    matrix, count = features.matrix, len(features.sites)
    order = matrix.argmin(axis=1).tolist()
    best = [float(matrix[j, k]) for j, k in enumerate(order)]
    allowed = [features.allowed[site] for site in features.sites]
    if order == list(range(count)):
        return ruled_out(
            f"each of {count} layers is nearest to itself (channel error {max(best):.1e} at most; another layer "
            f"{_second(matrix):.1e} at least)"
        )
    if sorted(order) == list(range(count)) and all(one <= allowed[k] for one, k in zip(best, order, strict=True)):
        evidence = f"the server's layers 0 to {count - 1} are training's {order}, channel error {max(best):.1e} at most"
        fix = f"feed the layers in the order of the training: {context.trained_ids or 'as trained'}"
        found = context.failed("layer-ids")
        return confirmed(evidence, found.fix if found else fix, f"target.hidden.{_first_moved(order)}")
    return ruled_out(
        f"the server's layers are no rearrangement of the trained ones (nearest: {order}, {max(best):.1e})"
    )


def _first_moved(order: list[int]) -> int:
    return next(j for j, k in enumerate(order) if j != k)


def _second(matrix: Real) -> float:
    off = matrix + np.where(np.eye(len(matrix), dtype=np.bool_), np.inf, 0.0)
    return float(off.min()) if len(matrix) > 1 else float("inf")


# ---- degenerate ------------------------------------------------------------------------------------------------


def check_degenerate(context: Context) -> Outcome:
    """Zeros, one layer several times, one row everywhere, rows of another prompt; on either side."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    found = [
        f"{side}: {fault}"
        for side, layers in (("training", features.trained), ("serving", features.served))
        for fault in _faults(layers)
    ]
    site = "target.hidden.0"
    if not found and not features.healthy and not features.single and (other := _other_prompt(features)) is not None:
        found.append(other)
    if not found and (rows := misplaced(context)) is not None and not rows.shift:
        found.append(f"serving: {rows.words}")
    if found:
        side = "the extractor of the training features" if "training:" in found[0] else "the server's capture"
        return confirmed("; ".join(found[:3]), f"repair {side} and take the features again; then train on them", site)
    norms = [float(np.median(np.linalg.norm(layer, axis=1))) for layer in features.trained]
    words = ", ".join(f"{norm:.3g}" for norm in norms)
    return ruled_out(
        f"{len(features.serve_keys)} rows of {len(features.sites)} layers: none zero, none twice, all vary "
        f"(median norms {words})"
    )


def _faults(layers: list[Real]) -> list[str]:
    faults = []
    for k, rows in enumerate(layers):
        rows = rows[np.isfinite(rows).all(axis=1)]
        if len(rows) < 2:
            continue
        zero = int((~rows.any(axis=1)).sum())
        if zero > 0.1 * len(rows):
            faults.append(f"layer {k} is zero in {zero} of {len(rows)} rows")
        elif (rows == rows[:1]).all():
            faults.append(f"layer {k} is the same in all {len(rows)} rows")
    for k, rows in enumerate(layers):
        for j in range(k):
            if rows.shape == layers[j].shape and rows.any() and np.array_equal(rows, layers[j]):
                faults.append(f"layers {j} and {k} are equal, element for element")
    return faults


def _other_prompt(features: Features) -> str | None:
    """Whether the server's rows are training's rows of another prompt."""
    prompts = np.unique(features.train_keys.prompt_id)
    swapped = []
    for prompt in prompts[:8]:
        here = np.flatnonzero(features.train_keys.prompt_id == prompt)
        mine = features.served[0][here]
        for other in prompts[:8]:
            keys = features.train_keys.take(here)
            keys = replace(keys, prompt_id=np.full(len(here), other, dtype=np.int32))
            there = np.flatnonzero(lookup(keys, features.train.trace.rows) >= 0)
            if other == prompt or len(there) < max(2, len(here) // 4):
                continue
            error = channel_error(mine[there], features.train_at(0, keys=keys.take(there)))
            if error <= features.allowed[features.sites[0]]:
                swapped.append(f"prompt {prompt} has the rows of prompt {other}")
    return f"serving: {clipped(swapped, 3)} (of the training's numbers)" if swapped else None


# ---- normed ----------------------------------------------------------------------------------------------------


def check_normed(context: Context) -> Outcome:
    """Features after the target's final norm, on one side."""
    features = context.features
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.healthy:
        return ruled_out(f"all {len(features.sites)} layers agree (channel error {_diagonal(features):.1e} at most)")
    layers = _target_layers(context)
    for j, rows in enumerate(features.served):
        near = features.nearest(rows)
        if near is None or layers is None or near[0] != layers + 1 or near[1] > CLEARLY * near[2].get(layers, 1.0):
            continue
        if context.trained_ids and j < len(context.trained_ids) and context.trained_ids[j] == layers + 1:
            continue
        if features.single:
            return ruled_out(
                f"the one layer fed is nearest to {layer_words(near[0], layers)} ({near[1]:.1e}), as every engine "
                "feeds its last hidden state; the fault is that it is one"
            )
        evidence = f"layer {j} of the server is nearest to {layer_words(near[0], layers)} (channel error {near[1]:.1e})"
        return confirmed(evidence, "capture the layers' outputs before the final norm", f"target.hidden.{j}")
    if features.single:
        return ruled_out("the server fed one layer only: see single-layer-features")
    return _normed_pairs(context, features)


def _normed_pairs(context: Context, features: Features) -> Outcome:
    weight, eps = _final_norm(context)
    best = (float("inf"), "")
    for j, x in enumerate(features.served):
        for k, y in enumerate(features.trained):
            if x.shape != y.shape:
                continue
            # the direction alone, if the norm's weight is not known
            for scale in (weight, None):
                if scale is not None and len(scale) != x.shape[1]:
                    continue
                for after, before, side in ((x, y, "server"), (y, x, "training")):
                    expected = rms(before, eps) * (1.0 if scale is None else scale)
                    error = channel_error(after, expected)
                    if error < best[0]:
                        best = (
                            error,
                            f"layer {j if side == 'server' else k} of the {side} is the final norm of the other side's",
                        )
                    if error <= features.allowed[features.sites[k]]:
                        evidence = f"{best[1]} layer {k if side == 'server' else j} (channel error {error:.1e})"
                        fix = "take the features before the final norm on both sides"
                        return confirmed(evidence, fix, f"target.hidden.{j}")
    return ruled_out(f"no layer of a side is the normed one of the other (nearest: channel error {best[0]:.1e})")


def _final_norm(context: Context) -> tuple[Real | None, float]:
    target = context.target
    if target is None:
        return None, 1e-6
    eps = float(target.config.get("rms_norm_eps") or 1e-6)
    tensors = target.checkpoint.tensors.values() if target.checkpoint else ()
    found = [
        one
        for one in tensors
        if one.name.endswith("norm.weight") and ".layers." not in one.name and len(one.shape) == 1
    ]
    return (as_float32(found[0].read()) if len(found) == 1 else None), eps


def _diagonal(features: Features) -> float:
    return float(np.diag(features.matrix).max())


CAUSES = (
    Cause(
        "single-layer-features",
        "Accept length 1.00: the server feeds [T, H] where [T, n H] was trained, and skips fc without a word.",
        "Widths of the fused features on both sides; which target layer the one is nearest to.",
        "Set eagle_config.use_aux_hidden_state to true and serve with --speculative-algorithm EAGLE3.",
        ("fused",),
        check_single,
    ),
    Cause(
        "features-permuted",
        "Low accept length.",
        "Every layer the server fed against every layer of the training, channel by channel: each is one of them, at "
        "another place.",
        "Feed the layers in the order of the training.",
        ("fused", "target.hidden.0"),
        check_permuted,
    ),
    Cause(
        "features-degenerate",
        "Trains fine, serves at about 0.",
        "Zero rows, equal layers, rows that never change, rows that belong to another prompt, on either side.",
        "Repair the extractor, take the features again, train again.",
        ("target.hidden.0",),
        check_degenerate,
    ),
    Cause(
        "features-normed",
        "Low accept length.",
        "The nearest of all target layers is the one after the final norm; or one side's features are the final "
        "norm of the other's.",
        "Capture hidden states before the final norm.",
        ("target.hidden.0",),
        check_normed,
    ),
)
