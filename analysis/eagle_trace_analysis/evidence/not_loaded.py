"""Parameters that did not arrive: which, the stored tensor that was dropped in their place, and where that shows."""

from __future__ import annotations

from collections.abc import Iterable

from eagle_trace.sites import site_of_parameter
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


def sites_of(names: Iterable[str]) -> frozenset[str]:
    """Sites that parameters are used at."""
    return frozenset(site for name in names if (site := site_of_parameter(name)) is not None)


def state_words(context: Context, name: str) -> str:
    """What the server holds of a parameter, in words."""
    trained, served = context.params
    if name not in served:
        return "the server holds none"
    return f"as loaded its norm is {served[name]['norm']:.4g}, trained {trained[name]['norm']:.4g}"


def equal_words(context: Context) -> str:
    """How many parameters as loaded are the trained ones, in words."""
    trained, served = context.params
    common = [name for name in trained if name in served and not name.startswith("t2d")]
    equal = sum(same(served[name], trained[name]) for name in common)
    return f"{equal} of {len(common)} parameters as loaded equal the trained ones"
