"""Parameters that did not arrive: dropped for their name, or never shipped."""

from __future__ import annotations

from dataclasses import replace

from eagle_trace.sites import site_of_parameter
from eagle_trace_analysis.causes.base import Cause, Outcome, clipped, confirmed, not_tested, ruled_out
from eagle_trace_analysis.checkpoint.quantised import modules
from eagle_trace_analysis.comparison.params import same
from eagle_trace_analysis.evidence.context import Context

#: what causes of their own speak about
ELSEWHERE = ("d2t", "t2d", "embed_tokens.weight", "input_norm.", "fc_norm.")


def not_loaded(context: Context) -> list[str]:
    """Parameters of the training that the server holds with other numbers and did not find in its checkpoint, or
    does not hold at all; those of other causes left out.
    """
    trained, served = context.params
    tied = bool(context.served.get("tie_word_embeddings"))
    from_target = context.other_algorithm is not None or (
        "draft_vocab_size" in context.served and context.served["draft_vocab_size"] is None
    )
    # a matrix that was quantised before it was deployed has other names and other numbers
    quantised = {
        f"{module}.weight"
        for module, endings in modules(context.serve_draft.tensors if context.serve_draft else ()).items()
        if endings != {"weight"}
    }
    names = []
    for name, row in trained.items():
        if name in quantised:
            continue
        if name.startswith(ELSEWHERE) or (name == "lm_head.weight" and (tied or from_target)):
            continue
        theirs = served.get(name)
        if theirs is None or (not theirs["in_checkpoint"] and not same(theirs, row)):
            names.append(name)
    return names


def dropped_for(context: Context, name: str) -> str | None:
    """A stored tensor that was dropped and that `name` may be: same ending and shape, or the one of its shape."""
    dropped = [str(key) for key in context.serve.manifest.draft.get("dropped_keys", [])]
    stored = context.serve_draft.tensors if context.serve_draft else {}
    shape = list(context.params[0][name]["shape"])
    ends = [".".join(name.split(".")[at:]) for at in range(len(name.split(".")))]
    for key in dropped:
        held = stored.get(key)
        fused = [old for old, parts in context.engine.STACKED.items() if any(part in name for part in parts)]
        if context.engine.canonical_name(key) == name or any(one in key for one in fused):
            return key
        if held is not None and list(held.shape) != shape:
            continue
        if any(key.endswith(end) for end in ends[:-1]) or (len(ends) == 1 and key.endswith(name)):
            return key
    # no name to go by: the one dropped tensor of this very shape, if nothing else of that shape is missing
    alike = [key for key in dropped if key in stored and list(stored[key].shape) == shape]
    lacking = [one for one in not_loaded(context) if list(context.params[0][one]["shape"]) == shape]
    return alike[0] if len(alike) == 1 and lacking == [name] else None


def shown(context: Context, names: list[str]) -> tuple[str, str] | None:
    """Of parameters that are not the trained ones, the first whose site differs, and that site."""
    placed = [(site, name) for name in names if (site := site_of_parameter(name)) is not None]
    order = {result.site: at for at, result in enumerate(context.diff.sites) if result.step == 0}
    for site, name in sorted(placed, key=lambda item: order.get(item[0], len(order))):
        if any(one.verdict == "faulty" for one in context.nodes([site])) or context.divergence(site) is not None:
            return site, name
    return None


def check_dropped(context: Context) -> Outcome:
    """Keys that the loader skips without a word."""
    return _check(context, dropped=True)


def check_missing(context: Context) -> Outcome:
    """Parameters left at their random start because nobody shipped them."""
    return _check(context, dropped=False)


def _check(context: Context, *, dropped: bool) -> Outcome:
    trained, served = context.params
    if not trained or not served:
        side = "train" if not trained else "serve"
        return not_tested(f"the {side} trace holds no parameters", f"record the {side} side with this version")
    lost = not_loaded(context)
    mine = [name for name in lost if (dropped_for(context, name) is not None) == dropped]
    if not mine:
        return ruled_out(_all_there(context, lost, dropped=dropped))
    seen = shown(context, mine)
    if seen is None:
        return ruled_out(f"{clipped(mine)} not loaded, but no site that uses them differs")
    site, name = seen
    absent = name not in served
    state = "the server holds none" if absent else (
        f"as loaded its norm is {served[name]['norm']:.4g}, trained {trained[name]['norm']:.4g}"
    )  # fmt: skip
    if dropped:
        key = dropped_for(context, name)
        evidence = f"{len(mine)} of {len(trained)} parameters were dropped on loading, first {key} ({name}; {state})"
        fix = context.fix("weight-names", f"rename {key} to {name}")
        return replace(confirmed(f"{evidence}; {site} differs", fix, site), explains=_sites(mine))
    evidence = f"{len(mine)} of {len(trained)} parameters are not in the deployed checkpoint: {clipped(mine)} ({state})"
    fix = context.fix("weights-present", f"ship {clipped(mine)} (`eagle-trace export` does)")
    return replace(confirmed(f"{evidence}; {site} differs", fix, site), explains=_sites(mine))


def _sites(names: list[str]) -> frozenset[str]:
    return frozenset(site for name in names if (site := site_of_parameter(name)) is not None)


def _all_there(context: Context, lost: list[str], *, dropped: bool) -> str:
    trained, served = context.params
    common = [name for name in trained if name in served and not name.startswith("t2d")]
    equal = sum(same(served[name], trained[name]) for name in common)
    keys = context.serve.manifest.draft.get("dropped_keys", [])
    text = f"{equal} of {len(common)} parameters as loaded equal the trained ones"
    if dropped:
        noun = "key" if len(keys) == 1 else "keys"
        return f"{text}, {len(keys)} {noun} dropped" + (f" ({clipped(keys)})" if keys else "")
    found = sum(bool(served[name]["in_checkpoint"]) for name in common)
    return f"{text}, {found} found in the deployed checkpoint" + (
        f"; {clipped(lost)} dropped for the name" if lost else ""
    )


CAUSES = (
    Cause(
        "weights-dropped",
        "Low accept length that hardly moves when other faults are fixed (0.20 becomes 0.21 after one rename).",
        "Parameters as loaded (params.parquet) held against the training's, with the keys the engine dropped; the site "
        "that uses the first of them differs.",
        "Rename the keys to what the engine loads (`eagle-trace check` lists both).",
        ("layer.0.hidden_norm", "layer.0.attn.q"),
        check_dropped,
    ),
    Cause(
        "weights-missing",
        "Accept length 1.00.",
        "Parameters as loaded held against the training's: not in the deployed checkpoint, other numbers than trained; "
        "the site that uses them differs.",
        "Ship the tensors.",
        ("logits",),
        check_missing,
    ),
)
