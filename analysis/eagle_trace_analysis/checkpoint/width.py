"""Checks on how much of the target the draft is fed: one feature or several, and whether fc fits what is fed.

The engine applies fc (and the norms before it) where what is fed is not as wide as the embedding. So a head of one
feature as wide as the draft has no fc, and one that was trained with fc is computed without it.
"""

from __future__ import annotations

from eagle_trace_analysis.checkpoint.files import as_float32
from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped
from eagle_trace_analysis.checkpoint.subject import Subject

SINGLE = "single-layer-features"


def has_fc(subject: Subject) -> bool:
    """Whether the file holds an fc, quantised or not, under its name or behind a prefix."""
    return any(".fc." in f".{name}" for name in subject.tensors)


def feeds_one(subject: Subject) -> bool:
    """Whether the tensors are those of a head that was trained on the target's final hidden state alone.

    Such a head has no fc. A file that merely lost its fc still has the norm of the hidden state, and names layers.
    """
    if subject.is_speculators or has_fc(subject):
        return False
    named = subject.engine.layer_ids(subject.served)
    return (
        not subject.engine.uses_aux_hidden_state(subject.served)
        or named == []
        or "layers.0.hidden_norm.weight" not in subject.tensors
    )


def _widths(subject: Subject) -> tuple[int, int]:
    """Width of the draft, and of one feature."""
    hidden = int(subject.full["hidden_size"])
    return hidden, int(subject.full.get("target_hidden_size", hidden))


def check_aux(subject: Subject) -> Finding:
    """Whether the engine captures several layers for this draft, and whether it was trained on several."""
    name = "aux-hidden-state"
    hidden, width = _widths(subject)
    if subject.engine.uses_aux_hidden_state(subject.served):
        if feeds_one(subject) and not subject.engine.skips_fc(subject.served):
            return failed(
                name,
                SINGLE,
                "the file holds no fc, as a head of one feature has none, and use_aux_hidden_state is on: the engine "
                "feeds several layers through an fc that stays random",
                "set eagle_config.use_aux_hidden_state to false if it was trained on the final hidden state alone; "
                "otherwise ship fc.weight",
            )
        return passed(
            name,
            SINGLE,
            "the config asks for several target layers (served with --speculative-algorithm EAGLE3)"
            if not subject.engine.skips_fc(subject.served)
            else "the config asks for one target layer (served with --speculative-algorithm EAGLE3)",
        )
    if not has_fc(subject):
        return passed(
            name,
            SINGLE,
            "a head of one feature: use_aux_hidden_state is false, the engine feeds the target's final hidden state "
            "alone, and there is no fc to apply",
        )
    stored = subject.tensors.get("fc.weight")
    shape = list(stored.shape) if stored is not None else []
    count = shape[1] // width if len(shape) == 2 else 0
    off = "eagle_config.use_aux_hidden_state is false: the engine feeds one target layer"
    if count == 1 and width == hidden:
        return failed(
            name,
            SINGLE,
            f"{off}, its width equals the embedding's, and the stored fc ({shape}) is skipped",
            "no setting makes the engine apply fc to one feature: train without fc, or on several layers",
        )
    if count == 1 and subject.engine.num_aux_hidden_states(subject.full) != 1:
        built = subject.engine.num_aux_hidden_states(subject.full)
        return failed(
            name,
            SINGLE,
            f"{off}, and fc ({shape}) takes one, but the engine builds fc for {built} and stops on loading",
            "set num_aux_hidden_states to 1",
        )
    if count == 1:
        return skipped(
            name,
            SINGLE,
            f"{off}, and fc ({shape}) takes one; whether the engine sizes its buffers for a feature of "
            " another width than the draft's is not checked",
        )
    skips = ", its width equals the embedding's, and fc is skipped" if width == hidden else ""
    takes = f", but fc ({shape}) takes {count}" if count else ""
    return failed(name, SINGLE, f"{off}{skips}{takes}", "set eagle_config.use_aux_hidden_state to true")


