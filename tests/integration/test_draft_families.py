"""Draft families on the real hosts: tiny random pairs, one SGLang start for each draft.

What both hosts compute agrees, and a fault planted in it is named. What SGLang's class does not compute is refused by
`export`, named by `check`, and by the diff where it is deployed all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle_trace import Trace, open_trace
from eagle_trace.errors import CheckpointError
from eagle_trace_analysis import Diff, diff
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import SECOND_NAMES, export
from eagle_trace_analysis.diagnosis.diagnose import diagnosed
from tests.support import faults
from tests.support.tiny_speculators import Pair, random_prompts, write_pair, write_prompts
from tests.support.verdicts import expect
from tests.support.warm.start import Warm

pytest.importorskip("speculators")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

#: SGLang captures no target layer behind the last but one, and the draft's third is the input of layer 4
TARGET_LAYERS = 6
Edit = Callable[[Any], object]


@dataclass
class Family:
    """A pair, the folder deployed, what was recorded of it, and room for more."""

    pair: Pair
    deployed: Path
    served: Trace
    folder: Path
    trained: int = 0

    def diffed(self, config: Edit | None = None, tensors: Edit | None = None) -> Diff:
        """The serving against the training, whose draft may be changed."""
        from eagle_trace_speculators.host import HOST

        self.trained += 1
        draft = self.pair.draft
        if config or tensors:
            draft = faults.edit(draft, self.folder / f"draft{self.trained}", config=config, tensors=tensors)
        out = self.folder / f"train{self.trained}.trace"
        train = open_trace(
            HOST.record(target=self.pair.target, draft=draft, replay=self.served.path, out=out, device="cpu")
        )
        return diagnosed(diff(train, self.served), train, self.served)


def family(
    folder: Path, warm: Warm, *, force: bool = False, edit: Callable[[Path], Path] | None = None, **kind: bool | int
) -> Family:
    """Write a pair, deploy its draft (through `edit`), and record SGLang with it."""
    from eagle_trace_serving.record import record

    pair = write_pair(folder, target_layers=TARGET_LAYERS, **kind)
    export(pair.draft, folder / "exported", target=pair.target, force=force)
    deployed = folder / "exported" if edit is None else edit(folder / "exported")
    with warm():
        out = record(
            target=pair.target,
            draft=deployed,
            prompts=write_prompts(folder / "prompts.jsonl", random_prompts([9, 14, 6])),
            out=folder / "serve.trace",
            dtype="float32",
            device="cpu",
            max_new_tokens=16,
            host_args=("--skip-tokenizer-init",),
        )
    return Family(pair, deployed, open_trace(out), folder)


def trouble(draft: Path, pair: Pair) -> dict[str, str]:
    """What `check` fails, by the check's name."""
    found = check(draft, target=pair.target, reference=pair.draft)
    return {one.name: one.evidence for one in found.findings if one.status == "fail"}


def dropping(*parts: str) -> Edit:
    """Leave out the tensors whose names begin so."""
    return lambda held: [held.pop(name) for name in list(held) if name.startswith(parts)]


# ---- two layers, one norm before fc, the normed stream carried; a target that norms queries and keys -----------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Family:
    folder = tmp_path_factory.mktemp("deep")
    return family(folder, warm, draft_layers=2, qwen3_target=True, norm_before_fc=True, norm_output=True)


def test_two_layers_on_a_qwen3_target_agree(deep: Family) -> None:
    result = deep.diffed()
    expect(result, None, None)
    assert {"layer.0.attn.q_rope", "layer.1.attn.q_rope", "layer.0.out", "layer.1.out"} <= {
        one.site for one in result.sites
    }
    assert result.coverage.matched == result.coverage.train_rows
    assert trouble(deep.deployed, deep.pair) == {}
    assert trouble(deep.pair.draft, deep.pair) == {}


