"""JSON that every reader takes: a number that is not finite is the string NaN, Infinity or -Infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_trace.printable import json_text


def strict(value: Any) -> Any:
    """Plain data that strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [strict(one) for one in value]
    return value


def strict_text(data: Mapping[str, Any]) -> str:
    """Data as text, every character of it seen, ending in a newline."""
    return json_text(json.dumps(strict(data), indent=1, ensure_ascii=False, allow_nan=False)) + "\n"
