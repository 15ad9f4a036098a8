"""Steps recomputed by themselves: what is sampled, what is read, what is judged, and what the fits find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle_trace.reader import Trace, open_trace
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.causes.norm_eps import fit_eps
from eagle_trace_analysis.causes.rope_theta import fit_theta
from eagle_trace_analysis.checkpoint.files import open_checkpoint
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.replay.attention import View
from eagle_trace_analysis.replay.form import Form, Rope, form_of
from eagle_trace_analysis.replay.recorded import CHAINS, ROOTS, Recorded, choose
from eagle_trace_analysis.replay.replay import Replay
from eagle_trace_analysis.replay.weights import sampled, weights_of
from eagle_trace_analysis.tensors.places import match_channels
from tests.support.pairs import DRAFT
from tests.support.planted import Planted, run
from tests.support.planted_faults import faults

RNG = np.random.default_rng(0)
GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Diff, Trace, Trace]:
    return run(Planted("healthy", None, None), tmp_path_factory.mktemp("healthy"))


def named(name: str) -> Planted:
    return next(case for case in faults() if case.name == name)


def test_a_sample_holds_whole_chains_the_first_roots_and_the_last(healthy: tuple[Diff, Trace, Trace]) -> None:
    trace = healthy[2]
    keys = choose(trace)
    held = {(int(p), int(r), path) for p, r, path in zip(keys.prompt_id, keys.root, keys.paths(), strict=True)}
    assert all((p, r, path[:-1]) in held for p, r, path in held if path)
    for prompt in np.unique(trace.rows.prompt_id):
        assert (prompt, int(trace.rows.root[trace.rows.prompt_id == prompt].max()), ()) in held
    assert {(0, root, ()) for root in range(4)} <= held
    assert len(keys) <= ROOTS + 3 * CHAINS + 4


def test_rows_of_a_sample_know_the_row_above_them(healthy: tuple[Diff, Trace, Trace]) -> None:
    trace = healthy[2]
    recorded = Recorded(trace, choose(trace))
    keys, parents = recorded.keys, recorded.parents
    paths = keys.paths()
    for row in np.flatnonzero(keys.step > 0):
        above = parents[row]
        assert (keys.root[above], paths[above]) == (keys.root[row], paths[row][:-1])
    carry, hidden = recorded.values("carry"), recorded.values("hidden")
    assert carry is not None
    assert hidden is not None
    later = np.flatnonzero(keys.step > 0)
    assert np.abs(carry.values[parents[later]] - hidden.values[later]).max() < 1e-5


def test_weights_are_read_in_rows_and_rounded_as_the_host_holds_them() -> None:
    checkpoint = open_checkpoint(DRAFT)
    full, half = (weights_of(checkpoint, dtype) for dtype in ("float32", "float16"))
    index = sampled(128, 5)
    assert index.tolist() == [0, 31, 63, 95, 127]
    rows = full.rows("fc.weight", index)
    assert np.array_equal(rows, full.whole("fc.weight")[index])
    # stored as bfloat16, so float32 is exact, and float16 is not
    assert np.array_equal(half.rows("fc.weight", index), rows.astype(np.float16).astype(np.float32))
    doubled = full.edited("fc.weight", lambda found: 2 * found)
    assert np.array_equal(doubled.rows("fc.weight", index), 2 * rows)
    assert np.array_equal(full.rows("fc.weight", index), rows)
    assert full.replaced({"fc.weight": np.zeros((128, 384))}).rows("fc.weight", index).any() == np.False_


def test_a_step_that_training_does_not_reproduce_either_is_not_judged(tmp_path: Path) -> None:
    # the training side computes with another eps than its own config says
    result, _, _ = run(Planted("odd", None, "layer.0.embed_norm", train={"eps": 1e-3}), tmp_path)
    diagnosis = result.diagnosis
    assert diagnosis is not None
    assert not diagnosis.confirmed
    norms = [one for one in diagnosis.replay if one.site == "layer.0.embed_norm"]
    assert {one.verdict for one in norms} == {"not replayed"}
    assert "does not reproduce the training side" in str(norms[0].reason)
    assert "layer.0.embed_norm" in diagnosis.unexplained[0]


def test_other_weights_under_the_right_name_are_the_cause_and_leave_nothing_unexplained(tmp_path: Path) -> None:
    def other(tensors: dict[str, np.ndarray]) -> None:
        tensors["fc.weight"] = 1.3 * tensors["fc.weight"]

    result, _, _ = run(Planted("other", None, "fc.out", serve_tensors=other), tmp_path)
    diagnosis = result.diagnosis
    assert diagnosis is not None
    assert [one.cause for one in diagnosis.confirmed] == ["weights-differ"]
    assert "fc.weight" in diagnosis.confirmed[0].evidence
    assert not diagnosis.unexplained


@pytest.mark.parametrize(("name", "eps"), [("norm-eps", 1e-2), ("norm-eps-of-the-engine", 1e-3)])
def test_eps_is_read_off_the_rows(name: str, eps: float, tmp_path: Path) -> None:
    result, train, serve = run(named(name), tmp_path)
    replay = Context(result, train, serve).replay
    assert replay is not None
    assert fit_eps(replay, "layer.0.embed_norm", 0) == pytest.approx(eps, rel=1e-3)


def test_theta_is_read_off_the_rotation(tmp_path: Path) -> None:
    result, train, serve = run(named("rope-theta-of-the-engine"), tmp_path)
    replay = Context(result, train, serve).replay
    assert replay is not None
    for step in replay.recorded.steps:
        assert fit_theta(replay, step) == pytest.approx(20000.0, rel=1e-3)
    # the deployed config is right: to set it once more would change nothing
    assert result.diagnosis is not None
    assert "the deployed config says theta 10000 as trained" in str(result.diagnosis.confirmed[0].fix)


def test_a_window_shorter_than_a_path_leaves_out_the_first_tokens_of_the_path(
    healthy: tuple[Diff, Trace, Trace],
) -> None:
    """A window of w tokens holds the last w of prefix and path together, the row's own among them."""
    replay = Context(*healthy).replay
    assert replay is not None
    rows = replay.recorded.keys
    deepest = int(rows.step.argmax())
    key = int(rows.prompt_id[deepest]), int(rows.root[deepest]), rows.paths()[deepest], int(rows.call_id[deepest])
    whole = View(replay.recorded).seen(*key)
    assert whole is not None
    for window in range(1, len(key[2]) + 4):
        seen = View(replay.recorded, window=window, by_root=False).seen(*key)
        assert seen is not None
        assert np.array_equal(seen[0], whole[0][-window:])


