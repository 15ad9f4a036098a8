"""Analysis of two traces: line them up, compare them site by site, name the first place where they part.

>>> result = diff(open_trace("train.trace"), open_trace("serve.trace"))
>>> result.verdict
'diverged'
>>> result.first_divergence.site
'fused'
"""

from eagle_trace_analysis.comparison.diff import diff
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import AcceptLength, Diff, Divergence, Note, RowKey, SiteResult
from eagle_trace_analysis.comparison.tolerance import Tolerance, Tolerances
from eagle_trace_analysis.pairing.align import Alignment, align
from eagle_trace_analysis.pairing.pairs import Coverage, Pairs

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
