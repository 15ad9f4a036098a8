"""Checks on the configs: what the engine cannot compute, and where serving and training differ."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_trace_analysis.checkpoint import accepts, engine
from eagle_trace_analysis.checkpoint.files import DTYPE_NAMES, stored_dtype
from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.quantised import is_packed, spoken_for
from eagle_trace_analysis.checkpoint.scan import Scan
from eagle_trace_analysis.checkpoint.subject import Subject

ASK = "the training config is not known: give --reference, the speculators folder it came from"
LARGEST_FLOAT16 = 65504.0


def check_format(subject: Subject) -> Finding:
    """Whether the engine would take the folder for an EAGLE-3 draft."""
    if subject.is_speculators:
        return passed(
            "format",
            "",
            "speculators format; everything below is about the folder `eagle-trace export` makes of it for "
            f"{engine.ENGINE}",
        )
    architectures = subject.checkpoint.config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = subject.kind
    if kind is not None:
        said = f"architectures is {architectures}, and " if architectures else ""
        left = [name for name in subject.checkpoint.unlisted if not name.endswith(".safetensors")]
        skips = f"; SGLang loads the safetensors alone and leaves {', '.join(left[:3])}" if left else ""
        return failed(
            "format",
            "",
            f"{said}the tensors are those of {kind.name}: {kind.marks}{skips}. The other checks are for EAGLE-3 "
            "drafts, and were not made",
            kind.served,
        )
    if name in engine.VLLM_NAMES:
        return failed(
            "format",
            "",
            f"architectures is {architectures}, vLLM's name for a draft with the same layer, which {engine.ENGINE} "
            "does not know; the rest is checked as if it were its own",
            f'set architectures to ["{engine.ARCHITECTURE}"]{_ids_for_vllm(subject)}',
        )
    if name != engine.ARCHITECTURE:
        return failed(
            "format",
            "",
            f"architectures is {architectures}, by which the engine would not load it as an EAGLE-3 draft; the tensors "
            "are those of one",
            f'set architectures to ["{engine.ARCHITECTURE}"]',
        )
    return passed("format", "", f"SGLang format ({engine.ARCHITECTURE})")


def _ids_for_vllm(subject: Subject) -> str:
    """What becomes of layer ids that were written for vLLM, which counts inputs as speculators does."""
    config = subject.served
    ids = engine.eagle_config(config).get("eagle_aux_hidden_state_layer_ids") or config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return ""
    return (
        f"; if its layer ids {ids} are vLLM's too, which are inputs of layers, write {[i - 1 for i in ids]} into "
        "eagle_config.eagle_aux_hidden_state_layer_ids"
    )


def check_config(subject: Subject) -> Finding:
    """Whether the engine's config loader takes every key: types, nulls, spellings."""
    name, cause = "config", ""
    # one fault is one finding: these have checks of their own
    elsewhere = {"architectures"}
    if isinstance(subject.checkpoint.config.get("hidden_act"), str):
        elsewhere.add("hidden_act")
    if subject.checkpoint.config.get("target_hidden_size", 1) is None:
        elsewhere.add("target_hidden_size")
    refused = [refusal for refusal in subject.refused if refusal.key not in elsewhere]
    if refused:
        return failed(
            name,
            cause,
            f"{engine.ENGINE} stops at this config: {'; '.join(refusal.why for refusal in refused)}",
            "; ".join(dict.fromkeys(refusal.fix for refusal in refused)),
        )
    entry = accepts.config_class(subject.served)
    if entry is None:
        kind = subject.served.get("model_type")
        return skipped(
            name, cause, f"which types and defaults the config class of model_type {kind} has is not known here"
        )
    if not entry["loads"]:
        kind = subject.served.get("model_type")
        return failed(
            name,
            cause,
            f"model_type is {kind}: from its {entry['class']} the engine cannot build a llama layer",
            'set model_type to "llama"',
        )
    return passed(name, cause, f"every key is of a type that {entry['class']} and the engine take")


def check_residual_norm(subject: Subject) -> Finding:
    """`norm_before_residual`, which the engine has in one form only."""
    name, cause = "residual-norm", "residual-norm"
    source = subject.trained if subject.trained is not None else subject.served
    if "norm_before_residual" not in source and subject.trained is None:
        return skipped(name, cause, f"no tensor shows whether it was trained with norm_before_residual; {ASK}")
    if source.get("norm_before_residual"):
        return failed(
            name,
            cause,
            f"trained with norm_before_residual (speculators' CLI default): {engine.ENGINE} starts the "
            "residual from the hidden state before hidden_norm",
            "retrain with --no-norm-before-residual, or serve with an engine that has this form (vLLM)",
        )
    return passed(name, cause, "trained without norm_before_residual, the form the engine computes")


