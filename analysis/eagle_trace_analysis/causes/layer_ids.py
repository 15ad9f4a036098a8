"""Which target layers were fed."""

from __future__ import annotations

from math import isfinite

from eagle_trace_analysis.causes.base import (
    ONE_LAYER_FED,
    RECORD_VALUES,
    Cause,
    Outcome,
    confirmed,
    not_tested,
    ruled_out,
)
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.features import CLEARLY, Features
from eagle_trace_analysis.evidence.layers import layer_words


def check_shifted(context: Context) -> Outcome:
    """Ids that mean other layers to the engine than to the training."""
    return _check(context, default=False)


def check_default(context: Context) -> Outcome:
    """No ids in the deployed config: the engine guessed."""
    named = context.engine.layer_ids(context.served)
    if context.served and named:
        return ruled_out(f"the deployed config names ids {named}")
    return _check(context, default=True)


def check_ignored(context: Context) -> Outcome:
    """Ids that are right in the deployed config, and that the server did not go by."""
    if not _names_the_trained(context):
        return ruled_out("the deployed config does not name the trained layers")
    return _check(context, ignored=True)


def _names_the_trained(context: Context) -> bool:
    """Whether the deployed config names the layers of the training, in the engine's own terms."""
    ids = context.trained_ids
    return bool(ids and context.engine.layer_ids(context.served) and _captured(context) == sorted(ids))


def _captured(context: Context) -> list[int] | None:
    """Layers whose inputs the deployed config makes the engine feed, in the order that it reaches them."""
    target = context.target
    layers, architecture = (target.layers, target.architecture) if target else (None, None)
    fed = context.engine.captured_inputs(context.served, layers, architecture) if context.served else None
    return sorted(fed) if fed else fed


def _check(context: Context, *, default: bool = False, ignored: bool = False) -> Outcome:
    features = context.features
    named = context.engine.layer_ids(context.served)
    if features is None:
        return not_tested(context.no_features, RECORD_VALUES)
    if features.single:
        return not_tested(*ONE_LAYER_FED)
    if features.healthy:
        return ruled_out(_right(context, features))
    if context.served and not default and not named:
        return ruled_out("the deployed config names no ids at all: see layer-ids-default")
    found = _by_layers(context, features) or _by_config(context, features)
    if found.verdict == "confirmed" and _names_the_trained(context) != ignored:
        return ruled_out("the deployed config names the trained layers: see layer-ids-ignored")
    return found


def _right(context: Context, features: Features) -> str:
    worst = max(features.matrix[k, k] for k in range(len(features.sites)))
    text = f"all {len(features.sites)} layers agree (channel error {worst:.1e} at most)"
    ids, nearest = context.trained_ids, [features.nearest(rows) for rows in features.served]
    if ids and all(nearest):
        known = [one for one in nearest if one is not None]
        others = min(
            (e for (best, _, all_), k in zip(known, ids, strict=False) for n, e in all_.items() if n != k), default=0.0
        )
        fed = [one[0] for one in known]
        text += f"; of all target layers the nearest are {fed}, trained {ids}, the next {others:.1e} off"
    return text


def _by_layers(context: Context, features: Features) -> Outcome | None:
    """Decide by the nearest of all target layers; None if the train trace does not hold them."""
    ids = context.trained_ids
    nearest = [features.nearest(rows) for rows in features.served]
    known = [one for one in nearest if one is not None]
    if not ids or len(known) < len(features.served) or len(ids) != len(known):
        return None
    fed = [one[0] for one in known]
    last = max(known[0][2])
    if fed == ids:
        worst = max(one[1] for one in known)
        return ruled_out(f"the layers fed are nearest to those trained on, {ids} (channel error {worst:.1e})")
    if sorted(fed) == sorted(ids):
        return ruled_out(f"the layers fed are those trained on, in another order: {fed}, trained {ids}")
    if len(set(fed)) < len(set(ids)):
        return ruled_out(
            f"one layer was fed more than once ({fed}), which no list of ids does: see features-degenerate"
        )
    k = next(at for at, (a, b) in enumerate(zip(fed, ids, strict=True)) if a != b)
    best, error, errors = known[k]
    if not isfinite(error):
        return not_tested(f"the features fed hold values that are not finite (layer {k})", "mend nonfinite first")
    if error > CLEARLY * errors.get(ids[k], float("inf")):
        return ruled_out(
            f"no layer explains what was fed: nearest to layer {k} is {layer_words(best, last - 1)} ({error:.1e}), "
            f"hardly nearer than the trained one ({errors.get(ids[k], 0):.1e})"
        )
    if best == last:
        return ruled_out(f"layer {k} is nearest to {layer_words(best, last - 1)}: see features-normed")
    shift = " (each one further)" if all(a == b + 1 for a, b in zip(fed, ids, strict=True)) else ""
    told = context.serve.manifest.settings.get("layer_ids")
    said = " (as the server itself says)" if told == fed else ""
    evidence = (
        f"fed were the inputs of layers {fed}{shift}{said}, trained {ids}: layer {k} is {error:.1e} from the input of "
        f"{best}, {errors.get(ids[k], float('nan')):.1e} from that of {ids[k]} (median channel)"
    )
    return confirmed(evidence, _fix(context, ids), f"target.hidden.{k}")


