"""How a trace shows itself in a notebook: metadata only, so that it costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_trace.printable import html_text

if TYPE_CHECKING:
    from eagle_trace.reader import Trace

_LISTED = 12
_CELL = "text-align:left;padding:2px 14px 2px 0"


def trace_html(trace: Trace) -> str:
    """A trace as a small table: side, host, level, rows, sites."""
    manifest = trace.manifest
    counts = {name: trace.table_rows(name) for name in ("rows", "rounds")} | {"prompts": len(trace.prompts)}
    sites = trace.sites
    listed = ", ".join(sites[:_LISTED]) + (f" and {len(sites) - _LISTED} more" if len(sites) > _LISTED else "")
    size = sum(facts["bytes"] for facts in trace.files.values())
    facts = {
        "recorded": f"{manifest.side} side, by {manifest.host}, {manifest.dtype or '?'} on {manifest.device or '?'}",
        "level": manifest.level + ("" if trace.sealed else " (not finished)"),
        "holds": f"{counts['rows']} rows of {counts['prompts']} prompts, "
        f"{counts['rounds']} verify rounds, {size / 1e6:.1f} MB",
        "sites": f"{len(sites)}: {listed}",
        "draft": str(manifest.draft.get("path", "not known")),
        "created": manifest.created,
        "ended": manifest.ended_early or "",
    }
    rows = "".join(
        f'<tr><th style="{_CELL}">{name}</th><td style="{_CELL}">{html_text(words)}</td></tr>'
        for name, words in facts.items()
        if words
    )
    return f"<div><b>Trace</b> <code>{html_text(str(trace.path))}</code><table>{rows}</table></div>"
