"""How near each token of a target with experts came to other ones, read from routers as transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from eagle_trace_training.routing import AROUND, KEPT, Routing, expert_count

TOKENS, HIDDEN, EXPERTS, TAKEN = 12, 8, 16, 3


class Block(nn.Module):
    """Experts, and a router that scores them in one of the ways that targets do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.bias = nn.Parameter(torch.randn(EXPERTS) * 0.1)
        self.way = way
        self.scores: Any = None

    def forward(self, hidden: Any) -> Any:
        rows = hidden.reshape(-1, HIDDEN)
        scores = self.gate(rows)
        if self.way == "softmax":
            scores = scores.softmax(dim=-1)
        elif self.way != "logits":
            scores = scores.sigmoid() + self.bias
        if self.way == "groups":
            # of 4 groups 2, by the sum of their two best, as DeepSeek-V3's
            best = scores.view(-1, 4, EXPERTS // 4).topk(2, dim=-1)[0].sum(dim=-1)
            mask = torch.zeros_like(best).scatter(1, torch.topk(best, k=2, dim=-1, sorted=False)[1], 1)
            scores = scores.masked_fill(mask.repeat_interleave(EXPERTS // 4, dim=1) == 0, float("-inf"))
        self.scores = scores
        if self.way == "sorted":
            chosen = scores.sort(dim=-1, descending=True)[1][:, :TAKEN]
        else:
            chosen = torch.topk(scores, TAKEN, dim=-1, sorted=False)[1]
        every = torch.stack([expert(rows) for expert in self.experts], dim=1)
        return hidden + every.gather(1, chosen[:, :, None].expand(-1, -1, HIDDEN)).sum(dim=1).view_as(hidden)


class Decoder(nn.Module):
    """A dense layer, and one with experts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(HIDDEN, HIDDEN)), nn.Sequential(Block(way))])

    def forward(self, hidden: Any) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        # a choice that is no router's
        return hidden, torch.topk(hidden.reshape(-1, HIDDEN), 2)


def ran(way: str, last: int = 2) -> tuple[Routing, Decoder, Any, Any]:
    """The margins of a decoder run in bfloat16 and in float32, and the scores of both runs."""
    torch.manual_seed(0)
    decoder = Decoder(way).to(torch.bfloat16)
    hidden = torch.randn(1, TOKENS, HIDDEN)
    routing = Routing(decoder, last, "bfloat16")
    with torch.inference_mode():
        plain = decoder(hidden.bfloat16())[0]
        with routing.watching():
            assert torch.equal(plain, decoder(hidden.bfloat16())[0]), "what is looked at stays what it is"
            routing.keep(7)
            low = decoder.layers[1][0].scores.double()
            decoder.float()(hidden.bfloat16().float())
            routing.measure(7)
    return routing, decoder, low, decoder.layers[1][0].scores.double()


@pytest.mark.parametrize("way", ["softmax", "sigmoid", "logits"])
def test_a_cut_is_the_gap_behind_the_last_expert_taken_and_what_the_reference_says_rounding_does(way: str) -> None:
    routing, _, low, high = ran(way)
    assert (routing.layers, routing.unread) == ([1], [])
    records = list(routing.records())
    assert {(one["prompt_id"], one["root"], one["layer"]) for one in records} == {(7, n, 1) for n in range(TOKENS)}
    best, index = low.sort(dim=-1, descending=True)
    around = index[:, : TAKEN + AROUND]
    spread = 2**0.5 * (low - high).gather(1, around).std(dim=1)
    for one in records:
        root = one["root"]
        assert one["gap"] == pytest.approx(float(best[root, TAKEN - 1] - best[root, TAKEN]))
        # what is rounded is one rounding at least, and one row's noise not above four times the median's
        rounded = 0.425 * 2**-8 * float(best[root, TAKEN - 1 : TAKEN + 1].norm())
        expected = max(min(float(spread[root]), 4 * float(spread.median())), rounded)
        assert one["noise"] == pytest.approx(expected, rel=1e-5)


def test_a_choice_of_groups_counts_as_the_choice_of_experts_does() -> None:
    routing, decoder, _, _ = ran("groups")
    assert routing.layers == [1]
    alone = {one["root"]: one["gap"] / one["noise"] for one in routing.records()}
    assert len(alone) == TOKENS
    for block in decoder.modules():
        if isinstance(block, Block):
            finite = block.scores.isfinite().sum(dim=1)
            assert (finite == EXPERTS // 2).all(), "half of the experts are masked, and no gap is infinite"
    assert all(ratio < float("inf") for ratio in alone.values())


def test_a_choice_that_is_not_read_is_said_not_to_be() -> None:
    routing, _, _, _ = ran("sorted")
    assert (routing.layers, routing.unread) == ([], [1])
    assert list(routing.records()) == []


def test_layers_that_no_feature_depends_on_and_targets_without_experts_are_not_looked_at() -> None:
    routing, _, _, _ = ran("sigmoid", last=1)
    assert (routing.layers, routing.unread, list(routing.records())) == ([], [], [])


def test_of_each_token_narrow_cuts_are_kept_and_its_narrowest() -> None:
    routing, _, _, _ = ran("sigmoid")
    ratios = [one["gap"] / one["noise"] for one in routing.records()]
    assert len(ratios) == TOKENS
    assert max(ratios) > KEPT, "a token whose only cut is wide has it kept"


@pytest.mark.parametrize(
    ("experts", "count"),
    [
        (nn.ModuleList(nn.Linear(2, 2) for _ in range(5)), 5),
        (nn.ParameterDict({"up": torch.zeros(6, 2, 4), "down": torch.zeros(6, 4, 2), "bias": torch.zeros(6, 4)}), 6),
        (nn.ParameterDict({"up": torch.zeros(6, 2, 4), "down": torch.zeros(3, 4)}), 0),
    ],
)
def test_experts_are_counted_by_their_modules_or_their_stacked_weights(experts: nn.Module, count: int) -> None:
    assert expert_count(experts) == count