def _fix(context: Context, ids: list[int]) -> str:
    words = context.engine.WORDS
    if _names_the_trained(context):
        unread = context.engine.ids_unread(context.served)
        why = f"{unread}: move them to {words.ids_key} at the top of the config" if unread else ""
        return why or "the deployed config names the trained layers, and the server feeds others: update or report it"
    found = context.failed("layer-ids")
    if found is not None:
        return found.fix
    architecture = context.target.architecture if context.target else None
    right = context.engine.ids_that_capture(ids, context.target.layers if context.target else None, architecture)
    return f"set {words.ids_key} to {right}" if right else f"{words.name_ids} ({words.counts} of layers)"


def _by_config(context: Context, features: Features) -> Outcome:
    """Decide by the configs, if exactly the layers they make differ do differ."""
    ids = context.trained_ids
    # a server that says itself what it feeds knows it better than its config does
    told = context.serve.manifest.settings.get("layer_ids")
    who, fed = ("the server says that its ids", list(told)) if told else ("the deployed ids", _captured(context))
    missing = "record the training side again with --features compute, which keeps every layer of the target"
    if ids is None or fed is None or len(fed) != len(ids):
        return not_tested("neither the layers themselves nor both configs' ids are known", missing)
    wrong = [features.matrix[k, k] > features.allowed[site] for k, site in enumerate(features.sites)]
    if fed == ids:
        return ruled_out(f"the deployed ids capture the inputs of layers {fed}, as trained")
    if sorted(fed) == sorted(ids):
        return ruled_out(f"the deployed ids capture the trained layers in another order: {fed}, trained {ids}")
    if wrong == [a != b for a, b in zip(fed, ids, strict=True)]:
        k = wrong.index(True)
        evidence = (
            f"{who} capture the inputs of layers {fed}, trained {ids}, and exactly those differ "
            f"(layer {k}: channel error {features.matrix[k, k]:.1e}, {features.allowed[features.sites[k]]:.1e} allowed)"
        )
        return confirmed(evidence, _fix(context, ids), f"target.hidden.{k}")
    return ruled_out(f"the deployed ids capture {fed}, trained {ids}, but the layers that differ are others")


CAUSES = (
    Cause(
        "layer-ids-shifted",
        "A little to a lot lower: speculators' id i is the input of layer i, SGLang's its output.",
        "Every layer the server fed against all layers of the target, channel by channel: the nearest is not the "
        "trained one. Without those, the ids of both configs, if exactly the layers they make differ do differ.",
        "Lower each id by one (`eagle-trace export` does).",
        ("target.hidden.0",),
        check_shifted,
    ),
    Cause(
        "layer-ids-default",
        "2.77 becomes 1.04: the deployed config names no ids and the engine guesses 2, L/2, L-3.",
        "As layer-ids-shifted, with no ids in the deployed config.",
        "Name the ids in eagle_config.eagle_aux_hidden_state_layer_ids (vLLM: at the top of the config).",
        ("target.hidden.0",),
        check_default,
    ),
    Cause(
        "layer-ids-ignored",
        "Accept length near 1 on one server, or one model runner of it, and fine on another.",
        "As layer-ids-shifted, while the deployed config names the trained layers.",
        "Name the ids where every form of the engine reads them, or update the server.",
        ("target.hidden.0",),
        check_ignored,
    ),
)
