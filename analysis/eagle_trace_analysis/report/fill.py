"""HTML from the templates of this package: what is filled in becomes text, and every character of it is seen.

Autoescape makes text of whatever a template is given, so that no prompt, name or path can become markup. The exceptions
say ``| safe`` in a template, and hold no word from outside: scripts, style, hashes, JSON in which no element can end.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eagle_trace.printable import printable


def fill(template: str, **values: Any) -> str:
    """The text of a template under ``templates/`` with these values."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("eagle_trace_analysis.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: object) -> object:
    """What a template writes, before it is escaped; its own markup (a macro's, ``| safe``) stays as it is."""
    return value if hasattr(value, "__html__") else printable(value, keep="\n\t")
