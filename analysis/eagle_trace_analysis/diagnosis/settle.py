"""One fault, one cause: which of the causes that were confirmed stand, and what none of them explains.

A cause that was proved by a counterfactual explains the steps that its changed replay reproduces, and no others. So
two causes that reproduce the same steps are one fault told twice: the one that explains more, or is what the deployed
folder says, stands; of the other the report says that it would do equally well here. And a step that a confirmed cause
makes better but not right is still not explained: under all changes together it must be within what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from eagle_trace.sites import site_of_parameter
from eagle_trace_analysis.causes import REGISTRY, Outcome
from eagle_trace_analysis.causes.base import not_tested
from eagle_trace_analysis.comparison.params import same
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.replay import Measured, Replay, Replayed
from eagle_trace_analysis.replay.weights import Weights

Node = tuple[str, int]


def settle(context: Context, replayed: Sequence[Replayed]) -> dict[str, Outcome]:
    """Outcomes by cause, of which those confirmed explain no step twice.

    The cause that explains most steps is taken first, and of equals what the deployed folder says; a cause whose steps
    are all explained by then is not confirmed. A cause whose proof is not a counterfactual always stands, and so do two
    that the deployed folder says and of which neither explains a step without the other.

    Args:
        context: the pair, with the outcome of every cause.
        replayed: every step of the serve side, recomputed as trained.
    """
    faulty = [one for one in replayed if one.verdict == "faulty" and not context.agrees(one.site, one.step)]
    settled: dict[str, Outcome] = dict(context.outcomes)
    open_: dict[str, set[Node]] = {}
    explained: dict[Node, str] = {}
    for name, one in settled.items():
        if one.verdict == "confirmed":
            sites = _sites_of_fact(name, one)
            nodes = {(node.site, node.step) for node in faulty if _plain(node.site) in sites or node.site in sites}
            if one.changed is None or one.explains is not None:
                explained |= dict.fromkeys(nodes, name)
            if one.changed is not None:
                reproduced = {(n.site, n.step) for n in faulty if _reproduces(one.changed, n)}
                open_[name] = reproduced
                if one.explains is not None:
                    explained |= dict.fromkeys(reproduced, name)
                    del open_[name]
    order = {name: at for at, name in enumerate(REGISTRY)}
    while open_:
        name = max(open_, key=lambda one: (len(open_[one] - set(explained)), settled[one].deployed, -order[one]))
        nodes = open_.pop(name)
        if nodes - set(explained):
            explained |= {node: name for node in nodes if node not in explained}
        elif nodes and not (settled[name].together and settled[name].deployed):
            winner = explained[min(nodes, key=lambda node: node[1])]
            settled[name] = _equally(name, settled[name], winner, settled[winner])
    return settled


def _equally(name: str, loser: Outcome, winner: str, best: Outcome) -> Outcome:
    more = "which is what the deployed folder says" if best.deployed else "which explains other steps too"
    if best.deployed == loser.deployed:
        more = "which explains the same steps"
    return not_tested(
        f"equally good here: {loser.words or name} reproduces {loser.site} as well as {winner} does, {more}",
        f"mend {winner} first, and record again",
    )


def _reproduces(replay: Replay, node: Replayed) -> bool:
    found = replay.measure(node.site, node.step, node.train)
    return isinstance(found, Measured) and found.reproduced


def _plain(site: str) -> str:
    return "layer.0." + site.split(".", 2)[2] if site.startswith("layer.") else site


def _sites_of_fact(name: str, one: Outcome) -> set[str]:
    if one.explains is not None:
        return set(one.explains)
    return set() if one.changed is not None else {*REGISTRY[name].sites, one.site or ""}


# ---- what is left ----------------------------------------------------------------------------------------------


def unexplained(context: Context, settled: dict[str, Outcome], replayed: Sequence[Replayed]) -> tuple[str, ...]:
    """Faulty steps that no confirmed cause brings down to rounding, and first divergences without any cause."""
    found = {name: one for name, one in settled.items() if one.verdict == "confirmed"}
    named = set().union(*(_sites_of_fact(name, one) for name, one in found.items()))
    if context.other_algorithm is not None:
        named.add("logits")
    changes = [one for one in found.values() if one.changed is not None]
    whole = combined(context.replay, [one.changed for one in changes if one.changed]) if context.replay else None
    said = []
    left: dict[str, Replayed] = {}
    for node in replayed:
        if node.verdict != "faulty" or node.site in left or context.agrees(node.site, node.step):
            continue
        if node.site in named or _plain(node.site) in named:
            continue
        if not (changes and whole is not None and _reproduces(whole, node)):
            left[node.site] = node
    for site, node in left.items():
        figures = node.serve.words() if node.serve else ""
        text = f"{site} is not computed as trained ({figures}){_other_weights(context, site)}"
        nearer = whole.measure(site, node.step, node.train) if changes and whole is not None else None
        if isinstance(nearer, Measured) and node.serve is not None and nearer.ratio < 0.9 * node.serve.ratio:
            what = " and ".join(one.words for one in changes if one.words)
            text += (
                f"; with {what} nearer, and not right ({nearer.words()}, {nearer.allowed['rho_median']:.1e} allowed)"
            )
        said.append(text)
    return (*said, *_first_parts(context, found, said))


#: parts that no step recomputes: what the draft is given, and what becomes of its logits
_GIVEN = ("token", "position", "fused", "target.hidden.", "topk.")


def _first_parts(context: Context, found: dict[str, Outcome], said: Sequence[str]) -> list[str]:
    """First divergences that no confirmed cause is about."""
    if not found:
        first = context.diff.first_divergence
        return [f"{first.site}, step {first.step}: {first.why}"] if first is not None and not said else []
    about = [site for name, one in found.items() for site in (*REGISTRY[name].sites, one.site or "")]
    kinds = {next((part for part in _GIVEN if site.startswith(part)), "") for site in about}
    if "logits" in about or context.other_algorithm is not None:
        kinds.add("topk.")
    # tokens, positions and features depend on each other: a cause about one of them speaks for all
    given = set(_GIVEN[:-1])
    left = [
        one
        for one in context.diff.frontier
        if (part := next((part for part in _GIVEN if one.site.startswith(part)), None)) is not None
        and part not in kinds
        and not (part in given and kinds & given)
    ]
    return [f"{one.site}, step {one.step}: {one.why}" for one in left[:1]]


def combined(base: Replay, changed: Sequence[Replay]) -> Replay:
    """All changes at once: what each changed replay has otherwise than `base`."""
    form: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    weights, view = base.weights, None
    for one in changed:
        for field in fields(one.form):
            if field.name != "rope" and getattr(one.form, field.name) != getattr(base.form, field.name):
                form[field.name] = getattr(one.form, field.name)
        for field in fields(one.form.rope):
            if getattr(one.form.rope, field.name) != getattr(base.form.rope, field.name):
                rope[field.name] = getattr(one.form.rope, field.name)
        weights = Weights(
            {
                **weights.tensors,
                **{n: t for n, t in one.weights.tensors.items() if t is not base.weights.tensors.get(n)},
            },
            weights.dtype,
            {**weights.instead, **one.weights.instead},
            {**weights.edits, **one.weights.edits},
        )
        view = one.view if one.view is not base.view and one.view_given else view
    if rope:
        form["rope"] = replace(base.form.rope, **rope)
    return base.varied(weights=weights, view=view, **form)


def _other_weights(context: Context, site: str) -> str:
    trained, served = context.params
    names = [
        name
        for name in trained
        if site_of_parameter(name) == site and name in served and not same(served[name], trained[name])
    ]
    if not names:
        return "; its weights are the trained ones" if any(site_of_parameter(name) == site for name in trained) else ""
    one = names[0]
    return (
        f"; {one} as loaded is not the trained one (norm {served[one]['norm']:.4g}, trained {trained[one]['norm']:.4g})"
    )
