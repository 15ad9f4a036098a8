"""Weights that are there, loaded, and not the trained ones: which, how far, of what kind, and what brings them back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES
from eagle_trace.sites import site_of_parameter
from eagle_trace_analysis.causes.base import Cause, Outcome, clipped, confirmed, ruled_out, without_parameters
from eagle_trace_analysis.checkpoint.files import DTYPE_NAMES
from eagle_trace_analysis.comparison.tolerance import UNIT
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.evidence.not_loaded import not_loaded, shown
from eagle_trace_analysis.replay.replay import Measured, Recomputed
from eagle_trace_analysis.tensors.kinds import Kind, kind_of
from eagle_trace_analysis.tensors.loaded import Apart, cast, digest_as, digest_of
from eagle_trace_analysis.tensors.places import match_channels, order_words

Real = NDArray[Any]

#: causes that say more about the parameters of the sites where they are confirmed
NARROWER = ("qkv-order", "embedding-replaced", "lm-head-tied", "lm-head-from-target", "target-differs")
MOST_PARTS = 4
_GROUPS = 4


def check(context: Context) -> Outcome:
    """Parameters as loaded against the trained ones, and the tensors of both folders where they differ."""
    if (lacking := without_parameters(context)) is not None:
        return lacking
    trained, served = context.params
    common = [name for name in trained if name in served and name not in ("d2t", "t2d")]
    found = [one for one in context.apart if not _elsewhere(context, one)]
    if not found:
        others = [one.name for one in context.apart]
        said = f"; {clipped(others)} are spoken of by other causes" if others else ""
        return ruled_out(
            f"{len(common) - len(others)} of {len(common)} parameters as loaded equal the trained ones{said}"
        )
    kinds = _kinds(context, found)
    names = [one.name for one in found]
    seen = shown(context, names)
    verb = "is not the trained one" if len(names) == 1 else "are not the trained ones"
    lead = f"as loaded, {len(names)} of {len(common)} parameters {verb}"
    evidence = f"{lead}: {'; '.join(_grouped(kinds))}"
    evidence += f"; {seen[0]} differs" if seen else "; no site that uses them differs beyond rounding"
    site = seen[0] if seen else next((at for name in names if (at := site_of_parameter(name))), "")
    explained = frozenset(at for one in found if one.held is None and (at := site_of_parameter(one.name)))
    held = {one.name: one.held for one in found if one.held is not None}
    changed = None
    if context.replay is not None and held:
        weights = context.replay.weights
        for name, tensor in held.items():
            weights = weights.borrowing(name, tensor)
        changed = context.replay.varied(weights=weights)
    outcome = confirmed(evidence, _fix(context, kinds), site)
    return replace(outcome, changed=changed, deployed=True, words="the weights as loaded", explains=explained)


def _elsewhere(context: Context, one: Apart) -> bool:
    """Whether another cause is about this parameter."""
    if one.name in ("d2t", "t2d") or one.name in not_loaded(context):
        return True
    # an engine that shares the target's embedding holds another than the draft's folder has
    if one.name == "embed_tokens.weight" and one.held is None:
        return context.agrees("embed") or context.confirms("embedding-replaced")
    if one.name == "lm_head.weight" and context.other_algorithm is not None:
        return True  # it takes the target's head
    if one.name.startswith(("input_norm.", "fc_norm.")):
        return context.confirms("fc-norm-ignored")
    site = site_of_parameter(one.name)
    for cause in NARROWER:
        outcome = context.outcomes.get(cause)
        if outcome is None or outcome.verdict != "confirmed":
            continue
        speaks_of = {outcome.site} if outcome.explains is None else outcome.explains
        if site in speaks_of or (outcome.changed is not None and _brings_down(context, site, outcome)):
            return True
    return False


def _brings_down(context: Context, site: str | None, outcome: Outcome) -> bool:
    faulty = [one for one in context.nodes([site] if site else []) if one.verdict == "faulty"]
    found = [outcome.changed.measure(one.site, one.step, one.train) for one in faulty if outcome.changed is not None]
    return bool(found) and all(isinstance(one, Measured) and one.reproduced for one in found)


# ---- of what kind ----------------------------------------------------------------------------------------------


def _kinds(context: Context, found: Sequence[Apart]) -> list[tuple[Apart, Kind]]:
    twins = _twins(context, found)
    return [(one, _exchanged(one, twins) or _compared(context, one) or _unseen(context, one)) for one in found]


def _twins(context: Context, found: Sequence[Apart]) -> dict[str, str]:
    """Of parameters that differ, those that hold another trained parameter's numbers, and whose."""
    trained = context.params[0]
    known: dict[tuple[str, str], str] = {}
    for name, row in trained.items():
        known[str(row["dtype"]), str(row["digest"])] = name
    apart = {one.name: one for one in found}
    for one in found:
        if one.was is not None and one.served["dtype"] != one.trained["dtype"]:
            known[str(one.served["dtype"]), digest_as(one.was, str(one.served["dtype"])) or ""] = one.name
    twins = {}
    for name, one in apart.items():
        digest = str(one.served["digest"])
        other = known.get((str(one.served["dtype"]), digest)) if digest else None
        if other is not None and other != name:
            twins[name] = other
    return twins


