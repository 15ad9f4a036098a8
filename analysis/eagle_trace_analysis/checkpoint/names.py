"""Checks on names and shapes of the tensors: what is loaded, what is dropped, and what stays at its start."""

from __future__ import annotations

from difflib import SequenceMatcher

from eagle_trace_analysis.checkpoint.finding import Finding, failed, listed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.quantised import PACKED, is_packed, spoken_for
from eagle_trace_analysis.checkpoint.subject import Subject
from eagle_trace_analysis.checkpoint.width import feeds_one

#: names another check speaks about, so that one fault is one finding
ELSEWHERE = ("fc_norm.", "input_norm.", "q_norm", "k_norm", ".bias")


def check_names(subject: Subject) -> Finding:
    """Stored keys the serving class would drop without a word."""
    known = subject.engine.parameters(subject.served)
    tied = "lm_head.weight" not in known
    dropped = [
        name
        for name in subject.checkpoint.tensors
        if not subject.engine.destinations(name, known)
        and not spoken_for(name, subject.engine)
        and not any(part in subject.engine.canonical_name(name) for part in ELSEWHERE)
        and not (tied and subject.engine.canonical_name(name) == "lm_head.weight")
    ]
    idle = [name for name in dropped if subject.engine.computes_nothing(name) or _counts(subject, name)]
    adapter = [name for name in dropped if "lora_" in name]
    layers, counted = stored_layers(subject), int(subject.full["num_hidden_layers"])
    beyond = [name for name in dropped if layers > counted and (subject.engine.layer_of(name) or 0) >= counted]
    rest = [name for name in dropped if name not in {*idle, *adapter, *beyond}]
    name, cause = "weight-names", "weights-dropped"
    if rest or beyond:
        count = f"{len(rest) + len(beyond)} of {len(subject.checkpoint.tensors)}"
        evidence, fixes = [], []
        if beyond:
            evidence.append(f"the config counts {_layers(counted)}, the file holds {layers}")
            fixes.append(f"set num_hidden_layers to {layers}")
        if rest:
            evidence.append(listed(rest))
            fixes.append(_suggest(subject, rest))
        why = "; ".join(evidence)
        return failed(
            name, cause, f"{subject.engine.ENGINE} drops {count} tensors without a word: {why}", "; ".join(fixes)
        )
    if adapter:
        return warned(
            name,
            cause,
            f"{listed(adapter, 3)} are a LoRA adapter's, which {subject.engine.TITLE} does not apply to a draft",
            "merge the adapter into the draft if it was trained with it, or move it out of the folder",
        )
    return _doubtful_files(subject) or passed(
        name,
        cause,
        f"all {len(subject.checkpoint.tensors)} tensors have a place in {subject.engine.ARCHITECTURE}"
        + (f" but {listed(idle, 3)}, which nothing misses" if idle else "")
        + _left(subject),
    )


def _left(subject: Subject) -> str:
    """What lies beside the files that are loaded, in words."""
    left = [name for name in subject.checkpoint.unlisted if not name.endswith(".safetensors")]
    return f"; {subject.engine.TITLE} loads the safetensors and leaves {listed(left, 3)}" if left else ""


def _doubtful_files(subject: Subject) -> Finding | None:
    name, cause = "weight-names", "weights-dropped"
    unlisted = [file for file in subject.checkpoint.unlisted if file.endswith(".safetensors")]
    unlisted = [file for file in unlisted if file != "consolidated.safetensors"]
    if unlisted:
        return warned(
            name,
            cause,
            f"the index does not name {listed(unlisted)}, so {subject.engine.TITLE} loads nothing from there",
            "put every file into the index, or delete the file",
        )
    if subject.checkpoint.repeated:
        return warned(
            name,
            cause,
            f"{listed(subject.checkpoint.repeated, 3)} lie in more than one file; {subject.engine.TITLE} keeps what "
            "it reads last",
            "delete the files that are left over from another way of saving",
        )
    doubled = len(subject.checkpoint.tensors) - len(subject.tensors)
    if doubled:
        twice = [t for t in subject.checkpoint.tensors if subject.tensors[subject.engine.canonical_name(t)].name != t]
        return warned(
            name,
            cause,
            f"{doubled} parameters are stored under two names; the last to be read wins: {listed(twice)}",
            "keep one of each",
        )
    return None


