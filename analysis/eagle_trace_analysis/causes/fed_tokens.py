"""Tokens that the server fed its draft, against those that its own target committed and its own draft proposed.

The serve trace alone says both: what was fed stands in its rows, what was due in its prompts, answers and rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.causes.tokens import is_shifted, lag
from eagle_trace_analysis.comparison.topk import unmapped
from eagle_trace_analysis.evidence.context import Context

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

UNKNOWN = -1
#: share of the wrong rows that a source of their tokens must explain
MOSTLY = 0.8


@dataclass(frozen=True)
class Fed:
    """Rows of a serve trace, and what each of them was due.

    Attributes:
        rows: the rows.
        due: the token that should have been fed, -1 where nothing in the trace says it; int64 [T].
        committed: tokens by place, by prompt.
        prompts: number of tokens of each prompt itself.
    """

    rows: Rows
    due: Int
    committed: dict[int, Int]
    prompts: dict[int, int]

    @classmethod
    def of(cls, trace: Trace) -> Fed:
        """Read it from a serve trace."""
        committed, lengths = _committed(trace)
        rows = trace.rows
        due = np.full(len(rows), UNKNOWN, dtype=np.int64)
        first = rows.step == 0
        for number, tokens in committed.items():
            at = np.flatnonzero(first & (rows.prompt_id == number) & (rows.root + 1 < len(tokens)))
            due[at] = tokens[rows.root[at] + 1]
        later = np.flatnonzero(~first)
        due[later] = rows.path[later, rows.step[later] - 1]
        chains = _chains(trace)
        for row in later:
            # a prompt's chunk may be drafted for as well, and nothing of that is verified
            chain = chains.get((int(rows.prompt_id[row]), int(rows.round[row]), int(rows.root[row])), [])
            if rows.step[row] <= len(chain):
                due[row] = chain[rows.step[row] - 1]
        return cls(rows, due, committed, lengths)

    @property
    def wrong(self) -> Int:
        """The rows that were fed another token than the one due."""
        return np.flatnonzero((self.due >= 0) & (self.rows.token_id >= 0) & (self.rows.token_id != self.due))

    @property
    def chunk_ends(self) -> Bool:
        """Which rows are the last of a prompt's chunk and not of the prompt."""
        rows = self.rows
        lengths = np.array([self.prompts.get(int(number), 0) for number in rows.prompt_id])
        found: Bool = (rows.round == 0) & _ends(rows) & (rows.root + 1 < lengths)
        return found

    def last_of_prompt(self, at: Int) -> Int:
        """The last token of the prompt of each of some rows, -1 where it is not known."""
        tokens = {
            number: int(self.committed[number][length - 1]) if 0 < length <= len(self.committed[number]) else UNKNOWN
            for number, length in self.prompts.items()
        }
        return np.array([tokens.get(int(number), UNKNOWN) for number in self.rows.prompt_id[at]], dtype=np.int64)

    def kinds(self) -> Iterator[tuple[str, Bool]]:
        """Kinds of rows in words, and which rows are of each."""
        rows = self.rows
        lengths = np.array([self.prompts.get(int(number), 0) for number in rows.prompt_id])
        first, ends = rows.step == 0, _ends(rows)
        prefill = first & (rows.round == 0)
        inside = rows.root + 1 < lengths
        yield "at the end of a prompt's chunk", self.chunk_ends
        yield "inside a prompt", prefill & ~ends & inside
        yield "of the first token behind a prompt", prefill & ~inside
        yield "of the bonus token after a verify round", first & ~prefill & ends
        yield "of accepted tokens after a verify round", first & ~prefill & ~ends
        for step in np.unique(rows.step[~first]):
            yield f"of draft step {step}", rows.step == step


def _ends(rows: Rows) -> Bool:
    """Which step-0 rows are the last of their prompt in their forward."""
    order = np.lexsort((rows.root, rows.prompt_id, rows.call_id, rows.step > 0))
    last = np.ones(len(rows), dtype=np.bool_)
    same = (rows.prompt_id[order][1:] == rows.prompt_id[order][:-1]) & (
        rows.call_id[order][1:] == rows.call_id[order][:-1]
    )
    last[order[:-1]] = ~same
    ends: Bool = last & (rows.step == 0)
    return ends


