"""The server's own books: the tokens that it fed its draft, and those that its target committed and its draft proposed.

The serve trace alone says both: what was fed stands in its rows, what was due in its prompts, answers and rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]
UNKNOWN = -1


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
        found: Bool = (rows.round == 0) & ends_of_forwards(rows) & (rows.root + 1 < lengths)
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
        first, ends = rows.step == 0, ends_of_forwards(rows)
        prefill = first & (rows.round == 0)
        inside = rows.root + 1 < lengths
        yield "at the end of a prompt's chunk", self.chunk_ends
        yield "inside a prompt", prefill & ~ends & inside
        yield "of the first token behind a prompt", prefill & ~inside
        yield "of the bonus token after a verify round", first & ~prefill & ends
        yield "of accepted tokens after a verify round", first & ~prefill & ~ends
        for step in np.unique(rows.step[~first]):
            yield f"of draft step {step}", rows.step == step


def ends_of_forwards(rows: Rows) -> Bool:
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
