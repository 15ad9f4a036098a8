"""What a serve trace asks the train side to do again: tokens, and the chains drafted below them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_trace.errors import UsageError
from eagle_trace.reader import Trace, open_trace
from eagle_trace.store import Place
from eagle_trace_training.documents import Chain


@dataclass(frozen=True)
class Task:
    """One prompt to run the draft on.

    Attributes:
        record: the prompt's row of prompts.parquet.
        token_ids: x_0 .. x_{n-1}: the prompt, and behind it what the server committed.
        chains: (root, tokens fed at steps 1 .. s) of every row of step s >= 1 to capture; None for the
            prompt's own tokens at every step.
    """

    record: dict[str, Any]
    token_ids: tuple[int, ...]
    chains: tuple[Chain, ...] | None = None

    @property
    def prompt_id(self) -> int:
        """Number of the prompt."""
        return int(self.record["prompt_id"])


def open_replay(path: Place) -> Trace:
    """Open the serve trace to replay.

    Raises:
        TraceError: it cannot be read.
        UsageError: it is a train trace, or its recording ended before it held a row.
    """
    trace = open_trace(path)
    if trace.side != "serve":
        raise UsageError(f"{path} is a {trace.side} trace: --replay takes what `eagle-trace record --mode serve` wrote")
    early = trace.manifest.ended_early
    if early and not trace.table_rows("rows"):
        raise UsageError(f"{path} holds no row to replay: {early}. Record the serve side again")
    return trace


def replay_tasks(trace: Trace, steps: int | None) -> tuple[list[Task], int]:
    """The prompts of a serve trace with the chains to replay, and how many of its rows cannot be.

    Rows that the server let attend to another branch of its draft tree have no counterpart in training: they
    are counted, not replayed.

    Args:
        trace: the serve trace.
        steps: number of forwards to keep, None for all the server did.

    Raises:
        UsageError: the trace holds no prompt.
    """
    rows = trace.rows
    chains: dict[int, set[Chain]] = defaultdict(set)
    known: dict[int, dict[int, int]] = defaultdict(dict)
    wanted = rows.step < steps if steps is not None else np.ones(len(rows), dtype=np.bool_)
    for i in np.flatnonzero(wanted & rows.own_path):
        prompt, root, step = int(rows.prompt_id[i]), int(rows.root[i]), int(rows.step[i])
        if step:
            chains[prompt].add((root, tuple(rows.path[i, :step].tolist())))
        else:
            known[prompt][root + 1] = int(rows.token_id[i])
    # what the target committed counts, not what the draft was fed: that may be what is wrong
    for row in trace.table("rounds").select(["prompt_id", "root", "accepted", "bonus"]).to_pylist():
        kept = [*(row["accepted"] or []), row["bonus"]]
        known[row["prompt_id"]] |= {
            place: token for place, token in enumerate(kept, start=row["root"] + 2) if token is not None and token >= 0
        }
    tasks = []
    for record in trace.table("prompts").to_pylist():
        prompt = int(record["prompt_id"])
        token_ids = list(record["token_ids"])
        # a recording that was cut short knows the prompt alone, and its rows and rounds know more
        while token_ids and len(token_ids) in known[prompt]:
            token_ids.append(known[prompt][len(token_ids)])
        tasks.append(Task(record, tuple(token_ids), tuple(sorted(chains[prompt]))))
    if not tasks:
        raise UsageError(f"{trace.path} holds no prompt: there is nothing to replay")
    return tasks, int((wanted & ~rows.own_path).sum())
