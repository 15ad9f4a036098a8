"""What a family of drafts is: its sites, in forward order, with everything that is known of each.

A **site** is a named point of the draft forward. Whatever is a fact of a site stands in `Site`, so that no table of
names has to be kept beside it: recorders, tolerances, replay, reports and plots all read it here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["integer", "value"]
Split = Literal["query heads", "key/value heads", "intermediate"]


@dataclass(frozen=True)
class Site:
    """One named point of the draft forward.

    Attributes:
        name: the site's name (``fc.out``, ``layer.0.attn.q``).
        axes: shape legend of one row, e.g. ``("H",)``; integer sites hold one number per row and have no axes.
        kind: ``integer`` sites are compared exactly, ``value`` sites within a tolerance.
        steps: ``first`` if only the extend row (step 0) has it, ``later`` if only draft steps have it, else ``all``.
        inputs: sites this one is computed from, in the same step.
        carried: sites of the step before that this one is computed from (draft steps only).
        roundings: how many values were rounded to the model's dtype between the sites in `inputs` and this one.
        meaning: one line for people.
        parameters: modules whose parameters show here first, by their trained names (``layers.0.self_attn.q_proj``).
        product: whether it is a matrix product, whose error grows with the terms that are added up.
        rotated: whether it was turned by its position.
        kernel_roundings: roundings that a host may do inside the step, between fused operations, beyond `roundings`.
        split_by: what splits it among tensor-parallel ranks; None if every rank holds all of it.
        kept: where a trace keeps it: in ``values`` of its own, as a column of the ``rows``, or in the ``topk`` table.
    """

    name: str
    axes: tuple[str, ...]
    kind: Kind
    steps: Literal["first", "later", "all"]
    inputs: tuple[str, ...]
    carried: tuple[str, ...] = ()
    roundings: int = 1
    meaning: str = ""
    parameters: tuple[str, ...] = ()
    product: bool = False
    rotated: bool = False
    kernel_roundings: int = 1
    split_by: Split | None = None
    kept: Literal["values", "rows", "topk"] = "values"


@dataclass(frozen=True)
class Family:
    """One kind of draft.

    Attributes:
        name: what a manifest and a report call it.
        sites: all sites of a draft with so many target layers and decoder layers, in forward order.
    """

    name: str
    sites: Callable[[int, int], list[Site]]

    def sites_of(self, names: Iterable[str]) -> tuple[list[Site], list[str]]:
        """The sites of the draft that `names` belong to, and the names that are none of them."""
        listed = list(names)
        layers = count(listed, r"target\.hidden\.(\d+)$"), max(1, count(listed, r"layer\.(\d+)\."))
        sites = list(_sites(self, *layers))
        return sites, sorted(set(listed) - {site.name for site in sites})


@lru_cache(maxsize=16)
def _sites(family: Family, target_layers: int, draft_layers: int) -> tuple[Site, ...]:
    return tuple(family.sites(target_layers, draft_layers))


def count(names: Sequence[str], pattern: str) -> int:
    """One more than the largest number that `pattern` finds at the start of a name; 0 if it finds none."""
    found = [int(match.group(1)) for name in names if (match := re.match(pattern, name))]
    return max(found, default=-1) + 1
