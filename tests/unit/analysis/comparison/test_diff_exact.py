"""Shapes, presence, tokens, positions and ids, compared exactly; what cannot be compared; accept length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from eagle_trace import Trace
from eagle_trace.capture import Rows
from eagle_trace.sites import draft_sites
from eagle_trace_analysis import IdMetrics, Metrics, diff
from eagle_trace_analysis.comparison.checks import Shapes, two_drafts
from tests.support.synthetic import (
    DRAFT_VOCAB,
    F64,
    HIDDEN,
    Draft,
    Prompt,
    make_prompts,
    only,
)
from tests.support.verdicts import first, result_of

CHAINS = make_prompts()


# ---- shapes and presence
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["values", "stats", "shapes"])
def test_single_layer_features_part_at_fused_by_shape(level: str, write: Any) -> None:
    result = diff(write("train"), write("serve", single_layer=True, level=level))
    assert first(result) == ("fused", 0, "shape")
    found = result.first_divergence
    assert found is not None
    assert (found.train["shape"], found.serve["shape"]) == (["T", 3 * HIDDEN], ["T", HIDDEN])
    assert len(result.frontier) == 1


def test_drafts_of_two_widths_are_two_drafts_and_are_not_compared() -> None:
    def shapes(hidden: int) -> Shapes:
        return {site.name: {(hidden * (3 if site.axes[0] == "n*G" else 1), "float32")} for site in sites}

    sites = [site for site in draft_sites() if site.kind == "value"]
    traces = [cast("Trace", SimpleNamespace(path=name)) for name in ("a.trace", "b.trace")]
    assert two_drafts(*traces, sites, (shapes(96), shapes(96))) is None
    said = two_drafts(*traces, sites, (shapes(96), shapes(128)))
    assert said is not None
    assert said.startswith("a.trace is of a draft that is 96 wide, b.trace of one that is 128 wide")
    # one site that is otherwise is a divergence of that site
    assert two_drafts(*traces, sites, (shapes(96), shapes(96) | {"embed": {(128, "float32")}})) is None


def test_shape_comes_before_numbers_of_earlier_sites(write: Any) -> None:
    def fault(site: str, step: int, rows: Rows, values: F64) -> F64:
        if site == "layer.0.mlp.act":
            return values
        return values[:, : DRAFT_VOCAB // 2] if site == "logits" else values * (1.1 if site == "embed" else 1.0)

    assert first(diff(write("train"), write("serve", fault=fault))) == ("logits", 0, "shape")


@pytest.mark.parametrize("side", ["train", "serve"])
def test_a_site_on_one_side_only_is_a_divergence_unless_the_manifest_excuses_it(side: str, write: Any) -> None:
    site = "layer.0.mlp.gate"
    other = {"train": "serve", "serve": "train"}[side]
    made = {side: write(side, without=(site,)), other: write(other)}
    result = diff(made["train"], made["serve"])
    assert first(result) == (site, 0, "presence")
    excuse = [{"site": site, "rows": "all", "why": "fused kernel"}]
    excuse += [{"site": one, "rows": "prefill", "why": "last row only"} for one in ("logits", "topk.*")]
    made[side] = write(side, without=(site,), not_materialised=excuse)
    result = diff(made["train"], made["serve"])
    assert result.verdict == "agree", result.first_divergence
    assert result_of(result, site).reason == "fused kernel"


def test_a_fault_behind_a_site_that_was_not_compared_is_the_first(write: Any) -> None:
    excuse = [{"site": "layer.0.mlp.*", "rows": "all", "why": "fused kernel"}]
    without = ("layer.0.mlp.gate", "layer.0.mlp.up")
    fault = only("layer.0.mlp.norm", 0, lambda _, values: values * 1.1)
    serve = write("serve", without=without, not_materialised=excuse, fault=fault)
    assert [one.site for one in diff(write("train"), serve).frontier] == ["layer.0.mlp.norm"]


def test_topk_that_one_level_keeps_and_the_other_does_not_is_no_divergence(write: Any) -> None:
    result = diff(write("train"), write("serve", level="shapes", without=("topk.draft_id",)))
    assert result.verdict == "agree"


# ---- integers
# ---------------------------------------------------------------------------------------------------


def changed_tokens(prompts: list[Prompt], change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> list[Prompt]:
    return [replace(prompt, tokens=change(prompt.tokens)) for prompt in prompts]


def test_a_bos_in_front_is_a_token_divergence_with_both_ids(write: Any) -> None:
    with_bos = [replace(prompt, tokens=(77, *prompt.tokens), length=prompt.length + 1, chains=()) for prompt in CHAINS]
    result = diff(write("train", with_bos), write("serve"))
    assert first(result) == ("token", 0, "tokens")
    found = result.first_divergence
    assert found is not None
    assert (found.train["token"], found.serve["token"]) == (77, CHAINS[0].tokens[0])
    assert found.train["token_position"] == 0
    assert "one more token in front" in found.why


def test_a_truncated_prompt_is_a_token_divergence(write: Any) -> None:
    cut = [replace(prompt, tokens=prompt.tokens[:6], length=6, chains=()) for prompt in CHAINS]
    result = diff(write("train", cut), write("serve"))
    assert first(result) == ("token", 0, "tokens")
    found = result.first_divergence
    assert found is not None
    assert (found.train["token"], found.train["token_position"]) == (None, 6)


def test_an_input_shift_is_a_token_divergence_at_a_row(write: Any) -> None:
    train = write("train")
    prompts = [replace(prompt, tokens=(prompt.tokens[0], *prompt.tokens[:-1])) for prompt in CHAINS]
    result = diff(train, write("serve", prompts))
    assert first(result) == ("token", 0, "tokens")
    metrics = result_of(result, "token").metrics
    assert isinstance(metrics, IdMetrics)
    assert metrics.differing > 20


def test_a_constant_position_shift_is_benign_and_named(write: Any) -> None:
    result = diff(write("train", position_shift=lambda *_: 1), write("serve"))
    assert result.verdict == "agree", result.first_divergence
    note = next(note for note in result.benign if note.name == "position-offset")
    assert "+1" in note.text
    rotated = result_of(result, "layer.0.attn.q_rope")
    assert rotated.verdict == "not compared"
    assert "position" in rotated.reason
    assert result_of(result, "layer.0.attn.context").verdict == "agree"


@pytest.mark.parametrize(
    ("shift", "step"),
    [
        pytest.param(lambda _, step: step, 1, id="later-steps-ahead"),
        pytest.param(lambda _, step: 1 + (step == 2), 2, id="one-step-on-top-of-a-constant"),
        pytest.param(lambda root, _: int(root > 7), 0, id="from-a-root-on"),
    ],
)
def test_a_position_shift_that_is_not_constant_is_a_divergence(shift: Any, step: int, write: Any) -> None:
    result = diff(write("train", position_shift=shift), write("serve"))
    assert first(result) == ("position", step, "positions")
    assert "position-offset" not in [note.name for note in result.benign]


def test_a_wrong_d2t_is_named_at_target_id_and_logits_agree(healthy_train: Trace, write: Any) -> None:
    wrong = Draft().d2t - np.arange(DRAFT_VOCAB)
    result = diff(healthy_train, write("serve", d2t=wrong))
    assert first(result) == ("topk.target_id", 0, "ids")
    assert result_of(result, "logits").verdict == "agree"
    assert result_of(result, "topk.draft_id").verdict == "agree"


def test_a_wrong_d2t_is_listed_beside_wrong_logits(healthy_train: Trace, write: Any) -> None:
    fault = only("logits", 0, lambda _, values: values * 1.1)
    result = diff(healthy_train, write("serve", d2t=np.zeros(DRAFT_VOCAB, dtype=int), fault=fault))
    assert [one.site for one in result.frontier if one.step == 0] == ["logits", "topk.target_id"]


def test_flips_of_a_tie_are_benign(write: Any) -> None:
    def tie(order: float) -> Any:
        def fault(site: str, step: int, rows: Rows, values: F64) -> F64:
            if site != "logits":
                return values
            values = values.copy()
            values[:, 7] = values[:, 9] = 20.0
            values[:, 7] += order * 1e-6
            values[:, 9] -= order * 1e-6
            return values

        return fault

    result = diff(write("train", fault=tie(1)), write("serve", fault=tie(-1)))
    assert result.verdict == "agree", result.first_divergence
    metrics = result_of(result, "topk.draft_id").metrics
    assert isinstance(metrics, IdMetrics)
    assert (metrics.differing, metrics.excused) == (metrics.rows - metrics.rows, metrics.rows)
    assert "tie-flips" in [note.name for note in result.benign]


def test_flips_beyond_what_the_logits_allow_are_a_divergence(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = write("train")
    import tests.support.synthetic as synthetic

    def wrong_best_ids(logits: Any, count: int) -> Any:
        ids, scores, logprobs = synthetic_best_ids(logits, count)
        return ids[:, ::-1].copy(), scores[:, ::-1].copy(), logprobs

    synthetic_best_ids = synthetic.best_ids
    monkeypatch.setattr(synthetic, "best_ids", wrong_best_ids)
    result = diff(train, write("serve"))
    assert first(result) == ("topk.draft_id", 0, "ids")


def test_flips_that_follow_from_wrong_logits_are_no_ties(healthy_train: Trace, write: Any) -> None:
    fault = only("logits", 0, lambda _, values: values[:, ::-1].copy())
    result = diff(healthy_train, write("serve", fault=fault))
    assert [one.site for one in result.frontier] == ["logits"]
    assert result_of(result, "topk.draft_id").verdict == "diverged"
    assert "tie-flips" not in [note.name for note in result.benign]


# ---- what cannot be compared
# --------------------------------------------------------------------------------------


def test_other_prompts_are_incomparable_and_both_sides_are_named(healthy_train: Trace, write: Any) -> None:
    others = [replace(prompt, key=f"other-{prompt.key}") for prompt in CHAINS]
    result = diff(healthy_train, write("serve", others))
    assert (result.verdict, result.exit_status) == ("incomparable", 2)
    assert "prompt-0" in str(result.incomparable)
    assert "other-prompt-0" in str(result.incomparable)


def test_a_share_below_the_minimum_is_no_agreement(healthy_train: Trace, write: Any) -> None:
    more = [*CHAINS, *(replace(prompt, key=f"more-{prompt.key}") for prompt in CHAINS * 2)]
    more = [replace(prompt, key=f"{prompt.key}-{n}") if n >= 3 else prompt for n, prompt in enumerate(more)]
    serve = write("serve", more)
    result = diff(healthy_train, serve)
    assert result.verdict == "incomparable"
    assert "--minimum-share" in str(result.incomparable)
    assert diff(healthy_train, serve, minimum_share=0.2).verdict == "agree"


def test_a_divergence_needs_no_minimum_share(healthy_train: Trace, write: Any) -> None:
    fault = only("embed", 0, lambda _, values: values * 1.1)
    more = [*CHAINS, *(replace(prompt, key=f"more-{n}") for n, prompt in enumerate(CHAINS * 2))]
    assert diff(healthy_train, write("serve", more, fault=fault)).verdict == "diverged"


def test_the_same_prompts_without_replay_agree_and_say_that_no_draft_step_was_compared(write: Any) -> None:
    short = [replace(prompt, tokens=prompt.tokens[: prompt.length], chains=()) for prompt in CHAINS]
    result = diff(write("train", short), write("serve"))
    assert result.verdict == "agree", result.incomparable
    assert "draft-steps" in [note.name for note in result.notes]


def test_a_site_without_rows_in_common_is_not_said_to_agree(write: Any) -> None:
    # the server computes logits from the last prompt row on, training (without replay) up to the row before
    # it
    short = [replace(prompt, tokens=prompt.tokens[: prompt.length], chains=()) for prompt in CHAINS]
    logits = result_of(diff(write("train", short), write("serve")), "logits")
    assert (logits.verdict, logits.coverage.matched) == ("not compared", 0)


# ---- accept length
# ------------------------------------------------------------------------------------------------


def test_accept_length_counts_the_bonus_token(healthy_train: Trace, write: Any) -> None:
    def round_of(prompt: int, number: int, accepted: list[int], parents: list[int]) -> dict[str, Any]:
        proposed = [1, 2, 3]
        return {
            "prompt_id": prompt, "round": number, "root": 9, "proposed": proposed, "parents": parents,
            "target_argmax": [], "accepted": accepted, "bonus": 5,
        }  # fmt: skip

    chain, tree = [0, 1, 2], [0, 0, 1]
    rounds = [round_of(2, 1, [1, 2, 3], chain), round_of(2, 2, [], chain), round_of(1, 1, [1], tree)]
    accept = diff(healthy_train, write("serve", rounds=rounds)).accept_length
    assert accept.observed == pytest.approx((4 + 1 + 2) / 3)
    assert accept.rounds == 3
    # depth 3 was proposed by the chains alone, and reached by one of them
    assert accept.by_depth == pytest.approx((2 / 3, 1 / 2, 1.0))
    # the serve side numbers its prompts backwards
    assert accept.by_prompt == {"prompt-0": 2.5, "prompt-1": 2.0}


def test_accept_length_is_not_known_without_rounds(healthy_train: Trace, write: Any) -> None:
    assert diff(healthy_train, write("serve")).accept_length.observed is None


def test_metrics_hold_what_was_measured(healthy_train: Trace, write: Any) -> None:
    result = diff(healthy_train, write("serve", fault=only("logits", 1, lambda _, values: values * 1.045)))
    metrics = result_of(result, "logits", 1).metrics
    assert isinstance(metrics, Metrics)
    assert metrics.scale_median == pytest.approx(1.045, rel=1e-4)
    assert metrics.kl_mean is not None
    assert metrics.kl_mean > 0
    assert result_of(result, "logits", 0).metrics.flips == 0