def stored_layers(subject: Subject) -> int:
    """How many decoder layers the file holds, from 0 on without a gap; 0 if there is a gap, or none."""
    found = {layer for name in subject.tensors if (layer := subject.engine.layer_of(name)) is not None}
    return len(found) if found == set(range(len(found))) else 0


def _layers(count: int) -> str:
    return f"{count:,} decoder layer{'s' if count != 1 else ''}"


def _counts(subject: Subject, name: str) -> bool:
    """Whether a tensor is a counter that was saved with the weights (a training step), or holds nothing."""
    stored = subject.checkpoint.tensors[name]
    return not stored.size or (stored.size == 1 and stored.dtype.startswith(("I", "U", "BOOL")))


def misnamed(subject: Subject) -> dict[str, str]:
    """Stored tensors that the engine drops, and the parameter each may be: unfilled, and of its very shape.

    A name that ends as the parameter's comes before one that is merely alike.
    """
    known = subject.engine.parameters(subject.served)
    tensors = subject.checkpoint.tensors
    places = {name: subject.engine.destinations(name, known) for name in tensors}
    still_open = dict.fromkeys(known)
    for filled in places.values():
        for place in filled:
            still_open.pop(place, None)
    found: dict[str, str] = {}
    dropped = [name for name, filled in places.items() if not filled and not spoken_for(name, subject.engine)]
    for same_end in (True, False):
        for name in dropped:
            fit = [one for one in still_open if known[one] == tuple(tensors[name].shape)]
            fit = [one for one in fit if name.endswith(f".{one}")] if same_end else fit
            if name not in found and fit:
                found[name] = max(fit, key=lambda place: SequenceMatcher(None, name, place).ratio())
                still_open.pop(found[name])
    return found


def _suggest(subject: Subject, dropped: list[str]) -> str:
    """What to do about dropped tensors."""
    hints = {name: place for name, place in misnamed(subject).items() if name in dropped}
    if not hints:
        return f"{subject.engine.ARCHITECTURE} has no counterpart of them: leave them out if they were not trained"
    prefixes = {name.removesuffix(place) for name, place in hints.items()}
    if len(prefixes) == 1 and len(hints) == len(dropped):
        return f"take the prefix {prefixes.pop()!r} off their names"
    pairs = [f"{name} -> {place}" for name, place in hints.items()]
    return f"rename them to what {subject.engine.ARCHITECTURE} loads: {listed(pairs, 3)}"


def check_missing(subject: Subject) -> Finding:
    """Parameters no stored tensor fills."""
    name, cause = "weights-present", "weights-missing"
    known = subject.engine.parameters(subject.served)
    filled = {place for name in subject.checkpoint.tensors for place in subject.engine.destinations(name, known)}
    # a quantised matrix is stored under another ending, which a check of its own judges
    for ending in PACKED:
        names = [name for name in subject.checkpoint.tensors if name.endswith(f".{ending}")]
        filled |= {
            place
            for name in names
            for place in subject.engine.destinations(name.removesuffix(ending) + "weight", known)
        }
    unset = [name for name in known if name not in filled]
    shared = "embed_tokens.weight" in unset and not keeps_own_embedding(subject)
    if shared:
        unset.remove("embed_tokens.weight")
    # norms before fc have a check of their own, and so has an fc that is left out
    unset = [name for name in unset if not name.startswith(("fc_norm.", "input_norm."))]
    idle = [name for name in unset if name.startswith("fc.") and subject.engine.skips_fc(subject.served)]
    if feeds_one(subject):
        idle += [name for name in unset if name == "fc.weight" and name not in idle]
    norm = [
        name
        for name in unset
        if name == "layers.0.hidden_norm.weight" and (idle or subject.engine.skips_fc(subject.served))
    ]
    if "draft_vocab_size" in subject.served and subject.served["draft_vocab_size"] is None:
        # with a null the engine gives the draft the target's head
        idle += [name for name in unset if name == "lm_head.weight"]
    unset = [name for name in unset if name not in (*idle, *norm)]
    if unset:
        return (
            _left_over(subject, unset)
            or _only_misnamed(subject, unset)
            or failed(
                name,
                cause,
                f"{len(unset)} of {len(known)} parameters stay at their start (random, norms at ones): {listed(unset)}",
                "ship them; a checkpoint with renamed keys needs them under the names above" + _unasked_bias(unset),
            )
        )
    if norm:
        return warned(
            name,
            cause,
            "there is no layers.0.hidden_norm, which the engine then holds as ones: it still divides the hidden state "
            "by its root mean square",
            "see whether the head was trained with a norm there; a head of one feature may have none",
        )
    notes = [
        *(["embed_tokens comes from the target"] if shared else []),
        *(["fc is left out"] if any(name.startswith("fc.") for name in idle) else []),
    ]
    notes += ["lm_head comes from the target"] if "lm_head.weight" in idle else []
    return passed(
        name,
        cause,
        f"all {len(known)} parameters of {subject.engine.ARCHITECTURE} are there"
        + (f" ({', '.join(notes)})" if notes else ""),
    )


