"""What is written down of vLLM (`eagle_trace_analysis.engines.vllm`) against the classes that are installed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_trace_analysis import engines
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.engines.vllm import engine
from eagle_trace_vllm.releases import RELEASES
from tests.support import rope_numbers
from tests.support.tiny_speculators import LAYER_IDS, random_prompts, write_pair, write_prompts
from tests.vllm.conftest import Serve, Train

pytestmark = pytest.mark.vllm


def registry() -> dict[str, tuple[str, str]]:
    """Module and class of every architecture that the installed vLLM registers, by its sources."""
    tree = ast.parse((RELEASES.installed()[1] / "model_executor/models/registry.py").read_bytes())
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    found[key.value] = tuple(ast.literal_eval(value))
    return found


def test_every_name_of_the_two_classes_is_known() -> None:
    names = {name for name, (_, cls) in registry().items() if cls in (engine.ARCHITECTURE, engine.QWEN3)}
    # P-EAGLE drafts are another kind, served by the same classes
    assert {name for name in names if "eagle" not in name.lower().replace("eagle3", "")} == engine.ARCHITECTURES


def test_the_target_classes_are_registered() -> None:
    assert set(registry()) >= engines.ENGINES["vllm"].target_class.__globals__["SERVES"]


FORMS: list[dict[str, Any]] = [
    {},
    {"draft_layers": 2},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
    {"qwen3": True},
    {"full_vocab": True},
]


def _loaded(folder: Path, target: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of the draft as vLLM's own class makes them, by trained names."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from eagle_trace.recording.names import FUSED, canonical_name

    arguments = EngineArgs(
        model=str(target), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        speculative_config={"model": str(folder), "method": "eagle3", "num_speculative_tokens": 3},
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        assert config.speculative_config is not None
        model = initialize_model(config, model_config=config.speculative_config.draft_model_config)
    shapes = {}
    for name, parameter in model.named_parameters():
        whole = next((one for one in FUSED if f".{one}." in name), None)
        for part in FUSED[whole] if whole else ("",):
            shapes[canonical_name(name.replace(whole or "", part))] = tuple(parameter.shape)
    return shapes


@pytest.mark.parametrize("form", FORMS, ids=[",".join(form) or "plain" for form in FORMS])
def test_the_class_has_the_parameters_that_the_table_lists(form: dict[str, Any], tmp_path: Path) -> None:
    vllm = engines.ENGINES["vllm"]
    pair, flat = write_pair(tmp_path / "pair", head_dim=32, **form), tmp_path / "flat"
    export(pair.draft, flat, target=pair.target, engine=vllm)
    listed = engine.parameters(json.loads((flat / "config.json").read_text()))
    for draft in (pair.draft, flat):
        found = _loaded(draft, pair.target)
        found.pop("draft_id_to_target_id", None)
        # of a later layer the class has a norm that it never applies
        used = {name for name in found if ".hidden_norm." not in name or name.startswith("layers.0.")}
        assert used == set(listed)
        assert found["fc.weight"] == listed["fc.weight"]
        assert check(draft, target=pair.target, reference=pair.draft, engine=vllm).exit_status == 0


def _rotates(config: dict[str, Any]) -> bool:
    """Whether vLLM builds tables of cosines and sines that can be computed with."""
    import torch
    from vllm.model_executor.layers.rotary_embedding import get_rope

    try:
        made = get_rope(
            config["head_dim"], config["max_position_embeddings"], True, dict(config["rope_parameters"]), torch.float32
        )
    except Exception:  # noqa: BLE001 - whatever stops the engine
        return False
    return bool(len(made.cos_sin_cache) and made.cos_sin_cache.isfinite().all() and made.cos_sin_cache.any())


def test_a_rotary_embedding_passes_exactly_where_the_tables_are_numbers() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    wrong, judged = [], 0
    # longrope asks a whole model's config
    cells = [cell for cell in rope_numbers.cells() if cell[0].startswith("llama") and "longrope" not in cell[0]]
    with set_current_vllm_config(VllmConfig()):
        for name, config in cells:
            vllm = engines.ENGINES["vllm"]
            sound = not vllm.refusals(config) and vllm.rotation_fault(vllm.with_defaults(config)) is None
            judged += 1
            if sound != _rotates(config):
                wrong.append(f"{name}: {'passes' if sound else 'fails'}, and should not")
    assert judged > 250
    assert not wrong, "\n".join(wrong)


def test_what_export_writes_is_served_as_it_was_trained(folder: Path, serve: Serve, train: Train) -> None:
    from eagle_trace_analysis import diff

    pair = write_pair(folder / "flat", head_dim=32, norm_before_residual=True, qwen3=True)
    export(pair.draft, folder / "flat/served", target=pair.target, engine=engines.ENGINES["vllm"])
    prompts = write_prompts(folder / "flat.jsonl", random_prompts([30, 20]))
    trace = serve(target=pair.target, draft=folder / "flat/served", prompts=prompts, max_new_tokens=6)
    assert trace.manifest.settings["layer_ids"] == list(LAYER_IDS)
    assert diff(train(trace, target=pair.target, draft=pair.draft), trace).verdict == "agree"
