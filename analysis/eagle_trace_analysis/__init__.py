"""Analysis of two traces: line them up, compare them site by site, name the first place where they part.

>>> result = diff(open_trace("train.trace"), open_trace("serve.trace"))
>>> result.verdict
'diverged'
>>> result.first_divergence.site
'fused'
"""

from collections.abc import Callable
from typing import Any

from eagle_trace_analysis.comparison.diff import diff
from eagle_trace_analysis.comparison.metrics import IdMetrics, Metrics
from eagle_trace_analysis.comparison.result import AcceptLength, Diff, Divergence, Note, RowKey, SiteResult
from eagle_trace_analysis.comparison.tolerance import Tolerance, Tolerances
from eagle_trace_analysis.pairing.align import Alignment, align
from eagle_trace_analysis.pairing.pairs import Coverage, Pairs
from eagle_trace_analysis.shown import show_as

__all__ = [
    "AcceptLength",
    "Alignment",
    "Checkpoints",
    "Coverage",
    "Diagnosis",
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
    "check",
    "diagnosed",
    "diff",
]

#: what is imported when it is asked for: a comparison alone needs none of it
_LATER = {
    "Checkpoints": "eagle_trace_analysis.evidence.context",
    "Diagnosis": "eagle_trace_analysis.diagnosis.diagnose",
    "check": "eagle_trace_analysis.checkpoint.check",
    "diagnosed": "eagle_trace_analysis.diagnosis.diagnose",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)


def _shown(name: str) -> Callable[[Any], str]:
    def display(result: Any) -> str:
        from eagle_trace_analysis.report import notebook

        return str(getattr(notebook, name)(result))

    return display


show_as("Diff", _shown("diff_html"))
show_as("Diagnosis", _shown("diagnosis_html"))