def check_fc_norm(subject: Subject) -> Finding:
    """Norms before fc: trained, stored and served must agree."""
    name, cause = "fc-norm", "fc-norm-ignored"
    served = {
        "norm_before_fc": engine.norm_before_fc(subject.served),
        "fc_norm": engine.fc_norm(subject.served),
    }
    stored = {
        "norm_before_fc": any(n.startswith("input_norm.") for n in subject.tensors),
        "fc_norm": any(n.startswith("fc_norm.") for n in subject.tensors),
    }
    where = {"norm_before_fc": "eagle_config.norm_before_fc", "fc_norm": "fc_norm"}
    for flag, tensor in (("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm.*")):
        trained = stored[flag] if subject.trained is None else bool(subject.trained.get(flag))
        if trained and not served[flag]:
            return failed(
                name,
                cause,
                f"trained with {flag}, but the config does not say so: the engine leaves the norm out",
                f"set {where[flag]} to true",
            )
        if served[flag] and not trained:
            return failed(
                name,
                cause,
                f"the config turns {flag} on, the draft was trained without it",
                f"set {where[flag]} to false",
            )
        if served[flag] and not stored[flag]:
            return failed(
                name,
                cause,
                f"{flag} is on, but there is no {tensor} tensor: the norm stays at ones",
                "ship the trained norm",
            )
    missing = [
        n
        for n in engine.parameters(subject.served)
        if n.startswith(("fc_norm.", "input_norm.")) and n not in subject.tensors
    ]
    if missing:
        return failed(
            name,
            cause,
            f"some norms before fc are missing and stay at ones: {', '.join(missing)}",
            "ship the trained norms",
        )
    on = [flag for flag, value in served.items() if value]
    return passed(
        name,
        cause,
        f"{' and '.join(on)} is on, with its weights" if on else "no norm before fc, in training or in serving",
    )


def check_norm_output(subject: Subject) -> Finding:
    """Whether the hidden state carried to the next step is the normed one."""
    name, cause, served = "norm-output", "carry-norm", bool(subject.served.get("norm_output", False))
    if subject.trained is None:
        return skipped(
            name,
            cause,
            f"served with norm_output {str(served).lower()}, and no tensor shows how it was trained; {ASK}",
        )
    trained = bool(subject.trained.get("norm_output", False))
    if trained != served:
        return failed(
            name,
            cause,
            f"trained with norm_output {str(trained).lower()}, served with {str(served).lower()}: step 0 is "
            "fine, later steps are not",
            f"set norm_output to {str(trained).lower()}",
        )
    return passed(name, cause, f"norm_output is {str(served).lower()} on both sides")


def check_decoder(subject: Subject) -> Finding:
    """What the decoder layer must be for the engine's class: a llama layer with silu and no biases.

    A layer that was trained with speculators is what its config says. In a flat config `model_type` only picks the
    config class, so the tensors decide.
    """
    name, cause = "decoder-layer", "weights-dropped"
    source = subject.trained_layer or subject.full
    problems = []
    kind = source.get("model_type", "llama")
    if subject.trained_layer is not None and kind != "llama":
        problems.append(f"the decoder layer is {kind}, the engine computes llama layers")
    if source["hidden_act"] != "silu" or subject.full["hidden_act"] != "silu":
        problems.append(
            f"the activation is {source['hidden_act']}, served as {subject.full['hidden_act']}: the engine "
            "has silu only"
        )
    extra = [
        n
        for n in subject.tensors
        # a bias of fc is judged with fc
        if n.endswith((".q_norm.weight", ".k_norm.weight", ".bias"))
        and n != "fc.bias"
        and n not in engine.parameters(subject.served)
    ]
    if extra:
        problems.append(f"the engine drops {', '.join(extra[:4])}")
    elif subject.trained_layer is not None and (source["attention_bias"] or source["mlp_bias"]):
        problems.append("the config asks for biases, of which the engine has none in q, k, v and the MLP")
    if problems:
        return failed(name, cause, "; ".join(problems), "retrain with a llama layer (silu, no biases, no q/k norms)")
    others = _other_defaults(subject)
    if others:
        return warned(
            name,
            cause,
            f"a llama layer by its tensors; model_type {kind} picks other defaults for what the config leaves out: "
            f"{others}",
            'write these keys as trained, or set model_type to "llama" if llama\'s defaults were',
        )
    said = "" if kind == "llama" else f" (model_type {kind} picks the config class only)"
    return passed(name, cause, f"a llama layer with silu and no biases, as the engine computes{said}")


