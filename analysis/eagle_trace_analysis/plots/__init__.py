"""Plots of a finished diff, for notebooks and the HTML report; each function returns a plotly figure.

>>> from eagle_trace_analysis import plots
>>> plots.ladder(result)

`ladder`, `by_step` and `accept_length` draw what the diff holds. `error_map`, `logits`, `drafted`, `weights` and
`features` read the traces again, from the paths that the diff remembers or as `train` and `serve` are passed in.
Needs plotly (the extra ``notebook``).
"""

from eagle_trace_analysis.plots.acceptance import accept_length
from eagle_trace_analysis.plots.error_map import error_map
from eagle_trace_analysis.plots.features import features
from eagle_trace_analysis.plots.ladder import ladder
from eagle_trace_analysis.plots.output import drafted, logits
from eagle_trace_analysis.plots.steps import by_step
from eagle_trace_analysis.plots.weights import weights

__all__ = ["accept_length", "by_step", "drafted", "error_map", "features", "ladder", "logits", "weights"]
