"""What is not installed: how to install it. eagle-trace is installed from a checkout, as no package index has it."""

from __future__ import annotations

import shlex
from pathlib import Path

#: where this code lies in a checkout, beside its pyproject.toml
CHECKOUT = Path(__file__).parents[1]


def way_to(extra: str = "") -> str:
    """How to install eagle-trace with an extra of its: a command where this is a checkout, else in words."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{CHECKOUT}[{extra}]' if extra else str(CHECKOUT))}"
    return f"install eagle-trace with its extra `{extra}`" if extra else "install eagle-trace"
