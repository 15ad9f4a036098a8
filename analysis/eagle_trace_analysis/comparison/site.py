"""How a site is compared: by its values, its sketches or its statistics, whichever both sides hold."""

from __future__ import annotations

from eagle_trace.reader import Trace
from eagle_trace_analysis.comparison.compare import SiteFold, ValuesFold, WholeSite, compare_statistics
from eagle_trace_analysis.comparison.sketch import compare_sketches, has_sketch
from eagle_trace_analysis.pairing.pairs import Pairs


def site_fold(train: Trace, serve: Trace, site: str, pairs: Pairs) -> SiteFold:
    """A site ready to be compared, pair by pair; both sides hold rows of it, all of one width."""
    data = [one for trace in (train, serve) for one in trace.site_data(site)]
    if all(one.has_values for one in data):
        return ValuesFold(train, serve, site, pairs)
    sketched = all(has_sketch(one) for one in data)
    return WholeSite(train, serve, site, pairs, compare_sketches if sketched else compare_statistics)
