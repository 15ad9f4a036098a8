"""Rows that a router sent to other experts by rounding are left out; whatever else is wrong is found on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import Trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.causes.base import Outcome
from eagle_trace_analysis.causes.router_tipped import check
from eagle_trace_analysis.comparison.tipped import Margins
from eagle_trace_analysis.evidence.context import Context
from tests.support.synthetic import HIDDEN, Prompt, Side, default_features, make_prompts, only, write_trace
from tests.support.verdicts import result_of

PROMPTS = make_prompts(4)
#: inputs of these decoder layers are the features; all layers below 6 have experts
IDS = [2, 4, 6]
ROWS = sum(len(prompt.tokens) - 1 for prompt in PROMPTS)
#: prompt, root, layer, gap / noise
Cut = tuple[int, int, int, float]
#: prompt, root, first feature that moves, by how much
Move = tuple[int, int, int, float]


def trained(
    folder: Path, cuts: Iterable[Cut] | None, unread: Iterable[int] = (), floors: Iterable[dict[str, Any]] = ()
) -> Trace:
    """A training whose target's routers came near to other experts at `cuts` alone; None for one that measured none."""
    settings = {"features": "compute"}
    routers = {} if cuts is None else {"routers": {"read": [0, 1, 2, 3, 4, 5], "unread": list(unread)}}
    routing = [
        {"prompt_id": prompt, "root": root, "layer": layer, "gap": ratio * 1e-3, "noise": 1e-3}
        for prompt, root, layer, ratio in cuts or ()
    ]
    side = Side("train", noise_seed=1, settings=settings | routers, draft={"layer_ids": IDS})
    return write_trace(folder / "train.trace", side, PROMPTS, routing=routing, floors=list(floors))


def served(folder: Path, moves: Iterable[Move], side: Side | None = None) -> Trace:
    """A server whose target computes other features at some rows, from a layer on."""

    def features(prompt: Prompt) -> np.ndarray:
        found = default_features(prompt)
        for number, root, feature, size in moves:
            if PROMPTS[number] is prompt:
                draw = np.random.default_rng(root)
                found[root, feature * HIDDEN :] += size * draw.standard_normal(found.shape[1] - feature * HIDDEN)
        return found

    return write_trace(folder / "serve.trace", side or Side("serve", noise_seed=2), PROMPTS, features=features)


def verdict_of(found: Diff) -> Outcome:
    """What the cause says."""
    assert found.figures is not None
    return check(Context(found, found.figures.train, found.figures.serve))


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Diff]:
    def compare(cuts: Iterable[Cut] | None, moves: Iterable[Move], side: Side | None = None, **more: Any) -> Diff:
        train, serve = trained(tmp_path, cuts, **more), served(tmp_path, moves, side)
        return diff(train, serve)

    return compare


def test_a_row_that_rounding_sent_to_other_experts_is_left_out_with_a_note_and_all_else_agrees(
    compared: Callable[..., Diff],
) -> None:
    found = compared([(1, 4, 3, 0.2), (2, 7, 1, 3.0)], [(1, 4, 1, 1.0)])
    assert found.verdict == "agree"
    (note,) = (one for one in found.benign if one.name == "router-tipped")
    assert note.text.startswith(f"the target sent 1 of {ROWS} rows to other experts: two scores of a router were 0.2")
    coverage = result_of(found, "target.hidden.2").coverage
    assert coverage.skipped_train == {"router-tipped": 1}
    assert coverage.matched == ROWS - 1
    # attention of the draft takes the row along to those behind it, in its own prompt alone
    behind = len(PROMPTS[1].tokens) - 1 - 4
    assert result_of(found, "layer.0.attn.out").coverage.skipped_train == {"router-tipped": behind}
    assert result_of(found, "layer.0.attn.q").coverage.skipped_train == {"router-tipped": 1}
    verdict = verdict_of(found)
    assert verdict.verdict == "ruled_out"
    assert "that is no fault" in verdict.evidence


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ([(1, 4, 3, 4.5)], "4.5 times as far apart"),
        # another row's, another prompt's, and a layer that the feature does not depend on
        ([(1, 5, 3, 0.1), (2, 4, 3, 0.1)], "no router below"),
        ([(1, 4, 4, 0.1)], "no router below"),
    ],
)
def test_a_row_with_clear_scores_is_not_excused(cuts: list[Cut], words: str, compared: Callable[..., Diff]) -> None:
    found = compared(cuts, [(1, 4, 1, 1.0)])
    assert found.first_divergence is not None
    assert found.first_divergence.site == "target.hidden.1"
    assert result_of(found, "target.hidden.1").coverage.matched == ROWS
    verdict = verdict_of(found)
    assert verdict.verdict == "ruled_out"
    assert words in verdict.evidence


def test_rows_behind_one_that_tipped_are_excused_two_layers_above_it_and_not_in_front(
    compared: Callable[..., Diff],
) -> None:
    tip = (1, 4, 1, 0.2)
    moves = [(1, 4, 1, 1.0), (1, 6, 1, 0.1)]
    assert compared([tip], moves).verdict == "agree"


@pytest.mark.parametrize(
    "move",
    [(1, 3, 1, 0.1), (2, 6, 1, 0.1), (1, 6, 0, 0.1)],
    ids=["in front of it", "of another prompt", "below the next attention"],
)
def test_other_rows_are_not_excused_by_one_that_tipped(move: Move, compared: Callable[..., Diff]) -> None:
    found = compared([(1, 4, 1, 0.2)], [(1, 4, 1, 1.0), move])
    assert found.verdict == "diverged"
    assert f"root {move[1]} of prompt {move[0]}" in verdict_of(found).evidence


