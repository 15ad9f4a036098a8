"""Checks on the configs: what the engine cannot compute, and where serving and training differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_trace.checkpoints import differ_by_padding
from eagle_trace_analysis.checkpoint.files import DTYPE_NAMES, StoredTensor, stored_dtype
from eagle_trace_analysis.checkpoint.finding import Finding, failed, passed, skipped, warned
from eagle_trace_analysis.checkpoint.quantised import is_packed, spoken_for
from eagle_trace_analysis.checkpoint.scan import Scan
from eagle_trace_analysis.checkpoint.subject import Subject
from eagle_trace_analysis.checkpoint.weights import same_rows
from eagle_trace_analysis.engines.rotation import runs_backwards
from eagle_trace_analysis.trainers import specforge
from eagle_trace_analysis.trainers.base import flat_training
from eagle_trace_analysis.trainers.specforge import MISSING_FROM_HEAD

LARGEST_FLOAT16 = 65504.0
#: drafts are trained with 1e-5 or 1e-6; rows of an embedding have a mean square of 1e-4 to 1e-2
LARGEST_EPS = 1e-2


def check_residual_norm(subject: Subject) -> Finding:
    """`norm_before_residual`, which the engine has in one form only."""
    name, cause = "residual-norm", "residual-norm"
    gap = subject.gap("norm_before_residual")
    if gap is not None:
        return failed(name, cause, gap.why, gap.fix)
    only = subject.form("norm_before_residual")
    if subject.training is None and only is False and subject.origin is not None:
        return passed(
            name, cause, f"{subject.origin.trainer.TITLE}'s class has no norm_before_residual, the engine's form"
        )
    if subject.training is None and "norm_before_residual" not in subject.served:
        return skipped(name, cause, f"no tensor shows whether it was trained with norm_before_residual; {subject.ask}")
    trained = (subject.training or flat_training(subject.served)).norm_before_residual
    how = "with" if trained else "without"
    return passed(name, cause, f"trained {how} norm_before_residual, the form the engine computes")


def check_fc_norm(subject: Subject) -> Finding:
    """Norms before fc: trained, stored and served must agree."""
    name, cause = "fc-norm", "fc-norm-ignored"
    served = {
        "norm_before_fc": subject.engine.norm_before_fc(subject.served),
        "fc_norm": subject.engine.fc_norm(subject.served),
    }
    stored = {
        "norm_before_fc": any(n.startswith("input_norm.") for n in subject.tensors),
        "fc_norm": any(n.startswith("fc_norm.") for n in subject.tensors),
    }
    where = {"norm_before_fc": "eagle_config.norm_before_fc", "fc_norm": "fc_norm"}
    for flag, tensor in (("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm.*")):
        trained = stored[flag] if subject.training is None else bool(getattr(subject.training, flag))
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
        for n in subject.engine.parameters(subject.served)
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
    if subject.training is not None and not subject.training.head_norm:
        why = "trained without the norm before the head (norm_output false), which no server leaves out"
        return failed(name, "head-norm", why, MISSING_FROM_HEAD)
    doubt = subject.doubt(name)
    known = subject.training is not None and (doubt is None or doubt.certain)
    if doubt is not None and not (known and subject.training is not None and subject.training.norm_output == served):
        return (failed if doubt.certain else warned)(name, doubt.cause or cause, doubt.why, doubt.fix)
    if subject.training is None:
        return _carry_of_its_class(subject, served) or skipped(
            name,
            cause,
            f"served with norm_output {str(served).lower()}, and no tensor shows how it was trained; {subject.ask}",
        )
    trained = subject.training.norm_output
    if trained != served:
        return failed(
            name,
            cause,
            f"trained with norm_output {str(trained).lower()}, served with {str(served).lower()}: step 0 is "
            "fine, later steps are not",
            f"set norm_output to {str(trained).lower()}",
        )
    return passed(name, cause, f"norm_output is {str(served).lower()} on both sides")


def _carry_of_its_class(subject: Subject, served: bool) -> Finding | None:
    """The carry of a draft whose trainer hands it on in one way only; None if that is not known, or differs."""
    if subject.origin is None:
        return None
    name, cause, title = "norm-output", "carry-norm", subject.origin.trainer.TITLE
    only = subject.form("norm_output")
    if "norm_output" not in subject.served and (subject.origin.trainer is specforge or only is False):
        return passed(name, cause, f"no norm_output: {title} and the engine hand on the carry as it is")
    if only is not None and only == served:
        form = "normed" if only else "as it is"
        return passed(name, cause, f"{title}'s class hands on the carry {form}, and so does the engine")
    return None


def check_rope(subject: Subject) -> Finding:
    """Rotary embedding against the training."""
    name, cause, served = "rope", "rope-theta", subject.engine.rope_settings(subject.full)
    words = ", ".join(f"{k} {v}" for k, v in sorted(served.items()))
    fault = subject.engine.rotation_fault(subject.full)
    if fault is not None:
        return failed(name, cause, fault.why, fault.fix)
    doubt = subject.doubt(name)
    if subject.trained_layer is None and doubt is not None:
        return warned(name, doubt.cause or cause, doubt.why, doubt.fix)
    if subject.trained_layer is None:
        odd = _odd_rope(subject, served)
        return warned(name, cause, *odd) if odd else skipped(name, cause, f"served with {words}; {subject.ask}")
    trained = subject.trained_rope or {}
    differ = [
        f"{key} is {served.get(key)}, trained {trained.get(key)}"
        for key in sorted({*served, *trained})
        if served.get(key) != trained.get(key)
    ]
    sections = [one for one in differ if one.startswith("mrope_")]
    if sections and len(sections) == len(differ):
        return warned(
            name,
            cause,
            f"{'; '.join(sections)}: the same for text, whose three positions are one, and not for images",
            "write the sections as trained",
        )
    if differ:
        return failed(name, cause, "; ".join(differ), _rope_fix(differ, trained))
    if doubt is not None:
        return warned(name, doubt.cause or cause, doubt.why, doubt.fix)
    return passed(name, cause, f"{words}, as trained")


def _odd_rope(subject: Subject, served: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is unlikely to have been trained so, and the way out; None if nothing is."""
    rope = subject.full.get("rope_scaling") or subject.full.get("rope_parameters") or {}
    form = rope.get("rope_type") or rope.get("type") or "default"
    if served["rope_type"] not in ("default", form, f"deepseek_{form}"):
        made = f"{subject.engine.ARCHITECTURE} makes {served['rope_type']}"
        return f"the config names the form {form}, of which {made}", "set its form and its numbers as trained"
    if runs_backwards(served):
        fast, slow = served.get("beta_fast", 32), served.get("beta_slow", 1)
        why = f"beta_fast is {fast}, beta_slow {slow}: yarn then divides fast rotations and leaves slow ones"
        return why, "set beta_fast and beta_slow as trained"
    share = subject.served.get("partial_rotary_factor", 1.0)
    if share != 1:
        return (
            f"partial_rotary_factor is {share}: the engine rotates that share of a head, and transformers' llama "
            "layer, with which drafts are trained, rotates whole heads whatever the key says",
            "remove partial_rotary_factor, unless it was trained with a layer that reads it",
        )
    return None


