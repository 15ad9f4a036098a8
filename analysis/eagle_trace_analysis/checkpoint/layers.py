"""Checks on the target features: which layers."""

from __future__ import annotations

from typing import Any

from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.subject import Subject, named_inputs
from eagle_trace_analysis.checkpoint.width import feeds_one

SINGLE = "single-layer-features"
SHIFTED, DEFAULTED = "layer-ids-shifted", "layer-ids-default"


def check_layer_ids(subject: Subject) -> Finding:
    """Which target layers the engine feeds, against those of the training."""
    name = "layer-ids"
    if subject.is_speculators:
        return _of_speculators(subject)
    if not subject.engine.uses_aux_hidden_state(subject.served):
        return skipped(
            name,
            SHIFTED,
            "not checked: use_aux_hidden_state is false, so the engine reads no ids (see aux-hidden-state)",
        )
    if feeds_one(subject):
        return skipped(name, SHIFTED, "not checked: a head of one feature names no layers (see aux-hidden-state)")
    given = subject.engine.layer_ids(subject.served)
    inputs = subject.engine.captured_inputs(subject.served, subject.target_layers, subject.target_architecture)
    fault = _cannot_capture(subject) or _miscounted(subject, given, inputs)
    # ids that are to be changed anyhow are not to be moved
    fault = fault or (None if subject.trained_ids not in (None, inputs) else _unread(subject))
    if fault is not None:
        return fault
    if subject.trained_ids is not None:
        return _against_training(subject, given, inputs)
    told = _as_the_trainer_counts(subject, given, inputs)
    if told is not None:
        return told
    return _by_themselves(subject, given, inputs)


def _by_themselves(subject: Subject, given: Any, inputs: list[int] | None) -> Finding:
    """What can be said of the ids where nothing says which were trained."""
    name = "layer-ids"
    if given is None:
        top = subject.served.get("eagle_aux_hidden_state_layer_ids")
        lost = f" (the top-level {top} is not read)" if top else ""
        guess = f" {inputs}" if inputs else ""
        return warned(
            name,
            DEFAULTED,
            f"{_where(subject)} names no layer ids{lost}: the engine guesses the inputs of layers 2, L/2 and "
            f"L-3{guess}",
            f"{subject.engine.WORDS.name_ids}, or pass --reference to compare{_not_exported(subject)}",
        )
    if subject.target is None and subject.engine.copied_from_training(given) is not None:
        layers = subject.engine.copied_from_training(given)
        return warned(
            name,
            SHIFTED,
            f"ids {given} are speculators' default for a target of {layers} layers; the engine's id i is the output of "
            f"layer i, so most target classes feed the inputs of layers {inputs}",
            f"if the draft was trained on the inputs of layers {given}, write {[i - 1 for i in given]}; give --target "
            "to have the rule of its class",
        )
    if subject.target is None:
        return skipped(
            name,
            SHIFTED,
            f"ids {given}: whether they are the trained ones needs --reference, whether they look copied --target",
        )
    default = subject.engine.default_inputs(subject.target.layers)
    if inputs == [i + 1 for i in default]:
        right = subject.engine.ids_that_capture(default, subject.target.layers, subject.target_architecture)
        fix = f"if the draft was trained on speculators' default {default}, write {right}"
        return warned(
            name,
            SHIFTED,
            f"ids {given} are speculators' default copied as they are; the engine's id i is the output of "
            f"layer i, so it feeds the inputs of layers {inputs}",
            fix,
        )
    if inputs == default:
        return passed(
            name,
            SHIFTED,
            f"ids {given} make the engine feed the inputs of layers {inputs}, speculators' default",
        )
    return skipped(
        name,
        SHIFTED,
        f"ids {given} make the engine feed the inputs of layers {inputs}: give --reference to compare with "
        "the training",
    )


def _not_exported(subject: Subject) -> str:
    """Where else a trainer may have been told its layers."""
    if subject.origin is None or subject.origin.trainer.NAMES_LAYERS:
        return ""
    title = subject.origin.trainer.TITLE
    return f"; {title} does not export the ids of its recipe (aux_hidden_state_layer_ids): give it as --recipe"