def _committed(trace: Trace) -> tuple[dict[int, Int], dict[int, int]]:
    """Tokens by place of each prompt: its own, its answer, what rounds committed, and only then what else is said."""
    rounds: dict[int, dict[int, int]] = {}
    for row in trace.table("rounds").select(["prompt_id", "root", "accepted", "bonus"]).to_pylist():
        kept = [*(row["accepted"] or []), row["bonus"]]
        places = enumerate(kept, start=int(row["root"]) + 2)
        rounds.setdefault(int(row["prompt_id"]), {}).update(
            (place, token) for place, token in places if token is not None and token >= 0
        )
    found, lengths = {}, {}
    columns = ["prompt_id", "token_ids", "num_prompt_tokens", "output_ids"]
    for row in trace.table("prompts").select(columns).to_pylist():
        number, said = int(row["prompt_id"]), list(row["token_ids"] or [])
        length = lengths[number] = int(row["num_prompt_tokens"] or 0)
        tokens = dict(enumerate(said)) | rounds.get(number, {})
        tokens |= dict(enumerate([*said[:length], *(row["output_ids"] or [])]))
        ids: list[int] = []
        while len(ids) in tokens:
            ids.append(tokens[len(ids)])
        found[number] = np.asarray(ids, dtype=np.int64)
    return found, lengths


def _chains(trace: Trace) -> dict[tuple[int, int, int], list[int]]:
    """What was proposed in each round (prompt, round, root) that proposed a chain."""
    table = trace.table("rounds").select(["prompt_id", "round", "root", "proposed", "parents"])
    return {
        (int(row["prompt_id"]), int(row["round"]), int(row["root"])): row["proposed"]
        for row in table.to_pylist()
        if row["proposed"] and row["parents"] == list(range(len(row["proposed"])))
    }


UNKNOWN_DUE = ("no row of the serve trace says which token was due", "record the serve side to its end")


def check_chunks(context: Context) -> Outcome:
    """The last row of each chunk of a prompt, fed the token that the prompt ends with."""
    fed = Fed.of(context.serve)
    ends = np.flatnonzero(fed.chunk_ends & (fed.due >= 0))
    if not (fed.due >= 0).any():
        return not_tested(*UNKNOWN_DUE)
    if not len(ends):
        return ruled_out("no prompt was computed in chunks")
    wrong = np.intersect1d(ends, fed.wrong)
    if not len(wrong):
        return ruled_out(f"all {len(ends)} chunks of prompts end with the prompt's next token")
    last = _chunk_lasts(fed)
    if len(last) < len(wrong):
        return ruled_out(
            f"{len(wrong)} of {len(ends)} chunks end with another token than the prompt's next one, of which "
            f"{len(last)} with the prompt's last: see tokens-fed-wrongly"
        )
    first = int(last[np.argmin(fed.rows.root[last])])
    evidence = (
        f"{len(last)} of {len(ends)} rows at the end of a prompt's chunk are fed the last token of the whole prompt in "
        f"place of the next one, and no such row another; first at root {fed.rows.root[first]}: "
        f"{fed.rows.token_id[first]}, due was {fed.due[first]}"
    )
    return confirmed(evidence, context.engine.WORDS.whole_prompts, "token")


def _chunk_lasts(fed: Fed) -> Int:
    """The wrong rows at chunks' ends that were fed what the prompt ends with; none if another is wrong there."""
    wrong = np.intersect1d(np.flatnonzero(fed.chunk_ends), fed.wrong)
    last: Int = wrong[fed.rows.token_id[wrong] == fed.last_of_prompt(wrong)]
    return last