def _rope_fix(differ: list[str], trained: dict[str, Any]) -> str:
    share = [one for one in differ if one.startswith("partial_rotary_factor")]
    rope = {key: value for key, value in trained.items() if key != "partial_rotary_factor"}
    fixes = [f"set rope_parameters to {json.dumps(rope)}"] if len(share) < len(differ) else []
    if share:
        fixes.append(f"set partial_rotary_factor, at the top of the config, to {trained['partial_rotary_factor']}")
    return "; ".join(fixes)


def check_eps(subject: Subject) -> Finding:
    """`rms_norm_eps` against the training."""
    served = float(subject.full["rms_norm_eps"])
    with np.errstate(over="ignore"):
        computed = float(np.float32(served))  # in which norms compute
    why, fix = _useless_eps(computed), "set rms_norm_eps as trained (1e-5, 1e-6)"
    if why:
        return failed("norm-eps", "norm-eps", f"rms_norm_eps is {served:g}: {why}", fix)
    if subject.trained_layer is None and not computed:
        why = f"rms_norm_eps is {served:g}: of a row of zeros, as of a token that was never trained, a norm makes NaN"
        return warned("norm-eps", "norm-eps", why, fix)
    if subject.trained_layer is None and computed > LARGEST_EPS:
        why = f"rms_norm_eps is {served:g}, more than the mean square of usual rows: a norm then shrinks them"
        return warned("norm-eps", "norm-eps", why, fix)
    if subject.trained_layer is None:
        return skipped("norm-eps", "norm-eps", f"served with rms_norm_eps {served:g}; {subject.ask}")
    trained = float(subject.trained_layer["rms_norm_eps"])
    if served != trained:
        return failed(
            "norm-eps",
            "norm-eps",
            f"rms_norm_eps is {served:g}, trained {trained:g}",
            f"set rms_norm_eps to {trained:g}",
        )
    return passed("norm-eps", "norm-eps", f"rms_norm_eps {served:g}, as trained")


def _useless_eps(eps: float) -> str:
    """Why no norm computes with such an eps, which is added to a mean square; empty if one does."""
    if eps < 0:
        return "the root of a mean square less than that is not a number"
    if math.isnan(eps):
        return "every norm makes NaN"
    return "every norm makes zeros" if math.isinf(eps) else ""