def _miscounted(subject: Subject, given: list[int] | None, inputs: list[int] | None) -> Finding | None:
    """Ids that their trainer counts in another way than the engine; None where nothing is known of a training."""
    origin = subject.origin
    if origin is None or subject.trained_ids is not None or given is None:
        return None
    meant, layers = named_inputs(origin.trainer, subject.served, subject.target), subject.target_layers
    if meant is None or meant == inputs or (layers is not None and max(meant) > layers):
        return None
    right = subject.engine.ids_that_capture(meant, layers, subject.target_architecture)
    title = origin.trainer.TITLE
    return warned(
        "layer-ids",
        SHIFTED,
        f"{title} counts layers by their outputs: its ids {given} are the inputs of layers {meant}, and "
        f"{subject.engine.TITLE} feeds the inputs of layers {inputs}",
        f"if {title} wrote these ids, write {right} as {subject.engine.WORDS.ids_key}"
        if right
        else "no list makes the engine capture these layers: serve it with another, or with another target class",
    )


def _as_the_trainer_counts(subject: Subject, given: list[int] | None, inputs: list[int] | None) -> Finding | None:
    """A pass by what is known of the trainer: its default is the engine's, or it names all that it fed."""
    origin, name = subject.origin, "layer-ids"
    if origin is None or inputs is None or not origin.trainer.NAMES_LAYERS:
        return None
    title, target = origin.trainer.TITLE, subject.target
    if given is None and target is not None and origin.trainer.default_layers(target.layers) == inputs:
        return passed(name, DEFAULTED, f"no ids are named: {title} and the engine feed the inputs of layers {inputs}")
    if given is not None and origin.sure and named_inputs(origin.trainer, subject.served, target) == inputs:
        why = f"{title} counts layers by their outputs: ids {given} make the engine feed the inputs of layers {inputs}"
        return passed(name, SHIFTED, why)
    return None


def _cannot_capture(subject: Subject) -> Finding | None:
    given = subject.engine.layer_ids(subject.served)
    inputs = subject.engine.captured_inputs(subject.served, subject.target_layers, subject.target_architecture)
    if given is None or inputs is None:
        return None
    if not inputs:
        return failed(
            "layer-ids",
            SHIFTED,
            "eagle_aux_hidden_state_layer_ids is empty: the engine captures no layer",
            "name the trained layers, or remove the key if they are the engine's guess (inputs of layers 2, L/2, L-3)",
        )
    layers = subject.target_layers
    last = None if layers is None else subject.engine.last_input(layers, subject.target_architecture)
    if min(inputs) < 0 or (last is not None and max(inputs) > last) or len(set(inputs)) < len(inputs):
        return failed(
            "layer-ids",
            SHIFTED,
            f"ids {given} stand for the inputs of layers {inputs}, which are not distinct layers the engine "
            "captures" + (f" of {layers}" if layers else ""),
            "name distinct layers of the target",
        )
    return None


def _where(subject: Subject) -> str:
    """The object of the config that should name the layers."""
    return subject.engine.WORDS.ids_key.rpartition(".")[0] or "the config"


def _unread(subject: Subject) -> Finding | None:
    """Ids that one form of the engine takes and another does not, where they are not what that one guesses."""
    unread, given = subject.engine.ids_unread(subject.served), subject.engine.layer_ids(subject.served)
    layers = subject.target_layers
    if not unread or (layers is not None and given == subject.engine.default_inputs(layers)):
        return None
    guess = "2, L/2, L-3" if layers is None else subject.engine.default_inputs(layers)
    return warned(
        "layer-ids",
        "layer-ids-ignored",
        f"{unread}, and feeds the inputs of layers {guess} instead of {given}",
        f"move the ids to {subject.engine.WORDS.ids_key} at the top of the config",
    )


def _of_speculators(subject: Subject) -> Finding:
    name, ids = "layer-ids", subject.trained_ids
    if ids is None:
        return skipped(
            name,
            DEFAULTED,
            "the config names no layer ids, so training took 2, L/2, L-3: give --target to count L",
        )
    named = bool(subject.checkpoint.config.get("eagle_aux_hidden_state_layer_ids"))
    least = 1 if subject.engine.ids_that_capture([0], None, None) is None else 0
    if min(ids) < least:
        what = "the embedding's output (0), which {} has no id for" if min(ids) == 0 else "layers that {} has no id for"
        why = f"ids {ids} name {what.format(subject.engine.ENGINE)}"
        return failed(name, SHIFTED, why, f"retrain with ids from {least} on")
    inputs = subject.engine.captured_inputs(subject.served, subject.target_layers, subject.target_architecture)
    exported = subject.engine.layer_ids(subject.served)
    if inputs != ids:
        return failed(
            name,
            SHIFTED,
            f"trained on the inputs of layers {ids}: {subject.target_architecture} has no list of ids for them",
            "retrain with other layers: no list makes this target class capture these",
        )
    fault = _cannot_capture(subject)
    if fault is not None:
        return fault
    doubt = _doubtful_training(subject, ids) if named else ""
    if doubt:
        return warned(name, SHIFTED, f"{doubt}; `eagle-trace export` writes {exported}", _doubtful_fix(subject, ids))
    if subject.format in subject.engine.READS:
        how = "" if named else " (the default)"
        return passed(
            name, SHIFTED, f"trained on the inputs of layers {ids}{how}; {subject.engine.TITLE} reads ids as these"
        )
    return passed(
        name,
        SHIFTED,
        f"trained on the inputs of layers {ids}{'' if named else ' (the default)'}; {subject.engine.TITLE} counts "
        f"{subject.engine.WORDS.counts}, "
        f"so `eagle-trace export{' --target' if subject.target else ''}` writes {exported}"
        + (
            ""
            if subject.target
            else " (for target classes that shift every list; DeepSeek's kin do not: give --target)"
        ),
    )


def _doubtful_training(subject: Subject, ids: list[int]) -> str:
    """Why the ids of the speculators config may not be those of the training; empty if nothing speaks for it."""
    layers = subject.engine.copied_from_serving(ids, subject.target_layers, subject.target_architecture)
    if layers is None:
        return ""
    return (
        f"the speculators config names the layers {ids}, which look copied from a serving config as they are: SGLang's "
        f"ids {ids} are the inputs of layers {subject.engine.default_inputs(layers)}, the default for {layers} layers"
    )


def _doubtful_fix(subject: Subject, ids: list[int]) -> str:
    layers = subject.engine.copied_from_serving(ids, subject.target_layers, subject.target_architecture) or 0
    return (
        f"if the draft was trained on the default, set eagle_aux_hidden_state_layer_ids of the speculators config to "
        f"{subject.engine.default_inputs(layers)}; if it was trained on the inputs of layers {ids}, nothing"
    )


def _against_training(subject: Subject, given: list[int] | None, inputs: list[int] | None) -> Finding:
    name, trained = "layer-ids", subject.trained_ids or []
    right = subject.engine.ids_that_capture(trained, subject.target_layers, subject.target_architecture)
    fix = (
        f"set {subject.engine.WORDS.ids_key} to {right}"
        if right
        else "no list makes the engine capture these layers: retrain with others"
    )
    doubt = _doubtful_training(subject, trained)
    if doubt:
        return _against_doubtful(subject, given, inputs, doubt)
    if inputs is None:
        return warned(name, DEFAULTED, f"{_where(subject)} names no layer ids, the draft was trained on {trained}", fix)
    if inputs == trained:
        how = f"ids {given} make" if given else "with no ids named, its guess makes"
        return passed(
            name,
            SHIFTED,
            f"{how} the engine feeds the inputs of layers {inputs}, as trained".replace(
                "make the engine feeds", "make the engine feed"
            ),
        )
    if given is None:
        return failed(
            name,
            DEFAULTED,
            f"{_where(subject)} names no layer ids: the engine guesses {inputs}, the draft was trained on {trained}",
            fix,
        )
    copied = " (copied as they are: speculators counts inputs, SGLang outputs)" if given == trained else ""
    return failed(
        name,
        SHIFTED,
        f"ids {given}{copied} make the engine feed the inputs of layers {inputs}, trained were {trained}",
        fix,
    )


def _against_doubtful(subject: Subject, given: list[int] | None, inputs: list[int] | None, doubt: str) -> Finding:
    """The served ids where the reference's own look copied: the reference cannot tell which of the two is right."""
    trained = subject.trained_ids or []
    fed = f"; this draft's ids {given} make the engine feed the inputs of layers {inputs}" if given else ""
    if given == trained:
        fed += ", which is right if the reference's were copied from here"
    layers = subject.engine.copied_from_serving(trained, subject.target_layers, subject.target_architecture) or 0
    default = subject.engine.default_inputs(layers)
    right = [
        subject.engine.ids_that_capture(inputs, subject.target_layers, subject.target_architecture)
        for inputs in (default, trained)
    ]
    return warned(
        "layer-ids",
        SHIFTED,
        f"in the reference, {doubt}{fed}",
        f"if the draft was trained on the default {default}, its ids should be {right[0]} and the reference should say "
        f"{default}; if it was trained on the inputs of layers {trained}, its ids should be {right[1]}",
    )
