"""The ending of a terminal report: what stands behind its last empty line."""

from __future__ import annotations


def ending_of(text: str) -> list[str]:
    """Lines from the verdict on."""
    return text.rstrip("\n").split("\n\n")[-1].splitlines()