@pytest.mark.parametrize("site", ["layer.0.attn.q", "layer.0.attn.out", "norm"])
def test_a_fault_of_the_draft_is_found_at_its_site_beside_a_row_that_tipped(
    site: str, compared: Callable[..., Diff]
) -> None:
    fault = only(site, 0, lambda _rows, values: 1.05 * values)
    found = compared([(1, 4, 3, 0.2)], [(1, 4, 1, 1.0)], Side("serve", noise_seed=2, fault=fault))
    assert found.first_divergence is not None
    assert (found.first_divergence.site, found.first_divergence.step) == (site, 0)
    assert "router-tipped" in result_of(found, site).coverage.skipped_train


def test_a_router_that_scores_otherwise_moves_rows_with_clear_scores_and_is_not_excused(
    compared: Callable[..., Diff],
) -> None:
    # of every third row, some of which were near to other experts
    every = [(n, root, 1, 1.0) for n, prompt in enumerate(PROMPTS) for root in range(0, len(prompt.tokens) - 1, 3)]
    cuts = [(n, root, 3, 0.5) for n, root, _, _ in every[::2]]
    found = compared(cuts, every)
    assert found.verdict == "diverged"
    assert verdict_of(found).verdict == "ruled_out"


def test_more_rows_than_rounding_tips_are_not_excused(compared: Callable[..., Diff]) -> None:
    rows = [(n, root) for n, prompt in enumerate(PROMPTS) for root in range(0, len(prompt.tokens) - 1, 5)]
    found = compared([(*row, 3, 3.5) for row in rows], [(*row, 1, 1.0) for row in rows])
    assert found.verdict == "diverged"
    assert f"{len(rows)} rows differ that may have tipped, where rounding tips about 0." in verdict_of(found).evidence


def test_where_most_rows_tipped_the_features_stay_diverged_and_the_cause_is_confirmed(
    compared: Callable[..., Diff],
) -> None:
    rows = [(n, root) for n, prompt in enumerate(PROMPTS) for root in range(len(prompt.tokens) - 1) if root % 3]
    found = compared([(*row, 3, 0.1) for row in rows], [(*row, 1, 1.0) for row in rows])
    assert found.verdict == "diverged"
    verdict = verdict_of(found)
    assert (verdict.verdict, verdict.site) == ("confirmed", "target.hidden.1")
    assert "--features serve" in str(verdict.fix)


@pytest.mark.parametrize(
    ("cuts", "unread", "words"),
    [(None, (), "says nothing of the target's routers"), ([(1, 4, 3, 0.2)], (2,), r"layers [2] choose experts")],
)
def test_nothing_is_excused_or_ruled_out_where_margins_are_not_known(
    cuts: list[Cut] | None, unread: tuple[int, ...], words: str, compared: Callable[..., Diff]
) -> None:
    found = compared(cuts, [(1, 4, 1, 1.0)], unread=unread)
    assert found.verdict == "diverged"
    verdict = verdict_of(found)
    assert verdict.verdict == "not_tested"
    assert words in verdict.evidence


def floor_that_tipped(site: str) -> dict[str, Any]:
    """A floor whose rows are near to each other but for one, which went to other experts in the reference."""
    low, high = dict.fromkeys(("rho_median", "rho_p99"), 1e-7), dict.fromkeys(("rho_max", "channel_p99"), 1.0)
    facts = {"site": site, "step": 0, "dtype": "float32", "reference": "float64", "rows": ROWS}
    return facts | low | high | {"channel_median": 0.5, "channel_max": 1.0}


def test_a_row_that_tipped_within_a_floor_that_did_so_as_well_is_left_out_of_what_is_made_of_it(
    compared: Callable[..., Diff],
) -> None:
    floors = [floor_that_tipped(f"target.hidden.{number}") for number in range(3)]
    moves = [(1, 4, 1, 1.0)]
    assert compared([(1, 4, 3, 0.2)], moves, floors=floors).verdict == "agree"


def test_what_is_made_of_features_that_agree_is_not_excused_without_a_row_that_tipped(
    compared: Callable[..., Diff],
) -> None:
    fault = only("fc.out", 0, lambda _rows, values: 1.05 * values)
    found = compared([(1, 4, 3, 0.2)], [], Side("serve", noise_seed=2, fault=fault))
    assert found.first_divergence is not None
    assert found.first_divergence.site == "fc.out"
    assert verdict_of(found).evidence == "no feature of the target differs"


def test_margins_of_another_precision_say_nothing(compared: Callable[..., Diff]) -> None:
    found = compared([(1, 4, 3, 0.2)], [(1, 4, 1, 1.0)], Side("serve", dtype="bfloat16"))
    assert found.verdict == "diverged"
    verdict = verdict_of(found)
    assert verdict.verdict == "not_tested"
    assert "measured in float32, and one side computes in bfloat16" in verdict.evidence


def test_of_features_that_agree_no_row_is_left_out(compared: Callable[..., Diff]) -> None:
    found = compared([(1, 4, 3, 0.2)], [])
    assert found.verdict == "agree"
    assert result_of(found, "target.hidden.1").coverage.matched == ROWS
    assert not [note for note in found.benign if note.name == "router-tipped"]


def test_rounding_tips_a_row_as_often_as_two_gaussian_errors_of_its_noise_do() -> None:
    draw = np.random.default_rng(0)
    for ratio in (0.5, 1.0, 2.0):
        # each implementation is one noise away from the reference
        apart = draw.standard_normal((2, 200_000))
        flips = apart[0] - apart[1] > ratio
        expected = Margins({(0, 0): [(1, ratio)]}, (), (2,)).expected([(0, 0)], 2)
        assert flips.mean() == pytest.approx(expected, rel=0.02)
