"""A server's own books against what it fed its draft: what is replayed, what is said, and what accept lengths show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.capture import Rows
from eagle_trace.manifest import Manifest
from eagle_trace.writer import TraceWriter, prepare_output
from eagle_trace_analysis import diff
from eagle_trace_analysis.causes import chunk_end_token, tokens_fed_wrongly
from eagle_trace_analysis.causes.base import Outcome
from eagle_trace_analysis.comparison.acceptance import accept_length, contradiction
from eagle_trace_analysis.comparison.result import AcceptLength
from eagle_trace_analysis.engines import SGLANG
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_training.replay import replay_tasks
from tests.support.synthetic import Side, make_prompts, write_trace

PROMPT, ANSWER = [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]
#: (call, root, token fed, path, round): a prompt in chunks of 3, two rounds of which the first accepted one token
ROWS: list[tuple[int, int, int, tuple[int, ...], int]] = [
    *((0, root, PROMPT[root + 1], (), 0) for root in range(3)),
    *((1, root, (PROMPT + ANSWER)[root + 1], (), 0) for root in range(3, 6)),
    (2, 5, 21, (21,), 1),
    (3, 5, 99, (21, 99), 1),
    *((4, root, (PROMPT + ANSWER)[root + 1], (), 1) for root in (6, 7)),
    (5, 7, 77, (77,), 2),
    (6, 7, 78, (77, 78), 2),
    (7, 8, 23, (), 2),
]
ROUNDS = [
    {"round": 1, "root": 5, "proposed": [21, 99, 98], "parents": [0, 1, 2], "accepted": [21], "bonus": 22},
    {"round": 2, "root": 7, "proposed": [77, 78, 79], "parents": [0, 1, 2], "accepted": [], "bonus": 23},
]


def served(path: Path, fed: dict[int, int], *, finished: bool = True, more: Sequence[Any] = ()) -> Trace:
    """A serve trace of rows without values; `fed` are the tokens fed otherwise, by row."""
    prepare_output(path)
    writer = TraceWriter(path, Manifest("serve", "shapes", "sglang", created="2026-01-01T00:00:00+00:00"))
    for number, (call, root, token, chain, round_) in enumerate([*ROWS, *more]):
        writer.put_rows(
            Rows.build(
                prompt_id=[0],
                root=[root],
                step=[len(chain)],
                token_id=[fed.get(number, token)],
                position=[root + len(chain)],
                call_id=call,
                round=round_,
                path=[chain],
            )
        )
    for record in ROUNDS:
        writer.put_record("rounds", record | {"prompt_id": 0, "target_argmax": []})
    answer = ANSWER[:4] if finished else []
    record = {"prompt_id": 0, "prompt_key": "p", "request_id": "r", "num_prompt_tokens": 6, "text": ""}
    writer.put_record("prompts", record | {"token_ids": PROMPT + answer, "output_ids": answer})
    return open_trace(writer.seal())


@pytest.mark.parametrize("finished", [True, False])
def test_a_replay_runs_what_the_target_committed_whatever_the_draft_was_fed(tmp_path: Path, finished: bool) -> None:
    wrong = {2: 50, 4: 50, 8: 50, 9: 50, 12: 50}
    (task,), _ = replay_tasks(served(tmp_path / "s", wrong, finished=finished), None)
    assert list(task.token_ids) == PROMPT + ANSWER[:4]
    assert task.chains == ((5, (21,)), (5, (21, 99)), (7, (77,)), (7, (77, 78)))


def said(trace: Trace, check: Callable[[Context], Outcome] = tokens_fed_wrongly.check) -> Outcome:
    """What a cause says when the one about chunks has looked before it."""
    context: Any = SimpleNamespace(serve=trace, engine=SGLANG)
    context.confirms = lambda _: chunk_end_token.check(context).verdict == "confirmed"
    return check(context)


def test_a_server_that_feeds_what_it_committed_is_ruled_out(tmp_path: Path) -> None:
    found = said(served(tmp_path / "s", {}))
    assert (found.verdict, found.evidence.split(" are ")[0]) == ("ruled_out", "all 13 rows")


@pytest.mark.parametrize(
    ("fed", "words"),
    [
        (
            {2: 12},
            "1 of 1 rows at the end of a prompt's chunk are fed another token than the one due: the token before",
        ),
        ({2: 14}, "the token behind it"),
        ({1: 15, 9: 15}, "the last token of the prompt"),
        ({1: 40, 4: 40}, "2 of 4 rows inside a prompt are fed another token than the one due: always token 40"),
        ({5: 3}, "1 of 1 rows of the first token behind a prompt"),
        ({9: 21, 12: 22}, "2 of 2 rows of the bonus token after a verify round"),
        ({8: 20}, "1 of 1 rows of accepted tokens after a verify round"),
        ({7: 21, 11: 77}, "2 of 2 rows of draft step 2 are fed another token than the one due: the token before it"),
    ],
)
def test_rows_that_are_fed_another_token_are_named_and_what_they_are_fed(
    tmp_path: Path, fed: dict[int, int], words: str
) -> None:
    found = said(served(tmp_path / "s", fed))
    assert (found.verdict, found.site) == ("confirmed", "token")
    assert words in found.evidence


@pytest.mark.parametrize(
    ("fed", "chunks", "others"),
    [
        ({}, "ruled_out", "ruled_out"),
        ({2: 15}, "confirmed", "ruled_out"),
        ({2: 15, 9: 21}, "confirmed", "confirmed"),
        ({2: 14}, "ruled_out", "confirmed"),
        ({9: 15}, "ruled_out", "confirmed"),
    ],
)
def test_a_chunk_that_ends_with_the_prompts_last_token_is_a_cause_of_its_own(
    tmp_path: Path, fed: dict[int, int], chunks: str, others: str
) -> None:
    trace = served(tmp_path / "s", fed)
    assert (said(trace, chunk_end_token.check).verdict, said(trace).verdict) == (chunks, others)


def test_drafts_below_a_chunk_are_not_those_of_the_first_round(tmp_path: Path) -> None:
    drafted_early = (1, 2, 50, (50,), 1)
    trace = served(tmp_path / "s", {}, more=[drafted_early])
    assert said(trace).verdict == "ruled_out"


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, True),
        ({"predicted": 2.1}, False),
        ({"predicted": None}, False),
        ({"observed": None}, False),
        ({"better": 2}, False),
        ({"predicted": 1.2, "better": 0, "worse": 9}, True),
        ({"branches": 4}, False),
        ({"branches": 4, "predicted_range": (2.5, 2.7)}, True),
        ({"branches": 4, "predicted_range": (2.1, 3.1)}, False),
    ],
)
def test_accept_lengths_far_apart_contradict_agreement_and_a_tree_is_not_held_against_a_chain(
    changed: dict[str, Any], wrong: bool
) -> None:
    accept = AcceptLength(2.0, rounds=24, predicted=2.6, better=9)
    assert (contradiction(replace(accept, **changed)) is not None) is wrong


def test_a_tree_is_told_by_a_token_with_two_children(tmp_path: Path) -> None:
    chain = {"prompt_id": 0, "target_argmax": [], "accepted": [], "bonus": 1, "round": 1, "root": 8}
    for parents, branches in (([0, 1, 2], 1), ([0, 0, 1], 2), ([-1, -1, -1], 1)):
        record = chain | {"proposed": [1, 2, 3], "parents": parents}
        serve = write_trace(tmp_path / f"s{branches}{parents[0]}", Side("serve"), make_prompts(1), rounds=[record])
        assert accept_length(serve).branches == branches


@pytest.mark.parametrize("moved", [2, -3])
def test_a_row_without_a_partner_must_stand_where_the_rest_of_its_prompt_does(tmp_path: Path, moved: int) -> None:
    prompts = make_prompts()
    train = write_trace(tmp_path / "t", Side("train"), [replace(one, chains=()) for one in prompts])
    right = write_trace(tmp_path / "r", Side("serve", position_shift=lambda *_: moved), prompts)
    assert diff(train, right).verdict == "agree"
    serve = write_trace(tmp_path / "s", Side("serve", position_shift=lambda _, step: moved * (step == 2)), prompts)
    first = diff(train, serve).first_divergence
    assert first is not None
    assert (first.site, first.step, first.kind) == ("position", 2, "positions")