def _other_defaults(subject: Subject) -> str:
    """Defaults that the served `model_type` gives to absent keys and llama would not; shapes have their own checks."""
    if subject.trained_layer is not None or accepts.config_class(subject.served) is None:
        return ""
    as_llama = engine.with_defaults({**subject.served, "model_type": "llama"})
    found = [
        f"{key} {subject.full.get(key)} (llama {as_llama.get(key)})"
        for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias")
        if subject.served.get(key) is None and subject.full.get(key) != as_llama.get(key)
    ]
    theta, llama = (engine.rope_settings(config)["rope_theta"] for config in (subject.full, as_llama))
    return ", ".join(found + ([f"rope_theta {theta:g} (llama {llama:g})"] if theta != llama else []))


def check_rope(subject: Subject) -> Finding:
    """Rotary embedding against the training."""
    name, cause, served = "rope", "rope-theta", engine.rope_settings(subject.full)
    words = ", ".join(f"{k} {v}" for k, v in sorted(served.items()))
    if subject.trained_layer is None:
        return skipped(name, cause, f"served with {words}; {ASK}")
    trained = engine.rope_settings(subject.trained_layer)
    differ = [
        f"{key} is {served.get(key)}, trained {trained.get(key)}"
        for key in sorted({*served, *trained})
        if served.get(key) != trained.get(key)
    ]
    if differ:
        return failed(name, cause, "; ".join(differ), f"set rope_parameters to {trained}")
    return passed(name, cause, f"{words}, as trained")


def check_eps(subject: Subject) -> Finding:
    """`rms_norm_eps` against the training."""
    served = float(subject.full["rms_norm_eps"])
    if subject.trained_layer is None:
        return skipped("norm-eps", "norm-eps", f"served with rms_norm_eps {served:g}; {ASK}")
    trained = float(subject.trained_layer["rms_norm_eps"])
    if served != trained:
        return failed(
            "norm-eps",
            "norm-eps",
            f"rms_norm_eps is {served:g}, trained {trained:g}",
            f"set rms_norm_eps to {trained:g}",
        )
    return passed("norm-eps", "norm-eps", f"rms_norm_eps {served:g}, as trained")


def check_max_position(subject: Subject) -> Finding:
    """`max_position_embeddings` against the training's and the target's."""
    name, cause, served = "max-position", "max-position", accepts.positions(subject.full)
    if subject.trained_layer is not None and served < int(subject.trained_layer["max_position_embeddings"]):
        trained = subject.trained_layer["max_position_embeddings"]
        return failed(
            name,
            cause,
            f"max_position_embeddings is {served}, trained {trained}",
            f"set max_position_embeddings to {trained}",
        )
    theirs = accepts.positions(subject.target.config) if subject.target else None
    if theirs is not None and served < theirs:
        return warned(
            name,
            cause,
            f"the draft has positions up to {served}, the target up to {theirs}: {engine.ENGINE} does not start with "
            f"the target's own length, and drafts collapse past {served}",
            f"serve with --context-length {served}; or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 and keep "
            f"requests shorter; or raise max_position_embeddings to {theirs} if it was trained so",
        )
    against = "the target's" if theirs is not None else "the training's" if subject.trained_layer else ""
    if not against:
        return skipped(
            name,
            cause,
            f"served with max_position_embeddings {served}: give --target or --reference to compare",
        )
    return passed(name, cause, f"max_position_embeddings {served}, no less than {against}")


def check_window(subject: Subject) -> Finding:
    """Sliding-window attention, which the engine takes from a server argument and not from the config."""
    source = subject.trained_layer or subject.full
    kinds = source.get("layer_types") or []
    if "sliding_attention" in kinds:
        window = source.get("sliding_window")
        return warned(
            "sliding-window",
            "sliding-window",
            f"trained with a sliding window of {window}, which the engine does not read from the config",
            f"serve with --speculative-draft-window-size {window}",
        )
    return passed("sliding-window", "sliding-window", "full attention")


