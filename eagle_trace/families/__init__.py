"""Families of drafts: which sites each has, and how they depend on each other."""

from eagle_trace.families.base import Family, Site
from eagle_trace.families.eagle3 import EAGLE3
from eagle_trace.families.eagle3_mla import EAGLE3_MLA

#: the first one that knows all names of a trace is taken, where the trace does not say
FAMILIES: tuple[Family, ...] = (EAGLE3, EAGLE3_MLA)

__all__ = ["EAGLE3", "EAGLE3_MLA", "FAMILIES", "Family", "Site"]
