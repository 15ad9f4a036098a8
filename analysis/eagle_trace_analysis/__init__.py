"""Analysis of two traces: line them up, compare them site by site, name the first place where they part.

>>> result = diff(open_trace("train.trace"), open_trace("serve.trace"))
>>> result.verdict
'diverged'
>>> result.first_divergence.site
'fused'
"""

from eagle_trace_analysis.align import Alignment, align
from eagle_trace_analysis.diff import diff
from eagle_trace_analysis.metrics import IdMetrics, Metrics
from eagle_trace_analysis.pairs import Coverage, Pairs
from eagle_trace_analysis.result import AcceptLength, Diff, Divergence, Note, RowKey, SiteResult
from eagle_trace_analysis.tolerance import Tolerance, Tolerances

__all__ = [
    "AcceptLength",
    "Alignment",
    "Coverage",
    "Diff",
    "Divergence",
    "IdMetrics",
    "Metrics",
    "Note",
    "Pairs",
    "RowKey",
    "SiteResult",
    "Tolerance",
    "Tolerances",
    "align",
    "diff",
]