def check(context: Context) -> Outcome:
    """Tokens fed against the server's own books."""
    fed = Fed.of(context.serve)
    known = int((fed.due >= 0).sum())
    if not known:
        return not_tested(*UNKNOWN_DUE)
    wrong = fed.wrong
    if context.confirms("chunk-end-token"):
        wrong = np.setdiff1d(wrong, _chunk_lasts(fed))
        if not len(wrong):
            return ruled_out("the rows at the end of a prompt's chunk, and no others: see chunk-end-token")
    if not len(wrong) and (raw := unmapped(context.serve)):
        fix = (
            "the server must map the draft's ids to target ids (d2t, its hot_token_id) at every draft step: update it, "
        )
        return confirmed("; ".join(one.words for one in raw), fix + "or report it", "token")
    if not len(wrong):
        return ruled_out(f"all {known:,} rows are fed what the target committed (step 0) or the draft proposed")
    if is_shifted(*lag(context.serve)):
        return ruled_out("(nearly) every row is fed the token of its own feature: see input-shift")
    marked = np.zeros(len(fed.rows), dtype=np.bool_)
    marked[wrong] = True
    said = [
        f"{int((marked & here).sum())} of {int(here.sum())} rows {kind}"
        for kind, here in fed.kinds()
        if (marked & here).any()
    ]
    first = int(wrong[np.lexsort((fed.rows.root[wrong], fed.rows.step[wrong]))[0]])
    evidence = f"{', '.join(said)} are fed another token than the one due"
    evidence += (source := _source(fed, wrong)) and f": {source}"
    evidence += f"; first at root {fed.rows.root[first]}, step {fed.rows.step[first]}: {fed.rows.token_id[first]}, due "
    evidence += f"was {fed.due[first]}"
    fix = (
        "the server must feed x[root + 1], the token that its target committed, beside feature g[root], and at draft "
        "steps the token that its draft proposed: update it, or report it with these rows"
    )
    return confirmed(evidence, fix, "token")


def _source(fed: Fed, wrong: Int) -> str:
    """What was fed instead, if nearly all wrong rows have it in common; else nothing."""
    rows = fed.rows
    token, place = rows.token_id[wrong], rows.root[wrong].astype(np.int64) + 1 + rows.step[wrong]

    def at(offset: int) -> Int:
        found = np.full(len(wrong), UNKNOWN, dtype=np.int64)
        for n, row in enumerate(wrong):
            tokens = fed.committed.get(int(rows.prompt_id[row]), ())
            if offset < 0 and rows.step[row] > 1:
                found[n] = rows.path[row, rows.step[row] - 2]
            elif 0 <= place[n] + offset < len(tokens):
                found[n] = tokens[place[n] + offset]
        return found

    sources = (
        ("the token before it", token == at(-1)),
        ("the token behind it", token == at(1)),
        ("the token due in another request of the same forward", _due_elsewhere(fed, wrong)),
        ("the last token of the prompt", token == fed.last_of_prompt(wrong)),
        (f"always token {token[0]}", token == token[0]),
    )
    for words, held in sources:
        count = int(held.sum())
        if count >= MOSTLY * len(wrong) and (count > 1 or words.startswith("the")):
            return words if count == len(wrong) else f"{words} ({count} of {len(wrong)})"
    return ""


def _due_elsewhere(fed: Fed, wrong: Int) -> Bool:
    """Which wrong rows were fed the token that the row at their place in another request of the forward was due.

    At their place: the last row of the request in an extend, or the same draft step. Others have no place that the
    requests of a forward share, and with few tokens about, a long prefill holds any of them by chance.
    """
    rows, due = fed.rows, fed.due
    placed = _ends(rows) | (rows.step > 0)
    held: dict[tuple[int, int, int], set[int]] = {}
    for row in np.flatnonzero(placed & np.isin(rows.call_id, rows.call_id[wrong])):
        key = int(rows.call_id[row]), int(rows.step[row]), int(due[row])
        held.setdefault(key, set()).add(int(rows.prompt_id[row]))

    def elsewhere(row: int) -> bool:
        key = int(rows.call_id[row]), int(rows.step[row]), int(rows.token_id[row])
        return bool(placed[row] and held.get(key, set()) - {int(rows.prompt_id[row])})

    return np.array([elsewhere(int(row)) for row in wrong])


CAUSES = (
    Cause(
        "chunk-end-token",
        "Lower accept length on prompts that are longer than a chunk of the prefill; short ones are fine.",
        "Token fed to the last row of each chunk of a prompt against the prompt's next token, and its last.",
        "Compute prompts in one piece, or update the server.",
        ("token",),
        check_chunks,
        of_server=True,
    ),
    Cause(
        "tokens-fed-wrongly",
        "Lower accept length on prompts and answers that are the same on both sides.",
        "Token fed to every row of the server against what its own target committed and its own draft proposed.",
        "Update the server, or report the rows: which they are, and which token they are fed instead.",
        ("token",),
        check,
        of_server=True,
    ),
)
