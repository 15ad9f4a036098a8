"""The promises of the trace format, asked of any host.

A host's recordings are compared with one another and with what they say of themselves; nothing here knows what a draft
computes. What it computes is for `diff` to find out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import DTYPES, LEVELS, Rows
from eagle_trace.errors import TraceError
from eagle_trace.families import Site
from eagle_trace.prompts import prompts_digest
from eagle_trace.reader import Trace, open_trace, read_keys
from eagle_trace.selection import EVERYTHING, Selection
from eagle_trace.sketch import stored_dtype

#: a row of a draft, as it is told from every other
Key = tuple[int, int, int, tuple[int, ...]]

DIGEST = re.compile(r"[0-9a-f]{16}")
#: what is selected of a small recording: some sites, roots and steps
SOME = Selection.parse(sites="fc.*,logits,layer.0.attn.q", roots="3:40", steps="0:2")
#: numbers of one recording may be those of another but for the order of a sum
RELATIVE, ABSOLUTE = 1e-4, 1e-6
#: and sketches are stored rounded, those of 16-bit rows to float16
SKETCHED = {"float16": 2.0**-10}


class Subject(Protocol):
    """A host that is set up to run a draft on a few prompts, the same ones each time.

    Attributes:
        name: of the host, as its traces are to have it.
        side: ``train`` or ``serve``.
    """

    name: str
    side: str

    def answer(self) -> Any:
        """What the host puts out when nothing is recorded, to be compared by ``==``; None if it puts nothing out."""
        ...

    def record(
        self, out: Path, *, level: str = "values", max_bytes: int | None = None, selection: Selection = EVERYTHING
    ) -> Any:
        """Leave a sealed trace at `out`, which is not there yet; returns what `answer` does."""
        ...

    def hooks(self) -> int | None:
        """How many hooks hang in the draft; None if that cannot be seen from here."""
        ...


def conformance(subject: Subject, folder: Path) -> list[str]:
    """Record at every level, with a byte budget and with a selection, and ask all of it what a trace promises.

    Args:
        subject: the host.
        folder: an empty folder for the traces.

    Returns:
        The promises that are broken, one sentence each; empty if all are kept.
    """
    before, hung = subject.answer(), subject.hooks()
    broken: list[str] = []
    traces: dict[str, Trace] = {}

    def record(name: str, **options: Any) -> None:
        said = subject.record(folder / name, **options)
        if said != before:
            broken.append(f"{name}: the host puts out something else while it is recorded")
        if subject.hooks() != hung:
            broken.append(f"{name}: {subject.hooks()} hooks hang in the draft afterwards, {hung} did before")
        try:
            traces[name] = open_trace(folder / name)
        except TraceError as error:
            broken.append(f"{name}: it cannot be read: {error}")
        else:
            if traces[name].level != options.get("level", "values"):
                broken.append(f"{name}: it is of level {traces[name].level}")
            kept = options.get("selection", EVERYTHING)
            broken.extend(f"{name}: {problem}" for problem in _alone(subject, traces[name], kept))

    for level in LEVELS:
        record(level, level=level)
    whole = traces.get("values")
    if whole is None or not len(whole.rows):
        return [*broken, "values: it holds no row"]
    record("budget", max_bytes=_captured(whole) // 2)
    record("selection", selection=SOME)
    if subject.answer() != before:
        broken.append("the host puts out something else after it was recorded")
    for name, asked in (dict.fromkeys(LEVELS, _same_rows) | {"budget": _budget, "selection": _selection}).items():
        if name in traces:
            broken += [f"{name}: {problem}" for problem in asked(traces[name], whole)]
    return broken


# ---- what a trace says of itself ------------------------------------------------------------------------------------


def _alone(subject: Subject, trace: Trace, selection: Selection) -> Iterator[str]:
    manifest = trace.manifest
    if (manifest.host, manifest.side) != (subject.name, subject.side):
        yield f"it says {manifest.side} of {manifest.host}, not {subject.side} of {subject.name}"
    yield from (f"it was altered: {problem}" for problem in trace.verify())
    named = ("packages", "target", "draft", "dtype", "device", "created")
    missing = [name for name in named if not getattr(manifest, name)]
    if missing:
        yield f"its manifest says nothing of {', '.join(missing)}"
    if manifest.prompts_digest != prompts_digest(list(trace.prompts.prompt_key)):
        yield "its digest of the prompts is not that of their keys"
    yield from _keys(trace)
    yield from _params(trace)
    yield from _coverage(trace, selection)
    yield from _tokens(trace)


def _keys(trace: Trace) -> Iterator[str]:
    rows = trace.rows
    keys = keys_of(rows)
    if len(set(keys)) != len(keys):
        yield f"{len(keys) - len(set(keys))} rows have the key of another one"
    if unknown := set(rows.prompt_id.tolist()) - set(trace.prompts.prompt_id):
        yield f"rows belong to prompts that are not listed: {sorted(unknown)}"
    if any(len(path) != step for _, _, step, path in keys):
        yield "the path of a row does not have one token per step below its root"


def _params(trace: Trace) -> Iterator[str]:
    ranks = trace.params_by_rank()
    if not ranks:
        yield "it lists no parameter"
    for _, rows in ranks:
        names = Counter(row["canonical_name"] for row in rows)
        if "" in names:
            yield "a parameter has no canonical name"
        if twice := sorted(name for name, count in names.items() if count > 1):
            yield f"parameters are listed twice: {', '.join(twice)}"
        if not all(DIGEST.fullmatch(str(row["digest"])) for row in rows):
            yield "the digest of a parameter is not BLAKE2b of 8 bytes in hex"


def _coverage(trace: Trace, selection: Selection) -> Iterator[str]:
    """Every site of the family is there for every row that has it, or is said to be missing."""
    names = [*trace.sites, *trace.shapes]
    sites, unknown = trace.family.sites_of(names)
    if unknown:
        yield f"these are names of no site: {', '.join(unknown)}"
    rows = set(keys_of(trace.rows))
    for site in sites:
        if site.kept != "values" or not selection.wants(site.name):
            continue
        excuse = _excuse(trace, site.name)
        if trace.level == "shapes":
            if site.name not in trace.shapes and not excuse:
                yield f"{site.name} is neither seen nor said to be missing"
            continue
        there = {key for data in trace.site_data(site.name) for key in keys_of(read_keys(data))}
        if extra := there - rows:
            yield f"{site.name} has {len(extra)} rows that are not listed"
        lost = {key for key in rows - there if _has(site, key[2]) and not (excuse == {"prefill"} and not key[2])}
        if lost and (not excuse or excuse == {"prefill"}):
            yield f"{site.name} lacks {len(lost)} of {len(rows)} rows, and nothing says why"


def _tokens(trace: Trace) -> Iterator[str]:
    """The row at root p and step 0 was fed token p + 1 of its prompt and answer."""
    rows = trace.rows
    tokens = dict(zip(trace.prompts.prompt_id, trace.prompts.token_ids, strict=True))
    for n in np.flatnonzero(rows.step == 0):
        ids, root = tokens[rows.prompt_id[n]], int(rows.root[n])
        if root + 1 >= len(ids) or int(ids[root + 1]) != int(rows.token_id[n]):
            yield f"the row at root {root} of prompt {rows.prompt_id[n]} was fed a token that is not the prompt's next"
            return


# ---- what recordings say of one another -----------------------------------------------------------------------------


def _same_rows(trace: Trace, whole: Trace) -> Iterator[str]:
    if set(keys_of(trace.rows)) != set(keys_of(whole.rows)):
        yield "it holds other rows than at level values"
    if trace.sites != whole.sites:
        yield f"it holds other sites than at level values: {sorted(set(trace.sites) ^ set(whole.sites))}"
    if trace.shapes != whole.shapes:
        yield "its sites have other shapes or dtypes than at level values"
    if list(trace.params.digest) != list(whole.params.digest):
        yield "its parameters are others than at level values"
    for site in whole.sites if trace.level in ("stats", "sketch") else ():
        if site in trace.sites and not _close(_figures(trace, site, "norm"), _figures(whole, site, "norm")):
            yield f"norms of {site} are not those of its values"
        relative = max(SKETCHED.get(stored_dtype(one.dtype), RELATIVE) for one in whole.site_data(site))
        mine, theirs = (_figures(one, site, "sketch") if trace.level == "sketch" else {} for one in (trace, whole))
        if not _close(mine, theirs, relative):
            yield f"sketches of {site} are not those of its values"


def _budget(trace: Trace, whole: Trace) -> Iterator[str]:
    kept, all_keys = set(keys_of(trace.rows)), set(keys_of(whole.rows))
    if trace.manifest.stopped != "max-bytes":
        yield f"half of the bytes were allowed, and the trace says it stopped for {trace.manifest.stopped or 'nothing'}"
    if not kept or kept == all_keys:
        yield f"half of the bytes were allowed, and {len(kept)} of {len(all_keys)} rows were recorded"
    if kept - all_keys:
        yield "it holds rows that the whole recording does not"


def _selection(trace: Trace, whole: Trace) -> Iterator[str]:
    all_keys = keys_of(whole.rows)
    wanted = {key for key, kept in zip(all_keys, SOME.mask(whole.rows), strict=True) if kept}
    if set(keys_of(trace.rows)) != wanted:
        yield f"{len(trace.rows)} rows were kept where the selection leaves {len(wanted)}"
    if extra := [site for site in trace.sites if not SOME.wants(site)]:
        yield f"sites were kept that the selection leaves out: {', '.join(extra)}"
    for site in filter(SOME.wants, whole.sites):
        mine, theirs = (_figures(one, site, "values") for one in (trace, whole))
        if not _close(mine, {key: value for key, value in theirs.items() if key in wanted}):
            yield f"values of {site} are not those of the whole recording"


# ---- small things ---------------------------------------------------------------------------------------------------


def keys_of(rows: Rows) -> list[Key]:
    """What tells each row from every other."""
    columns = zip(rows.prompt_id.tolist(), rows.root.tolist(), rows.step.tolist(), rows.path.tolist(), strict=True)
    return [(prompt, root, step, tuple(path[:step])) for prompt, root, step, path in columns]


def _has(site: Site, step: int) -> bool:
    """Whether the forward of a step computes a site."""
    return site.steps == "all" or (site.steps == "first") == (step == 0)


def _excuse(trace: Trace, site: str) -> set[str]:
    """Which rows of a site the manifest says the host never computes."""
    entries = trace.manifest.not_materialised
    return {
        str(one.get("rows", "all")) for one in entries if one.get("site", "*") != "*" and fnmatchcase(site, one["site"])
    }


def _captured(trace: Trace) -> int:
    """Bytes of all rows of all sites as the host computed them."""
    data = [one for site in trace.sites for one in trace.site_data(site)]
    return sum(one.rows * one.width * np.dtype(DTYPES[one.dtype]).itemsize for one in data)


def _figures(trace: Trace, site: str, what: str) -> dict[Key, NDArray[np.float32]]:
    """Norm, sketch or values of a site's rows, by key."""
    if site not in trace.kept_sites:
        return {}
    if what == "norm":
        given: Any = trace.statistics(site).norm
    else:
        given = trace.sketch(site) if what == "sketch" else trace.values(site)
    return dict(zip(keys_of(trace.keys(site)), given, strict=True))


def _close(
    mine: dict[Key, NDArray[np.float32]], theirs: dict[Key, NDArray[np.float32]], relative: float = RELATIVE
) -> bool:
    return mine.keys() == theirs.keys() and all(
        np.allclose(value, theirs[key], rtol=relative, atol=ABSOLUTE, equal_nan=True) for key, value in mine.items()
    )