def check_fc(subject: Subject) -> Finding:
    """fc's width against the number of layers times the target's width, and its bias."""
    name = "fc-width"
    # of a speculators draft `eagle-trace export` leaves it out
    if not subject.is_speculators and subject.checkpoint.config.get("target_hidden_size", 0) is None:
        return failed(
            name,
            SINGLE,
            "target_hidden_size is null, which the engine multiplies by the number of layers",
            "remove the key, or give the target's width",
        )
    stored = subject.tensors.get("fc.weight")
    hidden, width = _widths(subject)
    theirs = subject.target.config.get("hidden_size") if subject.target else None
    if stored is None:
        if has_fc(subject) or not subject.engine.skips_fc(subject.served):
            return skipped(name, SINGLE, "there is no fc.weight")
        if theirs is not None and theirs != width:
            return failed(
                name,
                SINGLE,
                f"there is no fc, and the target is {theirs} wide, the draft {hidden}: a random fc would be applied",
                "serve it with the target it was trained for",
            )
        return passed(name, SINGLE, "there is no fc, and none is applied: what is fed is as wide as the embedding")
    aux, shape = subject.engine.num_aux_hidden_states(subject.full), list(stored.shape)
    if not stored.is_float and not stored.dtype.startswith("F8_E"):
        return skipped(name, SINGLE, f"not checked: fc is packed as {stored.dtype} {shape}")
    if not subject.engine.uses_aux_hidden_state(subject.served) and shape == [hidden, width]:
        return skipped(name, SINGLE, f"fc.weight is {shape}, for one feature (see aux-hidden-state)")
    fault = _wrong_shape(subject, shape, aux) or _wrong_bias(subject)
    if fault is not None:
        return fault
    if theirs is not None and theirs != width:
        return failed(
            name,
            SINGLE,
            f"fc takes {aux} layers of width {width}, the target's width is {theirs}",
            f"serve it with a target of width {width}, the one it was trained for",
        )
    other = "" if theirs is not None else " (not compared with the target: no --target)"
    return passed(name, SINGLE, f"fc.weight is {shape}: {aux} layers of width {width}{other}")


def _wrong_shape(subject: Subject, shape: list[int], aux: int) -> Finding | None:
    name, (hidden, width) = "fc-width", _widths(subject)
    wanted = [hidden, width * aux]
    if shape != wanted:
        theirs = subject.target.config.get("hidden_size") if subject.target else None
        if theirs is not None and theirs != width and shape == [hidden, theirs * aux]:
            return failed(
                name,
                SINGLE,
                f"fc.weight is {shape}, for {aux} layers of the target's width {theirs}; the config builds {wanted}",
                f"set target_hidden_size to {theirs}",
            )
        fits = len(shape) == 2 and shape[0] == hidden and shape[1] % width == 0
        return failed(
            name,
            SINGLE,
            f"fc.weight is {shape}, but {aux} layers of width {width} need {wanted}",
            f"the weights were trained on {shape[1] // width} layer(s): name that many layer ids"
            if fits
            else "set hidden_size and target_hidden_size as trained",
        )
    if width * aux == hidden:
        return failed(
            name,
            SINGLE,
            f"one layer of width {width}: its width equals the embedding's ({hidden}), so the engine skips "
            "fc without a word",
            "train on several layers",
        )
    fed = subject.engine.fed_width(subject.served) // width
    if fed != aux and subject.engine.uses_aux_hidden_state(subject.served) and not subject.is_speculators:
        named = subject.engine.layer_ids(subject.served)
        return failed(
            name,
            SINGLE,
            f"num_aux_hidden_states is {aux}, and the engine captures {fed} layers"
            + (f" ({named})" if named else " (its default, as none are named)"),
            f"name the {aux} trained layers in {subject.engine.WORDS.ids_key}",
        )
    return None


def _wrong_bias(subject: Subject) -> Finding | None:
    stored = subject.tensors.get("fc.bias")
    if stored is None or "fc.bias" in subject.engine.parameters(subject.served):
        return None
    if stored.is_float and not as_float32(stored.read()).any():
        return None
    return failed(
        "fc-width",
        "weights-dropped",
        f"fc has a bias ({list(stored.shape)}), which the engine drops: the config does not ask for one",
        'set "bias" to true; the engine then has a bias of o_proj too: store layers.N.self_attn.o_proj.bias as zeros',
    )
