"""What `show` found, for people."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle_trace.printable import printable
from eagle_trace.terminal import PlainConsole
from eagle_trace_analysis.report.lines import hang

WIDTH = 80
_ELEMENTS = 8


def render_summary(data: Mapping[str, Any], *, width: int | None = None) -> str:
    """`print_summary` as text."""
    return _render(print_summary, data, width)


def render_row(data: Mapping[str, Any], *, width: int | None = None) -> str:
    """`print_row` as text."""
    return _render(print_row, data, width)


def _render(show: Callable[[Mapping[str, Any], Console], None], data: Mapping[str, Any], width: int | None) -> str:
    stream = io.StringIO()
    terminal = sys.stdout.isatty()
    columns = width or (PlainConsole().width if terminal else WIDTH)
    console = PlainConsole(file=stream, width=columns, force_terminal=terminal, legacy_windows=False)
    show(data, console)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def print_summary(data: Mapping[str, Any], console: Console) -> None:
    """Print what `summary` found: the answer in three lines, then manifest, sites, prompts and rounds."""
    state = "" if data["sealed"] else ", NOT FINISHED"
    state += ", ENDED EARLY" if data["stopped"] else ""
    _line(console, f"{data['side']} trace of {data['host']}, level {data['level']}{state}", "bold")
    rounds = data["rounds"]
    _line(
        console,
        f"{data['rows']} rows of {data['prompts']['count']} prompts at {len(data['sites'])} sites, "
        f"{size(data['bytes'])}",
    )
    ranks = f", {data['ranks']} ranks" if data["ranks"] > 1 else ""
    length = f", accept length {rounds['accept_length']:.2f} over {rounds['count']} rounds" if rounds["count"] else ""
    where = f"{data['dtype'] or 'dtype not known'} on {data['device'] or '?'}{ranks}"
    _line(console, f"{where}, {data['created'] or 'no date'}{length}")
    early = [f"the recording ended early: {data['stopped']}"] if data["stopped"] else []
    for title, lines in (
        ("made by", _made_by(data)),
        ("what recording changed", data["changes"]),
        (
            "never computed by this host",
            [f"{one.get('site')} ({one.get('rows')}): {one.get('why')}" for one in data["not_materialised"]],
        ),
        (
            "warnings",
            [*data["warnings"], *data["missing"], *_unchecked(data), *early],
        ),
    ):
        _section(console, title, lines)
    _print_sites(data["sites"], console)
    _print_prompts(data["prompts"], console)
    _print_rounds(rounds, console)


def _unchecked(data: Mapping[str, Any]) -> list[str]:
    count = data["without_checksums"]
    return [f"{count} files have no checksum: what was altered in them may go unnoticed"] if count else []


def _made_by(data: Mapping[str, Any]) -> list[str]:
    lines = [", ".join(f"{name} {version}" for name, version in data["packages"].items())]
    for name in ("target", "draft"):
        facts = dict(data[name])
        path = facts.pop("path", "not known")
        more = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
        lines.append(f"{name} {path}" + (f" ({more})" if more else ""))
    if data["settings"]:
        lines.append("settings " + ", ".join(f"{name} {value}" for name, value in data["settings"].items()))
    if data["argv"]:
        lines.append("command " + " ".join(data["argv"]))
    return [line for line in lines if line]


def _print_sites(sites: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("site", no_wrap=True)
    table.add_column("shape of a row", overflow="fold")
    for name in ("rows", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sites:
        shapes = ", ".join(f"[{shape['width']}] {shape['dtype']}" for shape in one["shapes"])
        table.add_row(
            printable(one["site"]), printable(shapes), str(one["rows"]), size(one["bytes"]) if one["bytes"] else "-"
        )
    console.print()
    console.print(table)


def _print_prompts(prompts: Mapping[str, Any], console: Console) -> None:
    lines: list[str | Sequence[str]] = []
    for one in prompts["listed"]:
        cached = f" ({one['cached_tokens']} from the prefix cache)" if one["cached_tokens"] else ""
        aborted = ", aborted" if one["finish_reason"] == "abort" else ""
        lines.append(
            f"{one['prompt_id']} {one['prompt_key']}: {one['prompt_tokens']} tokens{cached}, "
            f"{one['tokens'] - one['prompt_tokens']} behind it{aborted}"
        )
        lines.append(["", *_first(one["token_texts"], 300)])
        if one["output"]:
            lines.append(f"  -> {shorten(json.dumps(one['output'], ensure_ascii=False), 160)}")
    if (more := prompts["count"] - len(prompts["listed"])) > 0:
        lines.append(f"and {more} more: --format json --limit {prompts['count']} lists them")
    _section(console, "prompts", lines)


def _print_rounds(rounds: Mapping[str, Any], console: Console) -> None:
    lines: list[str | Sequence[str]] = []
    for one in rounds["listed"]:
        place = f"prompt {one['prompt_id']}, round {one['round']}, root {one['root']}:".split()
        accepted = [*one["accepted"][:-1], f"{one['accepted'][-1]},"] if one["accepted"] else ["nothing,"]
        lines.append([*place, *one["proposed"], "->", "accepted", *accepted, "then", one["bonus"] or "-"])
    if (more := rounds["count"] - len(rounds["listed"])) > 0:
        lines.append(f"and {more} more: --format json --limit {rounds['count']} lists them")
    _section(console, "verify rounds: proposed -> accepted, then the target's own token", lines)


def print_row(data: Mapping[str, Any], console: Console) -> None:
    """Print what `row` found."""
    for one in data["rows"]:
        path = f", path {one['path']}" if one["path"] else ""
        _line(
            console, f"{one['site']}: prompt {one['prompt_id']}, root {one['root']}, step {one['step']}{path}", "bold"
        )
        _line(
            console,
            f"token {one['token']} ({one['token_id']}) at position {one['position']}; "
            f"round {one['round']}, call {one['call_id']}",
        )
        bad = f", {one['nonfinite']} NaN or infinite" if one["nonfinite"] else ""
        _line(
            console,
            f"[{one['shape'][0]}] {one['dtype']}, norm {one['norm']:.6g}, largest {one['absmax']:.6g}, "
            f"mean {one['mean']:.6g}{bad}",
        )
        if one["values"] is None:
            _section(console, "values", ["not kept at this level"])
            if one["sketch"] is not None:
                _print_values("sketch", one["sketch"], console)
            continue
        _print_values("values", one["values"], console)


def _print_values(title: str, values: Sequence[float], console: Console) -> None:
    columns = max(1, (console.width - 10) // 13)
    shown = list(values) if len(values) <= 16 * columns else list(values[: _ELEMENTS * columns])
    lines = []
    for start in range(0, len(shown), columns):
        part = " ".join(f"{value:12.5g}" for value in shown[start : start + columns])
        lines.append(f"{start:6} {part}")
    if len(shown) < len(values):
        lines.append(f"and {len(values) - len(shown)} more: --format json prints all")
    _section(console, title, lines)


def _section(console: Console, title: str, lines: Sequence[str | Sequence[str]]) -> None:
    """A title and its lines; of a line that is a list of words, none is broken, whatever spaces are in it."""
    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        if isinstance(line, str):
            hang(console, line)
            continue
        for part in _filled(line, console.width - 2):
            console.print(Text(f"  {part}"), soft_wrap=True)


def _filled(words: Sequence[str], width: int) -> list[str]:
    """`words` in lines of at most `width` columns (a longer word has a line of its own)."""
    lines = [""]
    for number, word in enumerate(map(printable, words)):
        longer = f"{lines[-1]} {word}" if number else word
        if cell_len(longer) > width and lines[-1].strip():
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _first(words: Sequence[str], length: int) -> list[str]:
    """As many of `words` as fit in `length` characters, with dots for the others."""
    shown: list[str] = []
    for word in words:
        length -= len(word) + 1
        if length < 0:
            return [*shown, "..."]
        shown.append(word)
    return shown


def _line(console: Console, words: str, style: str = "") -> None:
    console.print(Text(printable(words), style=style))


def shorten(words: str, length: int) -> str:
    """`words` in at most `length` characters."""
    return words if len(words) <= length else f"{words[: length - 4]} ..."


def size(count: int) -> str:
    """Bytes in a unit that people read."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError
