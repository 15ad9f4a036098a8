"""Families of drafts: which sites each has, and how they depend on each other."""

from eagle_trace.families.base import Family, Site
from eagle_trace.families.eagle3 import EAGLE3

#: the first one that knows all names of a trace is taken
FAMILIES: tuple[Family, ...] = (EAGLE3,)

__all__ = ["EAGLE3", "FAMILIES", "Family", "Site"]