def _exchanged(one: Apart, twins: dict[str, str]) -> Kind | None:
    other = twins.get(one.name)
    if other is None:
        return None
    if twins.get(other) == one.name:
        pair = sorted((one.name, other))
        return Kind(f"exchanged {pair}", f"{pair[0]} and {pair[1]} are exchanged", float("nan"), "exchange them")
    return Kind("another parameter", f"holds the trained {other}", float("nan"), f"store {one.name} itself there")


def _compared(context: Context, one: Apart) -> Kind | None:
    """By the tensors of both folders."""
    if one.was is None or one.held is None or not one.was.is_float:
        return None
    kind = kind_of(
        one.was,
        one.held,
        head=_head(context, one.name),
        parts=_parts(context, one.name),
        part="layer's block" if one.name == "fc.weight" else "head",
    )
    if kind is not None and one.name == "lm_head.weight" and kind.name == "rows moved":
        return _head_rows(context, kind)
    return kind


def _head_rows(context: Context, kind: Kind) -> Kind:
    """Rows of the head stand for draft ids: d2t must have moved with them."""
    trained, served = (side.get("d2t") for side in context.params)
    moved = trained is not None and served is not None and trained["digest"] != served["digest"]
    words = f"{kind.words} (d2t {'is another one too' if moved else 'was not moved with them'})"
    return replace(kind, words=words, back="store its rows in the order of d2t")


def _head(context: Context, name: str) -> int | None:
    """Rows of one head in a projection of heads, None for another tensor."""
    form, found = context.form, re.search(r"self_attn\.(\w+)_proj\.weight$", name)
    if form is None or found is None:
        return None
    latent = form.latent
    if latent is None:
        return form.head_dim if found.group(1) in ("q", "k", "v") else None
    return {"q_b": latent.nope + form.head_dim, "kv_b": latent.nope + latent.value}.get(found.group(1))


def _parts(context: Context, name: str) -> int:
    form = context.form
    if form is None:
        return 1
    if name == "fc.weight":
        return len(form.layer_ids or ()) or 1
    return form.heads if name.endswith("o_proj.weight") else 1


def _unseen(context: Context, one: Apart) -> Kind:
    """Where the tensor that was loaded is not there: by digests of what the trained one may have become, then by what
    the server computed with it.
    """
    found = _by_digest(context, one) or _by_replay(context, one)
    if found is not None:
        return found
    norms = f"has norm {one.served['norm']:.4g}, trained {one.trained['norm']:.4g}"
    return Kind("not compared", f"{norms}; its tensor is not there to compare", float("nan"))


def _by_digest(context: Context, one: Apart) -> Kind | None:
    if one.was is None or not one.was.is_float or not one.served["digest"] or one.was.nbytes > 64 << 20:
        return None
    dtype = str(one.served["dtype"])
    if dtype not in DTYPES:
        return None
    parts = _parts(context, one.name) if one.name == "fc.weight" else 1
    for words, back, array in _variants(cast(one.was.read(), dtype), parts):
        if digest_of(array) == one.served["digest"]:
            return Kind(words, words, float("nan"), back)
    return None


def _variants(whole: Real, parts: int) -> Iterator[tuple[str, str, Real]]:
    yield "has the other sign in every element", "negate it", -whole
    if whole.ndim == 2 and whole.shape[0] == whole.shape[1]:
        yield "is the trained one transposed", "transpose it", whole.T
    if whole.ndim == 2 and 1 < parts <= MOST_PARTS and whole.shape[1] % parts == 0:
        blocks = np.split(whole, parts, axis=1)
        for order in permutations(range(parts)):
            if order != tuple(range(parts)):
                said = ", ".join(map(str, order))
                words = f"has the trained columns at other places: the layers' blocks in the order {said}"
                yield (
                    words,
                    "store its columns in the trained order",
                    np.concatenate([blocks[k] for k in order], axis=1),
                )