def check_tied(subject: Subject) -> Finding:
    """A tie flag that would drop the draft's own head."""
    name, cause = "tied-head", "lm-head-tied"
    if not subject.full["tie_word_embeddings"]:
        return passed(name, cause, "tie_word_embeddings is off: the draft's own head is used")
    own = "lm_head.weight" in subject.tensors
    return failed(
        name,
        cause,
        "tie_word_embeddings is on: the head is the target's embedding"
        + (", and the trained lm_head.weight is dropped" if own else ""),
        "set tie_word_embeddings to false" + ("" if own else " and ship lm_head.weight"),
    )


def check_vocabulary(subject: Subject) -> Finding:
    """Vocabulary sizes: config, head, embedding, target."""
    name, cause = "vocabulary", "lm-head-from-target"
    vocabulary, own = int(subject.full["vocab_size"]), subject.served.get("draft_vocab_size")
    head, embedding = subject.tensors.get("lm_head.weight"), subject.tensors.get("embed_tokens.weight")
    rows = f", its head has {head.shape[0]:,} rows" if head is not None else ""
    if own is None and head is None and "draft_vocab_size" in subject.served and "d2t" not in subject.tensors:
        return passed(
            name,
            cause,
            "draft_vocab_size is null and the draft has no head of its own: the engine gives it the target's",
        )
    if own is None:
        number = head.shape[0] if head is not None else "the number of draft ids"
        return failed(
            name,
            cause,
            f"draft_vocab_size is not set{rows}: the engine stops, or (null) takes the target's head",
            f"set draft_vocab_size to {number}",
        )
    if head is not None and head.shape[0] != own:
        return failed(name, cause, f"draft_vocab_size is {own:,}{rows}", f"set draft_vocab_size to {head.shape[0]}")
    if own > vocabulary:
        return failed(name, cause, f"draft_vocab_size {own:,} exceeds vocab_size {vocabulary:,}", "set both as trained")
    if embedding is not None and embedding.shape[0] != vocabulary:
        return failed(
            name,
            cause,
            f"vocab_size is {vocabulary:,}, the embedding has {embedding.shape[0]:,} rows",
            f"set vocab_size to {embedding.shape[0]}",
        )
    theirs = subject.target.config.get("vocab_size") if subject.target else None
    if theirs is not None and theirs != vocabulary:
        return failed(
            name,
            cause,
            f"vocab_size is {vocabulary:,}, the target's is {theirs:,}",
            "serve it with the target it was trained for",
        )
    if subject.trained is not None and subject.trained.get("draft_vocab_size", 32000) != own:
        return failed(
            name,
            cause,
            f"draft_vocab_size is {own:,}, trained {subject.trained.get('draft_vocab_size', 32000):,}",
            "set draft_vocab_size as trained",
        )
    return passed(name, cause, f"{own:,} draft ids of {vocabulary:,} target ids{rows}")


def check_dtype(subject: Subject, scans: Mapping[str, Scan]) -> Finding:
    """What the weights are stored in, what the config says, and what the target computes in."""
    plain = {name: t for name, t in subject.tensors.items() if t.is_float and not spoken_for(name)}
    floats = sorted({DTYPE_NAMES[t.dtype] for t in plain.values()})
    quantised = sorted({t.dtype for t in subject.tensors.values() if is_packed(t)})
    stored, said = (
        stored_dtype(plain),
        subject.served.get("dtype") or subject.served.get("torch_dtype"),
    )
    largest = max((scan.largest for name, scan in scans.items() if name in plain), default=0.0)
    fix = "serve with --dtype as the target's, or store the draft so"
    # with no dtype named, and for float32, SGLang's --dtype auto takes float16
    served = "float16" if said in (None, "float32") else str(said)
    if served == "float16" and largest > LARGEST_FLOAT16:
        return failed(
            "dtype",
            "nonfinite",
            f"values up to {largest:.3g} overflow float16, in which --dtype auto serves it",
            "serve with --dtype bfloat16",
        )
    if subject.target is not None:
        theirs = subject.target.config.get("dtype") or subject.target.config.get("torch_dtype")
        if theirs is not None and said is not None and theirs != said:
            return warned("dtype", "rounding", f"the draft's config says {said}, the target's {theirs}", fix)
    if said is None:
        return warned(
            "dtype",
            "rounding",
            f"stored as {', '.join(floats)}, and the config names no dtype: --dtype auto takes float16",
            f'set "dtype" to "{stored}"',
        )
    mixed = f" ({', '.join(floats)} stored, cast on loading)" if floats != [said] else ""
    mixed += f", and quantised matrices as {', '.join(quantised)}" if quantised else ""
    return passed("dtype", "rounding", f"{said}{mixed}, largest magnitude {largest:.3g}")
