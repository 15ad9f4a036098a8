"""Rows that a router sent to other experts by rounding are left out; whatever else is wrong is found on the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_trace import Trace
from eagle_trace.errors import TraceError
from eagle_trace.manifest import Manifest
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.causes.base import Outcome, confirmed
from eagle_trace_analysis.causes.router_tipped import CAUSE, check
from eagle_trace_analysis.comparison.margins import Margins
from eagle_trace_analysis.evidence.context import Context
from tests.support.synthetic import HIDDEN, Prompt, Side, default_features, make_prompts, only, write_trace
from tests.support.verdicts import result_of

pytestmark = pytest.mark.slow

PROMPTS = make_prompts(4)
#: inputs of these decoder layers are the features; all layers below 6 have experts
IDS = [2, 4, 6]
ROWS = sum(len(prompt.tokens) - 1 for prompt in PROMPTS)
#: prompt, root, layer, gap / noise
Cut = tuple[int, int, int, float]
#: prompt, root, first feature that moves, by how much
Move = tuple[int, int, int, float]
#: changes the features [T, 3 G] of a prompt in place
Edit = Callable[[int, np.ndarray], None]


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


def served(folder: Path, moves: Iterable[Move], side: Side | None = None, edit: Edit = lambda _n, _rows: None) -> Trace:
    """A server whose target computes other features at some rows, from a layer on, or feeds other ones."""

    def features(prompt: Prompt) -> np.ndarray:
        found = default_features(prompt)
        edit(PROMPTS.index(prompt), found)
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
    def compare(
        cuts: Iterable[Cut] | None,
        moves: Iterable[Move],
        side: Side | None = None,
        edit: Edit = lambda _n, _rows: None,
        minimum_share: float = 0.5,
        **more: Any,
    ) -> Diff:
        train, serve = trained(tmp_path, cuts, **more), served(tmp_path, moves, side, edit)
        return diff(train, serve, minimum_share=minimum_share)

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
    assert note.text.endswith("step 1 are left to compare")
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
        ([(1, 5, 3, 0.1), (2, 4, 3, 0.1)], "no router from layer 2 on"),
        ([(1, 4, 4, 0.1)], "no router from layer 2 on"),
        # a row that tipped below the feature before would differ there, too
        ([(1, 4, 1, 0.1)], "no router from layer 2 on"),
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
    moves = [(1, 4, 0, 1.0), (1, 6, 1, 0.1)]
    assert compared([tip], moves).verdict == "agree"


@pytest.mark.parametrize(
    "move",
    [(1, 3, 1, 0.1), (2, 6, 1, 0.1), (1, 6, 0, 0.1)],
    ids=["in front of it", "of another prompt", "below the next attention"],
)
def test_other_rows_are_not_excused_by_one_that_tipped(move: Move, compared: Callable[..., Diff]) -> None:
    found = compared([(1, 4, 1, 0.2)], [(1, 4, 0, 1.0), move])
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


THIRD = slice(2 * HIDDEN, 3 * HIDDEN)


def zero(rows: np.ndarray, _other: np.ndarray) -> np.ndarray:
    return 0 * rows[5, THIRD]


#: what is fed as the third feature of root 5, of the prompt's own rows and of another prompt's; how it is told
FED: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], str]] = {
    "zeros": (zero, "is zero"),
    "the row before": (lambda rows, _: rows[4, THIRD], "is nearer to root 4 of prompt"),
    "a row far off": (lambda rows, _: rows[-1, THIRD], "is nearer to root"),
    "another prompt's": (lambda _, other: other[5, THIRD], "is nearer to root 5 of prompt 3"),
    "the feature before": (lambda rows, _: rows[5, HIDDEN : 2 * HIDDEN], "is nearer to target.hidden.1"),
    "a longer one": (lambda rows, _: 1.5 * rows[5, THIRD], "is the reference's times 1.5"),
    "a shorter one": (lambda rows, _: 0.1 * rows[5, THIRD], "is 0.1 times as long"),
}


NEAR, BEHIND = (0, 5, 4, 0.2), (0, 3, 2, 0.2)


@pytest.mark.parametrize(
    ("name", "cut"), [*((name, NEAR) for name in FED), ("zeros", BEHIND), ("the row before", BEHIND)]
)
def test_a_row_that_is_not_its_own_is_never_taken_for_one_of_other_experts(
    name: str, cut: Cut, compared: Callable[..., Diff]
) -> None:
    fed, words = FED[name]

    def edit(number: int, rows: np.ndarray) -> None:
        if number == 0:
            rows[5, THIRD] = fed(rows.copy(), default_features(PROMPTS[3]))

    tipped = [(0, 3, 1, 1.0)] if cut == BEHIND else []
    found = compared([cut], tipped, edit=edit)
    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert found.first_divergence.site.startswith("target.hidden.")
    assert result_of(found, "target.hidden.2").coverage.matched == ROWS
    verdict = verdict_of(found)
    assert verdict.verdict == "ruled_out"
    assert "root 5 of prompt 0 " + words in verdict.evidence


def late(step: int) -> Side:
    """A server whose draft is at fault behind root 4 of each prompt only."""

    def fault(rows: Any, values: np.ndarray) -> np.ndarray:
        return np.where((rows.root > 4)[:, None], 1.3 * values, values)

    return Side("serve", noise_seed=2, fault=only("layer.0.attn.context", step, fault))


@pytest.mark.parametrize(
    "side", [None, late(0), late(1)], ids=["without a fault", "with one of prefills", "with one of draft steps"]
)
def test_where_most_of_the_draft_follows_from_rows_that_tipped_nothing_is_said_to_agree(
    side: Side | None, compared: Callable[..., Diff]
) -> None:
    each = range(len(PROMPTS))
    found = compared([(n, 4, 3, 0.2) for n in each], [(n, 4, 1, 1.0) for n in each], side)
    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert found.first_divergence.site == "target.hidden.1"
    verdict = verdict_of(found)
    assert verdict.verdict == "confirmed"
    assert "of 16 rows 0 would be left (hidden, step 1)" in verdict.evidence
    assert str(verdict.fix).startswith("these features show no fault of the draft, and cannot")


def test_where_the_rows_furthest_from_the_beginning_follow_from_those_that_tipped_nothing_is_said_to_agree(
    compared: Callable[..., Diff],
) -> None:
    # a sixth of the rows, but the last two of each prompt
    rows = [(n, len(prompt.tokens) - 3) for n, prompt in enumerate(PROMPTS)]
    found = compared([(*row, 3, 0.2) for row in rows], [(*row, 1, 1.0) for row in rows])
    assert found.verdict == "diverged"
    assert verdict_of(found).verdict == "confirmed"


@pytest.mark.parametrize(("share", "verdict"), [(0.7, "agree"), (0.95, "incomparable")])
def test_rows_left_out_count_against_the_share_that_has_to_be_compared(
    share: float, verdict: str, compared: Callable[..., Diff]
) -> None:
    found = compared([(1, 4, 3, 0.2)], [(1, 4, 1, 1.0)], minimum_share=share)
    assert found.verdict == verdict
    said = "follow from a row that rounding sent to other experts"
    assert (said in str(found.incomparable)) == (verdict == "incomparable")


@pytest.mark.parametrize("level", ["stats", "sketch"])
def test_without_values_no_row_is_taken_for_one_of_other_experts(level: str, compared: Callable[..., Diff]) -> None:
    found = compared([(1, 4, 3, 0.2)], [(1, 4, 1, 1.0)], Side("serve", noise_seed=2, level=level))
    assert found.verdict == "diverged"
    verdict = verdict_of(found)
    assert verdict.verdict == "not_tested"
    assert "--level values" in str(verdict.fix)


@pytest.mark.parametrize(("site", "says"), [("target.hidden.1", "ruled_out"), ("layer.0.attn.context", "confirmed")])
def test_it_is_not_said_beside_a_cause_that_explains_the_features(
    site: str, says: str, compared: Callable[..., Diff]
) -> None:
    each = range(len(PROMPTS))
    found = compared([(n, 4, 3, 0.2) for n in each], [(n, 4, 1, 1.0) for n in each])
    assert found.figures is not None
    context = Context(found, found.figures.train, found.figures.serve)
    context.outcomes["another"] = confirmed("seen", "mend it", site)
    assert CAUSE.last
    assert check(context).verdict == says


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


@pytest.mark.parametrize("routers", [{"unread": ["a"]}, {"unread": 3}, {"read": [-1]}, [1]])
def test_a_manifest_whose_routers_are_no_layers_is_refused_in_a_sentence(routers: Any) -> None:
    said = json.loads(Manifest("train", "values", "test").to_bytes())
    # one that another program wrote has no checksum of its own
    del said["checksum"]
    assert Manifest.from_json(json.dumps(said), "here").settings == {}
    with pytest.raises(TraceError, match="its settings is not what it must be"):
        Manifest.from_json(json.dumps(said | {"settings": {"routers": routers}}), "here")


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