def _by_replay(context: Context, one: Apart) -> Kind | None:
    """By the outputs that the server recorded, channel by channel, against those the trained tensor makes."""
    site = site_of_parameter(one.name)
    found = context.replay.recompute(site, 0) if context.replay is not None and site else None
    if not isinstance(found, Recomputed) or context.replay is None or not site:
        return None
    x, y = (side[:, :].astype(np.float64) for side in (found.expected, found.recorded))
    stored = UNIT[DTYPE_NAMES[one.was.dtype]] if one.was is not None and one.was.is_float else 0.0
    # the weights were changed, and then rounded to the dtype they are stored in
    allowed = max(2 * context.replay.allowed(site)["channel_median"], 0.6 * stored)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (x * y).sum(axis=0) / (x * x).sum(axis=0)
        left = np.sqrt(((y - slope * x) ** 2).sum(axis=0) / (y * y).sum(axis=0))
    # of outputs that are all zero nothing is left to compare
    if np.isfinite(slope).all() and np.isfinite(left).any() and np.nanmedian(left) <= allowed:
        common = float(np.median(slope))
        odd = np.flatnonzero(np.abs(slope - common) > 2 * allowed * abs(common))
        if not len(odd) and abs(common - 1) > allowed:
            words = f"acts as {common:.4g} x the trained one (by what the server computed with it)"
            return Kind("scaled", words, abs(common - 1), f"divide it by {common:.4g}")
        if 0 < len(odd) <= 0.1 * len(slope):
            which = f"{len(odd)} of {len(slope)} channels ({', '.join(str(int(found.channels[k])) for k in odd[:6])})"
            words = f"acts as the trained one but in {which}, the first {slope[odd[0]]:.4g} x as large"
            return Kind("some rows", words, float("nan"))
    if found.expected.shape[1] == context.replay.recorded.width(site):
        place, error = match_channels(y, x, allowed)
        if float(np.quantile(error, 0.95)) <= 4 * allowed and (place != np.arange(len(place))).any():
            words = f"acts as the trained one with rows at other places: {order_words(place, _head(context, one.name))}"
            return Kind("rows moved", words, float("nan"), "store its rows in the trained order")
    return None


# ---- in words --------------------------------------------------------------------------------------------------


def _grouped(kinds: Sequence[tuple[Apart, Kind]]) -> list[str]:
    groups: dict[str, list[tuple[Apart, Kind]]] = {}
    for one, kind in kinds:
        groups.setdefault(kind.name, []).append((one, kind))
    said = [_said(group, len(kinds)) for group in sorted(groups.values(), key=len, reverse=True)]
    return said[:_GROUPS] + ([f"and {len(said) - _GROUPS} more kinds"] if len(said) > _GROUPS else [])


def _said(group: Sequence[tuple[Apart, Kind]], of: int) -> str:
    one, kind = group[0]
    if kind.name.startswith("exchanged "):
        return kind.words
    errors = [(found.error, each.name) for each, found in group if np.isfinite(found.error)]
    if len(group) == 1:
        far = f" (relative difference {kind.error:.2g})" if np.isfinite(kind.error) else ""
        return f"{one.name} {kind.words}{far}"
    which = "they" if len(group) == of else f"{len(group)} ({clipped((each.name for each, _ in group), 3)})"
    verb = {"is": "are", "has": "have", "lies": "lie", "holds": "hold", "differs": "differ", "acts": "act"}
    first, _, rest = kind.words.partition(" ")
    words = f"{verb.get(first, first)} {rest.replace('the trained one ', 'the trained ones ')}"
    if any(found.words != kind.words for _, found in group):
        words = f"differ alike ({kind.name}; {one.name} {kind.words})"
    text = f"{which} {words}"
    if errors:
        (low, a), (high, b) = min(errors), max(errors)
        text += f" (relative difference {low:.2g}, {a}, to {high:.2g}, {b})"
    return text


def _fix(context: Context, kinds: Sequence[tuple[Apart, Kind]]) -> str:
    backs = []
    for one, kind in kinds:
        if kind.back is not None:
            what = kind.words.removesuffix(" are exchanged") if kind.name.startswith("exchanged ") else one.name
            text = kind.back.replace("them", what) if kind.name.startswith("exchanged ") else f"{one.name}: {kind.back}"
            backs.append(text)
    backs = list(dict.fromkeys(backs))
    trained = f" ({context.train_path})" if context.train_path is not None else ""
    whole = f"deploy the trained checkpoint{trained}, or record the training side with the draft that is deployed"
    if not backs:
        return whole
    some = len(backs) < len({kind.name if kind.name.startswith("exchanged ") else one.name for one, kind in kinds})
    text = f"in the deployed checkpoint, {clipped(backs, 3).replace(', ', '; ') if len(backs) > 1 else backs[0]}"
    return f"{text}; {whole}" if some else text


CAUSE = Cause(
    "weights-differ",
    "Anything from nothing to an accept length of 1, by how far they are from the trained ones.",
    "Parameters as loaded held against the training's by their digests, and the tensors of both folders: scaled, "
    "shifted, rows or columns moved, exchanged, transposed, quantised, of low rank, or of another state of the "
    "training. Where the deployed folder is gone, what the server computed with them.",
    "Deploy the checkpoint that was trained; the verdict says which tensors differ and what brings them back.",
    ("fc.out", "layer.0.attn.q", "layer.0.attn.out", "layer.0.mlp.gate", "layer.0.mlp.out", "norm", "logits"),
    check,
    last=True,
)
