"""The sites of the draft forward: the same names on both sides, in forward order, whatever the family of the draft.

The lists themselves are in `eagle_trace.families`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from eagle_trace.families import EAGLE3, FAMILIES, Family, Site
from eagle_trace.families.base import Kind

__all__ = [
    "ROW_SITES", "TOPK_SITES", "Kind", "Site", "draft_sites", "family_of", "forward_order", "forward_place",
    "fused_slices", "known_names", "known_site", "known_sites", "site_of_parameter", "sites_of",
]  # fmt: skip

#: layers of the largest target and draft whose sites are listed by name
_MOST_LAYERS = 64


def draft_sites(target_layers: int = 3, draft_layers: int = 1, family: Family = EAGLE3) -> list[Site]:
    """All sites of a draft of `draft_layers` decoder layers fed by `target_layers` target layers, in forward order."""
    return family.sites(target_layers, draft_layers)


#: sites that are columns of rows.parquet, and those of topk.parquet
ROW_SITES = tuple(site.name for site in draft_sites() if site.kept == "rows")
TOPK_SITES = tuple(site.name for site in draft_sites() if site.kept == "topk")


def family_of(names: Sequence[str], said: object = None) -> Family:
    """The family of the draft that sites called `names` belong to; the first one if none knows them all.

    Args:
        names: names of its sites, some or all.
        said: the family's name as a manifest has it (`draft.family`): decides, if it is a family's name.
    """
    named = next((family for family in FAMILIES if family.name == said), None)
    return named or next((family for family in FAMILIES if not family.sites_of(names)[1]), FAMILIES[0])


def sites_of(names: Sequence[str], family: Family | None = None) -> list[Site]:
    """The site list of the draft that `names` (from either side) belong to, of the family given or of theirs.

    Raises:
        ValueError: a name is no site's.
    """
    sites, unknown = (family or family_of(names)).sites_of(names)
    if unknown:
        raise ValueError(f"not the name of a site: {', '.join(unknown)}")
    return sites


@cache
def known_sites() -> tuple[Site, ...]:
    """All sites there are, of whatever family, in forward order; of a name that several have, the first one's.

    What only a later family has stands behind the site that it follows there.
    """
    merged: list[Site] = []
    for family in FAMILIES:
        names = {site.name for site in merged}
        news: dict[str, list[Site]] = {}
        before = ""
        for site in family.sites(_MOST_LAYERS, _MOST_LAYERS):
            if site.name in names:
                before = site.name
            else:
                news.setdefault(before, []).append(site)
        merged = [*news.get("", ()), *(one for site in merged for one in (site, *news.get(site.name, ())))]
    return tuple(merged)


@cache
def _known() -> dict[str, tuple[int, Site]]:
    return {site.name: (place, site) for place, site in enumerate(known_sites())}


def known_site(name: str) -> Site | None:
    """The site of a name, of whatever family; None if no family has one of that name."""
    found = _known().get(name)
    return None if found is None else found[1]


def forward_order(names: Iterable[str]) -> list[str]:
    """Names of sites in forward order, each once; names that are no site's come last, by the alphabet."""
    return sorted(set(names), key=lambda name: (forward_place(name), name))


def forward_place(name: str) -> int:
    """The place of a site in forward order, counted through all sites there are; of an unknown name, behind them."""
    found = _known().get(name)
    return len(_known()) if found is None else found[0]


def known_names() -> list[str]:
    """The names of all sites, in forward order."""
    return list(_known())


@cache
def _sites_by_parameter() -> dict[str, str]:
    # of one layer behind the first and of one feature: the others are like them
    lists = [family.sites(1, 2) for family in reversed(FAMILIES)]
    return {module: site.name for sites in lists for site in sites for module in site.parameters}


def site_of_parameter(name: str) -> str | None:
    """The site that a parameter shows at first, by the parameter's trained name; None if it is no site's."""
    module = re.sub(r"\.(weight|bias)$", "", name)
    found = re.match(r"layers\.(\d+)\.(.+)$", module)
    if found is None:
        return _sites_by_parameter().get(re.sub(r"^fc_norm\.\d+$", "fc_norm.0", module))
    layer = found.group(1)
    site = _sites_by_parameter().get(f"layers.{min(int(layer), 1)}.{found.group(2)}")
    return None if site is None else re.sub(r"^layer\.\d+\.", f"layer.{layer}.", site)


def fused_slices(width: int, target_width: int) -> list[tuple[str, slice]]:
    """Names and columns of the target features inside `fused`, or [] if `width` is one layer or no multiple.

    A single layer's features get no ``target.hidden`` site: there is nothing to split, `fused` itself is the record.
    """
    count, rest = divmod(width, target_width)
    if rest or count < 2:
        return []
    return [(f"target.hidden.{k}", slice(k * target_width, (k + 1) * target_width)) for k in range(count)]
