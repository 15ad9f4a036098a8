"""How near each token of a target with experts came to being sent to other ones: the rows of routing.parquet.

A router sends a token to the k experts of the highest score. Where the k-th and the next score are nearer to each
other than rounding moves them, two right implementations may choose differently. How far it moves them is measured:
the same scores once more, in the reference dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from eagle_trace.recording.hooks import Hooks

#: scores on either side of the cut that tell what rounding does to scores of this size
AROUND = 4
#: a cut is kept up to this many times what rounding does there; a token's narrowest one always
KEPT = 16.0
#: one row's noise is believed up to this many times the layer's median: a token that the reference sent elsewhere
#: below has another hidden state, and not more rounding
BELIEVED = 4.0
#: RMS relative error of one rounding, in units in the last place
ONE_ROUNDING = 0.425


@dataclass
class _Cut:
    """One selection of a layer for all tokens of a prompt.

    Attributes:
        index: which scores were nearest to the cut, best first, int64 [T, W].
        scores: they, float32 [T, W].
        place: of the last one that was taken.
    """

    index: Any
    scores: Any
    place: int

    @classmethod
    def of(cls, scores: Any, taken: int) -> _Cut:
        """The cut behind the `taken` best of `scores` [T, N]."""
        first, end = max(0, taken - AROUND), min(scores.shape[1], taken + AROUND)
        best, index = torch.sort(scores, dim=-1, descending=True, stable=True)
        return cls(index[:, first:end].cpu(), best[:, first:end].float().cpu(), taken - 1 - first)

    @property
    def gap(self) -> Any:
        """Last score that was taken less the first that was not, [T]; infinite where no other could be taken."""
        return self.scores[:, self.place] - self.scores[:, self.place + 1]

    def noise(self, reference: Any, unit: float) -> Any:
        """What rounding does to the gap, [T]: by the same scores in the reference dtype [T, N]."""
        moved = self.scores.double() - reference.double().cpu().gather(1, self.index)
        known = moved.isfinite()  # scores of a group that is left out are not
        count = known.sum(dim=1)
        moved = torch.where(known, moved, 0.0)
        centred = torch.where(known, moved - (moved.sum(dim=1) / count.clamp(min=1))[:, None], 0.0)
        # of a difference of two scores: twice the variance of one
        spread = (2 * (centred**2).sum(dim=1) / (count - 1).clamp(min=1)).sqrt()
        limited = torch.minimum(spread, BELIEVED * spread.median())
        rounded = ONE_ROUNDING * unit * self.scores[:, self.place : self.place + 2].double().norm(dim=1)
        return torch.maximum(limited, rounded.nan_to_num(posinf=0.0)).clamp(min=torch.finfo(torch.float32).tiny)


class Routing:
    """Margins of every router that a feature depends on.

    A router is whatever takes the best of one score for each expert, by `torch.topk`, in a module that holds
    ``experts``: that is what the routers of transformers have in common, whatever they make scores of (softmax,
    sigmoid, a correction bias, a mask of groups). A choice of groups by `torch.topk` counts too. A module that has
    experts and chooses them in another way is not read, and said not to be.

    Args:
        decoder: the target's decoder.
        last: the highest layer whose input is a feature.
        dtype: name of the serving dtype.

    Attributes:
        layers: numbers of the decoder layers with experts that were read.
        unread: those that choose experts in a way that is not known here.
    """

    def __init__(self, decoder: Any, last: int, dtype: str) -> None:
        self._unit = torch.finfo(getattr(torch, dtype)).eps / 2
        self._blocks = {
            number: block
            for number, layer in enumerate(decoder.layers[:last])
            for block in layer.modules()
            if isinstance(getattr(block, "experts", None), torch.nn.Module) and expert_count(block.experts) != 1
        }
        self._now: int | None = None
        self._seen: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        self._cuts: dict[int, dict[int, list[_Cut]]] = {}
        self._found: dict[int, dict[int, tuple[Any, Any]]] = {}

    @property
    def layers(self) -> list[int]:
        """Decoder layers whose choice of experts was read for every prompt, ascending."""
        of_all = [set(one) for one in self._found.values()]
        return sorted(set.intersection(*of_all)) if of_all else []

    @property
    def unread(self) -> list[int]:
        """Decoder layers that have experts and were not read, ascending."""
        return sorted(set(self._blocks) - set(self.layers))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, forwards of the decoder are looked at; their results stay what they are."""
        if not self._blocks:
            yield
            return
        with Hooks() as hooks, _TopK(self._take):
            for number, block in self._blocks.items():
                hooks.before(block, partial(self._enter, number))
                hooks.after(block, partial(self._enter, None))
            yield

    def _enter(self, layer: int | None, *_of_forward: Any) -> None:
        self._now = layer

    def _take(self, scores: Any, taken: int) -> None:
        if self._now is not None and scores.dim() == 2 and taken < scores.shape[1]:
            self._seen[self._now].append((scores.clone(), taken))

    def _choices(self, layer: int) -> list[tuple[Any, int]]:
        """What a layer chose from for each token, all of its experts among it; [] if that is not known."""
        experts = expert_count(self._blocks[layer].experts)
        tokens = {scores.shape[0] for scores, _ in self._seen[layer] if scores.shape[1] == experts}
        return [one for one in self._seen[layer] if one[0].shape[0] in tokens] if len(tokens) == 1 else []

    def keep(self, prompt_id: int) -> None:
        """Keep what the last forward, of one prompt in the serving dtype, showed."""
        found = {layer: self._choices(layer) for layer in self._blocks}
        self._cuts[prompt_id] = {
            layer: [_Cut.of(*one) for one in choices] for layer, choices in found.items() if choices
        }
        self._seen.clear()

    def measure(self, prompt_id: int) -> None:
        """Hold it against the last forward, of the same prompt in the reference dtype."""
        found = self._found[prompt_id] = {}
        for layer, cuts in self._cuts.pop(prompt_id, {}).items():
            again = self._choices(layer)
            if len(again) != len(cuts):
                continue
            gaps = torch.stack([one.gap.double() for one in cuts])
            noise = torch.stack([one.noise(two, self._unit) for one, (two, _) in zip(cuts, again, strict=True)])
            # of several choices, the one that is nearest to another one
            nearest = (gaps / noise).argmin(dim=0, keepdim=True)
            found[layer] = gaps.gather(0, nearest)[0], noise.gather(0, nearest)[0]
        self._seen.clear()

    def records(self) -> Iterator[dict[str, Any]]:
        """Rows of the table: of each token the cuts that are narrow, and its narrowest."""
        layers = self.layers
        for prompt_id, found in self._found.items():
            if not layers:
                continue
            gaps, noise = (torch.stack([found[layer][part] for layer in layers]) for part in (0, 1))
            ratio = gaps / noise
            kept = ((ratio <= KEPT) | (ratio == ratio.min(dim=0).values)) & ratio.isfinite()
            for at, root in kept.nonzero().tolist():
                yield {
                    "prompt_id": prompt_id,
                    "root": root,
                    "layer": layers[at],
                    "gap": float(gaps[at, root]),
                    "noise": float(noise[at, root]),
                }


class _TopK(TorchFunctionMode):
    """Calls `seen(input, k)` behind every `torch.topk` along the last dimension."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self._tell = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            given = args[0] if args else (kwargs or {})["input"]
            if found[1].shape[:-1] == given.shape[:-1]:
                self._tell(given, found[1].shape[-1])
        return found


def expert_count(experts: Any) -> int:
    """How many experts a module called ``experts`` holds: one module each, or stacked; 0 if it cannot be told."""
    if isinstance(experts, torch.nn.ModuleList):
        return len(experts)
    stacked = [one.shape[0] for one in getattr(experts, "parameters", list)() if one.dim() >= 2]
    return stacked[0] if stacked and len(set(stacked)) == 1 else 0