def check_tied(subject: Subject) -> Finding:
    """A tie flag that would drop the draft's own head."""
    name, cause = "tied-head", "lm-head-tied"
    if not subject.full["tie_word_embeddings"]:
        return passed(name, cause, "tie_word_embeddings is off: the draft's own head is used")
    head = subject.tensors.get("lm_head.weight")
    if head is not None and "lm_head.weight" in subject.engine.parameters(subject.served):
        return passed(
            name, cause, f"{subject.engine.TITLE} loads the draft's own head, whatever tie_word_embeddings says"
        )
    tied = subject.target is not None and subject.target.config.get("tie_word_embeddings")
    own = head is not None
    whole = subject.full.get("draft_vocab_size") == subject.full["vocab_size"]
    if whole and head is None and tied:
        return passed(name, cause, "the draft has no head of its own: it is given the target's embedding, its head too")
    if whole and head is None:
        return warned(
            name,
            cause,
            "tie_word_embeddings is on and there is no head: the draft is given the target's embedding for one",
            "leave it if it was trained so; otherwise set tie_word_embeddings to false and ship lm_head.weight",
        )
    if whole and head is not None and _is_embedding(subject, head):
        return passed(name, cause, "lm_head.weight is dropped, and equals the embedding that is taken in its place")
    return failed(
        name,
        cause,
        "tie_word_embeddings is on: the head is the target's embedding"
        + (", and the trained lm_head.weight is dropped" if own else ""),
        "set tie_word_embeddings to false" + ("" if own else " and ship lm_head.weight"),
    )


def _is_embedding(subject: Subject, head: StoredTensor) -> bool:
    """Whether the head holds the rows of the embedding that a tie puts in its place."""
    theirs = subject.target.embedding if subject.target else subject.tensors.get("embed_tokens.weight")
    if theirs is None or not (head.is_float and theirs.is_float) or head.shape != theirs.shape:
        return False
    equal, of, _ = same_rows(head, theirs, lambda rows: rows)
    return equal == of


def _rows(tensor: StoredTensor | None) -> int:
    """Rows of a tensor, 0 without one: a scalar has none."""
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def check_vocabulary(subject: Subject) -> Finding:
    """Vocabulary sizes: config, head, embedding, target."""
    name, cause = "vocabulary", "lm-head-from-target"
    vocabulary, own = int(subject.full["vocab_size"]), subject.served.get("draft_vocab_size")
    head, embedding = subject.tensors.get("lm_head.weight"), subject.tensors.get("embed_tokens.weight")
    of_head, of_embedding = _rows(head), _rows(embedding)
    rows = f", its head has {of_head:,} rows" if head is not None else ""
    if own is None and head is None and "draft_vocab_size" in subject.served and "d2t" not in subject.tensors:
        return passed(
            name,
            cause,
            "draft_vocab_size is null and the draft has no head of its own: the engine gives it the target's",
        )
    if own is None:
        number = of_head if head is not None else "the number of draft ids"
        return failed(
            name,
            cause,
            f"draft_vocab_size is not set{rows}: the engine stops, or (null) takes the target's head",
            f"set draft_vocab_size to {number}",
        )
    if head is not None and of_head != own:
        return failed(name, cause, f"draft_vocab_size is {own:,}{rows}", f"set draft_vocab_size to {of_head}")
    if own > vocabulary:
        return failed(name, cause, f"draft_vocab_size {own:,} exceeds vocab_size {vocabulary:,}", "set both as trained")
    if embedding is not None and of_embedding != vocabulary:
        return failed(
            name,
            cause,
            f"vocab_size is {vocabulary:,}, the embedding has {of_embedding:,} rows",
            f"set vocab_size to {of_embedding}",
        )
    theirs = subject.target.config.get("vocab_size") if subject.target else None
    if theirs is not None and theirs != vocabulary and differ_by_padding(theirs, vocabulary):
        return warned(
            name,
            cause,
            f"vocab_size is {vocabulary:,}, the target's is {theirs:,}, which may be padding: the draft is given the "
            "target's embedding, of which tensor parallelism cuts the draft's part by this number",
            f"set vocab_size to {theirs}" + (" and leave embed_tokens.weight out" if embedding is not None else ""),
        )
    if theirs is not None and theirs != vocabulary:
        return failed(
            name,
            cause,
            f"vocab_size is {vocabulary:,}, the target's is {theirs:,}",
            "serve it with the target it was trained for",
        )
    if subject.training is not None and subject.training.draft_vocab_size != own:
        return failed(
            name,
            cause,
            f"draft_vocab_size is {own:,}, trained {subject.training.draft_vocab_size:,}",
            "set draft_vocab_size as trained",
        )
    return passed(name, cause, f"{own:,} draft ids of {vocabulary:,} target ids{rows}")


def check_dtype(subject: Subject, scans: Mapping[str, Scan]) -> Finding:
    """What the weights are stored in, what the config says, and what the target computes in."""
    plain = {name: t for name, t in subject.tensors.items() if t.is_float and not spoken_for(name, subject.engine)}
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
