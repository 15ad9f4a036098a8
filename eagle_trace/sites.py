"""The sites of the draft forward: one list, in forward order, the same names on both sides.

A **site** is a named point of the draft forward. Shapes below are those of one call with T rows: H hidden size of the
draft, G hidden size of the target, n target layers whose hidden states are fed, A = heads x head size, K = key/value
heads x head size, I intermediate size, V draft vocabulary.

The names of the sites inside decoder layer N start with ``layer.N.``. Dataflow is kept beside the names, because the
first divergence is a site that differs while everything it is computed from agrees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["integer", "value"]


@dataclass(frozen=True)
class Site:
    """One named point of the draft forward.

    Attributes:
        name: the site's name (``fc.out``, ``layer.0.attn.q``).
        axes: shape legend of one row, e.g. ``("H",)``; integer sites hold one number a row and have no axes.
        kind: ``integer`` sites are compared exactly, ``value`` sites within a tolerance.
        steps: ``first`` if only the extend row (step 0) has it, ``later`` if only draft steps have it, else ``all``.
        inputs: sites this one is computed from, in the same step.
        carried: sites of the step before that this one is computed from (draft steps only).
        roundings: how many values were rounded to the model's dtype between the sites in `inputs` and this one.
        meaning: one line for people.
    """

    name: str
    axes: tuple[str, ...]
    kind: Kind
    steps: Literal["first", "later", "all"]
    inputs: tuple[str, ...]
    carried: tuple[str, ...] = ()
    roundings: int = 1
    meaning: str = ""


def _before_layers(target_layers: int) -> list[Site]:
    target = [
        Site(
            f"target.hidden.{k}",
            ("G",),
            "value",
            "first",
            ("token",),
            meaning=f"feature {k} taken from the target",
        )
        for k in range(target_layers)
    ]
    names = tuple(site.name for site in target)
    return [
        Site("token", (), "integer", "all", (), meaning="token beside the feature: x[root + 1], or the draft's guess"),
        Site("position", (), "integer", "all", (), meaning="position the row is rotated by"),
        *target,
        Site("fused", ("n*G",), "value", "first", names or ("token",), roundings=0, meaning="features side by side"),
        Site("fc.in", ("n*G",), "value", "first", ("fused",), meaning="what the fc projection receives"),
        Site("fc.out", ("H",), "value", "first", ("fc.in",), meaning="target features projected to the draft's width"),
        Site(
            "hidden", ("H",), "value", "all", ("fc.out", "fused"), carried=("carry",), roundings=0,
            meaning="hidden state entering the first decoder layer: fc.out, or the carry of the step before",
        ),
        Site("embed", ("H",), "value", "all", ("token",), meaning="embedding of the token"),
    ]  # fmt: skip


def _layer(n: int) -> list[Site]:
    at = f"layer.{n}"
    stream = "hidden" if n == 0 else f"layer.{n - 1}.out"
    norms = [
        Site(f"{at}.embed_norm", ("H",), "value", "all", ("embed",), meaning="embedding after input_layernorm"),
        Site(f"{at}.hidden_norm", ("H",), "value", "all", ("hidden",), meaning="hidden state after hidden_norm"),
    ]
    if n > 0:
        norms = [Site(f"{at}.hidden_norm", ("H",), "value", "all", (stream,), meaning="stream after its norm")]
    into = tuple(site.name for site in norms)
    return [
        *norms,
        Site(f"{at}.attn.q", ("A",), "value", "all", into, meaning="queries before rotation"),
        Site(f"{at}.attn.k", ("K",), "value", "all", into, meaning="keys before rotation"),
        Site(f"{at}.attn.v", ("K",), "value", "all", into, meaning="values"),
        Site(f"{at}.attn.q_rope", ("A",), "value", "all", (f"{at}.attn.q", "position"), meaning="rotated queries"),
        Site(f"{at}.attn.k_rope", ("K",), "value", "all", (f"{at}.attn.k", "position"), meaning="rotated keys"),
        Site(
            f"{at}.attn.context", ("A",), "value", "all",
            (f"{at}.attn.q_rope", f"{at}.attn.k_rope", f"{at}.attn.v"),
            carried=(f"{at}.attn.k_rope", f"{at}.attn.v"), roundings=2,
            meaning="attention output before the output projection",
        ),
        Site(f"{at}.attn.out", ("H",), "value", "all", (f"{at}.attn.context",), meaning="attention output projection"),
        Site(
            f"{at}.attn.residual", ("H",), "value", "all", (f"{at}.attn.out", stream),
            meaning="residual stream after attention was added",
        ),
        Site(f"{at}.mlp.norm", ("H",), "value", "all", (f"{at}.attn.residual",), meaning="stream after its norm"),
        Site(f"{at}.mlp.gate", ("I",), "value", "all", (f"{at}.mlp.norm",), meaning="gate projection"),
        Site(f"{at}.mlp.up", ("I",), "value", "all", (f"{at}.mlp.norm",), meaning="up projection"),
        Site(
            f"{at}.mlp.act", ("I",), "value", "all", (f"{at}.mlp.gate", f"{at}.mlp.up"), roundings=2,
            meaning="activation(gate) * up",
        ),
        Site(f"{at}.mlp.out", ("H",), "value", "all", (f"{at}.mlp.act",), meaning="down projection"),
        Site(
            f"{at}.out", ("H",), "value", "all", (f"{at}.mlp.out", f"{at}.attn.residual"),
            meaning="residual stream after the layer",
        ),
    ]  # fmt: skip


def _after_layers(draft_layers: int) -> list[Site]:
    last = f"layer.{draft_layers - 1}.out"
    return [
        Site("norm", ("H",), "value", "all", (last,), meaning="final norm, read by the head"),
        Site(
            "carry",
            ("H",),
            "value",
            "all",
            (last,),
            roundings=0,
            meaning="hidden state handed to the next step",
        ),
        Site("logits", ("V",), "value", "all", ("norm",), meaning="scores over the draft vocabulary"),
        Site("topk.draft_id", (), "integer", "all", ("logits",), meaning="best draft ids"),
        Site("topk.target_id", (), "integer", "all", ("topk.draft_id",), meaning="their target ids, after d2t"),
    ]


def draft_sites(target_layers: int = 3, draft_layers: int = 1) -> list[Site]:
    """All sites of a draft of `draft_layers` decoder layers fed by `target_layers` target layers, in forward order."""
    layers = [site for n in range(draft_layers) for site in _layer(n)]
    return [*_before_layers(target_layers), *layers, *_after_layers(draft_layers)]


def _count(names: Iterable[str], pattern: str) -> int:
    found = [int(match.group(1)) for name in names if (match := re.match(pattern, name))]
    return max(found, default=-1) + 1


def sites_of(names: Sequence[str]) -> list[Site]:
    """The site list of the draft that `names` (from either side) belong to.

    Raises:
        ValueError: a name is no site's.
    """
    sites = draft_sites(_count(names, r"target\.hidden\.(\d+)$"), max(1, _count(names, r"layer\.(\d+)\.")))
    unknown = sorted(set(names) - {site.name for site in sites})
    if unknown:
        raise ValueError(f"not the name of a site: {', '.join(unknown)}")
    return sites


def fused_slices(width: int, target_width: int) -> list[tuple[str, slice]]:
    """Names and columns of the target features inside `fused`, or [] if `width` is one layer or no multiple.

    A single layer's features get no ``target.hidden`` site: there is nothing to split, `fused` itself is the record.
    """
    count, rest = divmod(width, target_width)
    if rest or count < 2:
        return []
    return [(f"target.hidden.{k}", slice(k * target_width, (k + 1) * target_width)) for k in range(count)]