def _only_misnamed(subject: Subject, unset: list[str]) -> Finding | None:
    """Not a fault of its own where every parameter has a stored tensor under another name: weight-names says so."""
    if not set(unset) <= set(misnamed(subject).values()):
        return None
    return skipped(
        "weights-present",
        "weights-missing",
        f"not judged apart: {len(unset)} parameters are not filled, and for each there is a tensor that the engine "
        "drops for its name (see weight-names)",
    )


def _unasked_bias(unset: list[str]) -> str:
    if not all(name.endswith("o_proj.bias") for name in unset):
        return ""
    return "; or set attention_bias to false, if it was trained without biases"


def _left_over(subject: Subject, unset: list[str]) -> Finding | None:
    """A count of layers above what the file holds: mostly the target's, left in the draft's config."""
    layers, counted = stored_layers(subject), int(subject.full["num_hidden_layers"])
    if not 0 < layers < counted or any((subject.engine.layer_of(name) or 0) < layers for name in unset):
        return None
    theirs = " (the target's count)" if subject.target_layers == counted else ""
    return failed(
        "weights-present",
        "weights-missing",
        f"the config counts {_layers(counted)}{theirs}, the file holds {layers}: the engine builds the other "
        f"{counted - layers:,} too, and leaves them at random",
        f"set num_hidden_layers to {layers}, if the draft was trained with so many",
    )


def keeps_own_embedding(subject: Subject) -> bool:
    """Whether an engine leaves the draft its own embedding, as it does where the target's is of another width."""
    hidden = int(subject.full["hidden_size"])
    return int(subject.full.get("target_hidden_size", hidden)) != hidden


def check_shapes(subject: Subject) -> Finding:
    """Stored shapes against those the config builds; fc, head and embedding have checks of their own."""
    known = subject.engine.parameters(subject.served)
    wrong = [
        f"{name} is {list(stored.shape)}, the config builds {list(known[name])}"
        for name, stored in subject.tensors.items()
        if name in known
        and name not in ("fc.weight", "lm_head.weight", "embed_tokens.weight")
        and tuple(stored.shape) != known[name]
        and not (is_packed(stored) and stored.dtype not in ("F8_E4M3", "F8_E5M2"))
    ]
    heads = subject.engine.attention_words(subject.full)
    if wrong:
        return failed(
            "head-shape",
            "qkv-order",
            f"with {heads}: {listed(wrong, 3)}",
            f"set {', '.join(subject.engine.LAYER_SIZES[:-1])} and {subject.engine.LAYER_SIZES[-1]} as trained",
        )
    queries, keys_values = int(subject.full["num_attention_heads"]), int(subject.full["num_key_value_heads"])
    if "num_key_value_heads" in subject.engine.LAYER_SIZES and queries % keys_values:
        why = "as many heads have to share each key-value head, and these numbers do not divide"
        fix = "set num_attention_heads and num_key_value_heads as trained"
        return failed("head-shape", "qkv-order", f"{heads}: {why}", fix)
    if subject.trained_layer is not None:
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")
        differ = [
            f"{key} is {subject.full[key]}, trained {subject.trained_layer[key]}"
            for key in keys
            if subject.full[key] != subject.trained_layer[key]
        ]
        if differ:
            return failed("head-shape", "qkv-order", "; ".join(differ), "set them as trained")
    return passed("head-shape", "qkv-order", f"{heads}; every matrix has the shape the config builds")