def test_channels_are_found_at_their_other_places() -> None:
    expected = RNG.standard_normal((40, 96))
    order = RNG.permutation(96)
    noise = 1 + 1e-6 * RNG.standard_normal((40, 96))
    place, error = match_channels(expected[:, order] * noise, expected)
    assert place.tolist() == order.tolist()
    assert error.max() < 1e-5


def test_a_replay_under_the_trained_form_gives_what_was_recorded_on_the_real_hosts() -> None:
    train, serve = (open_trace(GOLDEN / f"{name}.trace") for name in ("train", "healthy"))
    form = form_of(train.manifest.draft["config"])
    for trace in (train, serve):
        weights = weights_of(open_checkpoint(DRAFT), trace.manifest.dtype)
        replay = Replay(Recorded(trace, choose(trace)), form, weights)
        for site in ("fc.out", "layer.0.hidden_norm", "layer.0.attn.k_rope", "layer.0.attn.context", "logits"):
            found = replay.measure(site, 0)
            assert not isinstance(found, str)
            # one rounding to bfloat16 has an RMS error of 1.66e-3
            assert found.rho_median < 6e-3, (site, found)


def test_forms_of_both_configs_of_the_demo_draft_are_the_same(healthy: tuple[Diff, Trace, Trace]) -> None:
    trained, served = (form_of(trace.manifest.draft["config"]) for trace in healthy[1:])
    assert trained == served
    assert (trained.heads, trained.kv_heads, trained.head_dim, trained.layer_ids) == (4, 2, 32, (2, 4, 5))


def test_a_rope_kind_that_is_not_known_is_said_and_not_guessed(healthy: tuple[Diff, Trace, Trace]) -> None:
    assert Rope(kind="longrope").frequencies(32) is None
    replay = Context(*healthy).replay
    assert replay is not None
    changed = replay.varied(rope=Rope(kind="longrope"))
    assert changed.recompute("layer.0.attn.q_rope", 0) == "rope type 'longrope' is not known here"
    assert isinstance(changed.form, Form)


def test_diagnosis_of_traces_without_configs_says_what_is_missing(healthy: tuple[Diff, Trace, Trace]) -> None:
    _, train, serve = healthy
    bare = open_trace(train.path)
    bare.manifest.draft.clear()
    result = diagnosed(diff(bare, serve), bare, serve)
    assert result.diagnosis is not None
    left = {one.cause: one.evidence for one in result.diagnosis.of("not_tested")}
    assert "no config of the draft" in left["norm-eps"]