def test_the_parameters_of_both_layers_are_held_as_trained(deep: Family) -> None:
    held = deep.served.params.set_index("canonical_name")
    assert held["in_checkpoint"].drop("embed_tokens.weight", errors="ignore").all()
    assert held.loc["layers.1.input_layernorm.weight", "name"] == "model.layers.1.hidden_norm.weight"
    assert "layers.1.hidden_norm.weight" not in held.index
    assert not deep.served.manifest.warnings


def test_a_norm_before_fc_that_training_did_not_have_is_named(deep: Family) -> None:
    off = {"norm_before_fc": False}
    expect(deep.diffed(lambda c: c.update(off), dropping("input_norm.")), "fc-norm-ignored", "fc.in")


def test_another_carry_than_trained_is_named(deep: Family) -> None:
    expect(deep.diffed(lambda c: c.update(norm_output=False)), "carry-norm", "carry")


def test_a_weight_of_the_second_layer_that_differs_is_named(deep: Family) -> None:
    name = "layers.1.mlp.up_proj.weight"
    result = deep.diffed(tensors=lambda held: held.update({name: 1.5 * held[name]}))
    assert result.first_divergence is not None
    assert (result.first_divergence.site, result.first_divergence.step) == ("layer.1.mlp.up", 0)


# ---- a norm for each feature; the checkpoint spelled as older releases spelled it ------------------------------------


@pytest.fixture(scope="module")
def old_names(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Family:
    older = {"layers.0.": "midlayer.", "fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid."}

    def rename(held: dict[str, Any]) -> None:
        for name in list(held):
            for new, old in older.items():
                if name.startswith(new):
                    held[old + name.removeprefix(new)] = held.pop(name)

    folder = tmp_path_factory.mktemp("old-names")
    return family(folder, warm, fc_norm=True, edit=lambda out: faults.edit(out, folder / "renamed", tensors=rename))


def test_older_names_and_a_norm_for_each_feature_agree(old_names: Family) -> None:
    expect(old_names.diffed(), None, None)
    assert trouble(old_names.deployed, old_names.pair) == {}
    assert not old_names.served.manifest.draft["dropped_keys"]
    assert old_names.served.params.set_index("canonical_name").loc["layers.0.mlp.up_proj.weight", "in_checkpoint"]


def test_feature_norms_that_training_did_not_have_are_named(old_names: Family) -> None:
    off = {"fc_norm": False}
    expect(old_names.diffed(lambda c: c.update(off), dropping("fc_norm.")), "fc-norm-ignored", "fc.in")


# ---- a draft of two layers whose weights were copied by hand ---------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Family:
    def edit(out: Path) -> Path:
        (out / SECOND_NAMES).unlink()
        return out

    return family(tmp_path_factory.mktemp("by-hand"), warm, draft_layers=2, edit=edit)


def test_a_second_layers_norm_under_speculators_name_is_named(by_hand: Family) -> None:
    expect(by_hand.diffed(), "weights-missing", "layer.1.hidden_norm")
    assert "layers.1.hidden_norm.weight" in trouble(by_hand.deployed, by_hand.pair)["weights-present"]


# ---- what SGLang's class does not compute ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Family:
    return family(tmp_path_factory.mktemp("qwen3"), warm, qwen3=True, force=True)


def test_a_qwen3_draft_is_refused_and_told_why(qwen3: Family, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"decoder layer is qwen3.*no q_norm and k_norm"):
        export(qwen3.pair.draft, tmp_path / "out", target=qwen3.pair.target)
    assert "q_norm" in trouble(qwen3.pair.draft, qwen3.pair)["decoder-layer"]
    assert "q_norm" in trouble(qwen3.deployed, qwen3.pair)["decoder-layer"]


def test_a_qwen3_draft_that_is_deployed_all_the_same_is_named(qwen3: Family) -> None:
    assert sorted(qwen3.served.manifest.draft["dropped_keys"]) == [
        "layers.0.self_attn.k_norm.weight",
        "layers.0.self_attn.q_norm.weight",
    ]
    expect(qwen3.diffed(), "weights-dropped", "layer.0.attn.q")
