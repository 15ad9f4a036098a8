"""The demo models as shipped: small, whole, and in the conventions each host expects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from eagle_trace.demo import build, models_dir, prompts_file
from eagle_trace_analysis.checkpoint.check import check
from eagle_trace_analysis.checkpoint.export import export

DRAFT = models_dir() / "draft"
TARGET = models_dir() / "target"
KIMI = models_dir() / "kimi"


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def shipped_files() -> list[Path]:
    return [prompts_file(), *(p for p in models_dir().rglob("*") if p.is_file())]


@pytest.fixture(scope="module")
def vocabulary() -> tuple[np.ndarray, np.ndarray]:
    with safe_open(DRAFT / "model.safetensors", framework="numpy") as weights:
        return weights.get_tensor("d2t"), weights.get_tensor("t2d")


def test_all_shipped_files_together_stay_under_5_mb() -> None:
    assert sum(p.stat().st_size for p in shipped_files()) <= 5_000_000


def test_the_kimi_target_is_in_the_layout_of_the_published_checkpoint() -> None:
    config = read_json(KIMI / "target/config.json")
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (config["model_type"], config["text_config"]["model_type"]) == ("kimi_k25", "kimi_k2")
    assert config["text_config"]["rope_scaling"]["type"] == "yarn"
    with safe_open(KIMI / "target/model.safetensors", framework="numpy") as weights:
        names = set(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"} <= names
    assert "language_model.model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert {name.partition(".")[0] for name in names} == {"language_model", "vision_tower", "mm_projector"}


def test_the_kimi_draft_passes_the_static_check_as_saved_and_as_exported(tmp_path: Path) -> None:
    export(KIMI / "draft", tmp_path / "out", target=KIMI / "target")
    saved = check(KIMI / "draft", target=KIMI / "target")
    deployed = check(tmp_path / "out", target=KIMI / "target", reference=KIMI / "draft")
    assert [one for result in (saved, deployed) for one in result.findings if one.status in ("fail", "warn")] == []


def test_the_one_file_of_code_among_the_models_is_the_processor_that_sglang_asks_kimi_for() -> None:
    (code,) = [path for path in shipped_files() if path.suffix == ".py"]
    assert code == KIMI / "target/processing_tiny.py"
    config = read_json(KIMI / "target/processor_config.json")
    assert config["auto_map"] == {"AutoProcessor": f"{code.stem}.TinyProcessor"}


def test_no_file_names_a_machine_path() -> None:
    texts = [p for p in shipped_files() if p.suffix != ".safetensors"]
    assert [p.name for p in texts if re.search(r'"/\w', p.read_text("utf-8"))] == []
    assert read_json(DRAFT / "config.json")["speculators_config"]["verifier"]["name_or_path"] == build.VERIFIER_NAME


def test_weights_are_bfloat16_and_untied_in_the_draft() -> None:
    with safe_open(DRAFT / "model.safetensors", framework="numpy") as weights:
        dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
    assert dtypes.pop("d2t") == "I64"
    assert dtypes.pop("t2d") == "BOOL"
    assert set(dtypes.values()) == {"BF16"}
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "norm.weight"} <= set(dtypes)


def test_d2t_holds_offsets_of_strictly_increasing_target_ids(
    vocabulary: tuple[np.ndarray, np.ndarray],
) -> None:
    d2t, _ = vocabulary
    target_ids = d2t + np.arange(len(d2t))
    assert d2t.shape == (build.DRAFT_VOCAB,)
    assert np.all(np.diff(target_ids) > 0)
    assert len(set(d2t.tolist())) > 3, "several different offsets, or a wrong reading of d2t would not show"


def test_t2d_marks_exactly_the_ids_that_d2t_reaches(vocabulary: tuple[np.ndarray, np.ndarray]) -> None:
    d2t, t2d = vocabulary
    assert t2d.shape == (build.VOCAB,)
    assert np.flatnonzero(t2d).tolist() == (d2t + np.arange(len(d2t))).tolist()


@pytest.mark.parametrize("text", ["", "The class statement", "a\n\n\tb  c", "naïve café – 日本語 🙂", "<|eos|>x"])
def test_decoding_an_encoded_text_gives_the_text_back(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert ids == list(text.encode("utf-8"))


def test_auto_tokenizer_loads_offline_and_knows_the_special_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TARGET, local_files_only=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert tokenizer("ab\n").input_ids == [97, 98, 10]
    assert tokenizer.decode(tokenizer("x  y .\n").input_ids) == "x  y .\n"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False)
    assert chat == [256, 72, 105]


def test_prompts_are_different_in_length_and_plain_text() -> None:
    prompts = [json.loads(line)["prompt"] for line in prompts_file().read_text("utf-8").splitlines()]
    assert 6 <= len(prompts) <= 8
    assert len({len(p) for p in prompts}) == len(prompts)
    assert all(p.isascii() for p in prompts)


def test_importing_the_demo_imports_no_torch() -> None:
    code = "import sys, eagle_trace.demo.build_kimi; sys.exit('torch' in sys.modules)"
    root = str(models_dir().parents[2])
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0
