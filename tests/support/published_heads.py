"""Heads as trainers and people publish them: names, flags, nesting and dtypes of each, with small random weights.

`source` says where the structure was read: a trainer's own sources or recipes, or a report that quotes it. Sizes
are small, and so are counts of layers where a target of the real size is not needed.

    python -m tests.support.published_heads        prints the table of docs/support.md
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import checkpoints as make
from tests.support import latent
from tests.support.other_kinds import block, matrix

Config = dict[str, Any]
LAYER, MIDLAYER = "layers.0.", "midlayer."
H, V, D = make.HIDDEN, make.VOCABULARY, make.DRAFT_VOCABULARY


def tensors(layer: str = MIDLAYER, embedding: bool = False, t2d: bool = True, dtype: Any = None) -> make.Tensors:
    """One decoder layer behind fc, a head and its maps; `layer` is how the file names the layer."""
    found = {}
    for name, one in make.draft_tensors().items():
        if (name == "embed_tokens.weight" and not embedding) or (name == "t2d" and not t2d):
            continue
        plain = one.dtype == ml_dtypes.bfloat16
        found[name.replace(LAYER, layer)] = one.astype(np.float32).astype(dtype) if dtype and plain else one
    return found


def flat(architecture: str = "LlamaForCausalLMEagle3", dtype: str = "bfloat16", **more: Any) -> Config:
    """A config of old keys, as trainers write it."""
    config = {key: one for key, one in make.decoder_config(1).items() if key not in ("rope_parameters", "dtype")}
    config |= {"architectures": [architecture], "draft_vocab_size": D, "torch_dtype": dtype, "use_cache": True}
    config |= {"rope_theta": 10000.0, "rope_scaling": None, "attention_dropout": 0.0, "initializer_range": 0.02}
    return config | more


def eagle(ids: list[int] | None = None, **more: Any) -> Config:
    """The object that names the layers."""
    named: Config = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    return {"eagle_config": named | {"use_aux_hidden_state": True} | more}


def model_optimizer(ids: list[int], **more: Any) -> Config:
    """ModelOpt's template: everything by name, and null for what neither config had."""
    own = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    return {
        "pad_token_id": None, "head_dim": make.HEAD_DIM, "pretraining_tp": None,
        **eagle(ids, **own, next_layer_regular=True, parallel_draft_step=1, parallel_draft_heads_num_layers=1),
        **more,
    }  # fmt: skip


def target(architecture: str = "LlamaForCausalLM", kind: str = "llama", layers: int = 32, **more: Any) -> Config:
    """A target's config."""
    config = make.decoder_config(layers) | {"architectures": [architecture], "model_type": kind}
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | more


def quantised(nan: bool = False) -> make.Tensors:
    """FP8 matrices with one scale each."""
    found: make.Tensors = {}
    for name, one in tensors(LAYER).items():
        if name.endswith("proj.weight"):
            found[name] = (one.astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
            found[f"{name}_scale"] = np.array([0.01], np.float32)
            found[name.replace("weight", "input_scale")] = np.array([0.02], np.float32)
        else:
            found[name] = one
    if nan:
        name = f"{LAYER}mlp.up_proj.weight"
        found[name] = np.full_like(found[name], np.nan)
    return found


def one_feature() -> make.Tensors:
    """Without fc, and without the norm of the hidden state; over all ids."""
    gone = ("fc.weight", f"{LAYER}hidden_norm.weight", "d2t", "t2d")
    return {n: one for n, one in tensors(LAYER).items() if n not in gone} | {
        "lm_head.weight": make.target_tensors()["lm_head.weight"]
    }


def pruned_by_offsets() -> make.Tensors:
    """The head's rows picked by d2t as it is stored."""
    found = tensors(MIDLAYER, embedding=True)
    return found | {"lm_head.weight": make.target_tensors()["lm_head.weight"][found["d2t"]]}


def whole_vocabulary(layer: str) -> make.Tensors:
    """A head over all ids, without maps."""
    found = {name: one for name, one in tensors(layer, embedding=True).items() if name not in ("d2t", "t2d")}
    return found | {"lm_head.weight": make.target_tensors()["lm_head.weight"]}


def two_layers() -> make.Tensors:
    found = tensors(LAYER, embedding=True)
    for name, one in list(found.items()):
        if name.startswith(LAYER):
            narrow = one[:, :H] if name.split(".")[3] in ("q_proj", "k_proj", "v_proj") else one
            found[name.replace(LAYER, "layers.1.")] = narrow
    return found


def normed_features() -> make.Tensors:
    return tensors() | {f"fc_norm.{k}.weight": np.full(H, 1 + k / 8, ml_dtypes.bfloat16) for k in range(3)}


def without(config: Config, *keys: str) -> Config:
    return {key: one for key, one in config.items() if key not in keys}


@dataclass(frozen=True)
class Head:
    """A published head.

    Attributes:
        trainer: the one it is told to be of; empty if none.
        source: where its structure was read.
        target: the config of its target; None for the usual one.
        files: further files, by name.
        bin: whether torch.save wrote the weights.
        sglang, vllm: what fails or warns for each engine, by check: ``fail`` or ``warn``.
        says: words of one of these findings.
    """

    name: str
    trainer: str
    source: str
    config: Config
    tensors: Callable[[], make.Tensors] = tensors
    target: Config | None = None
    files: Mapping[str, Config] = field(default_factory=dict)
    bin: bool = False
    sglang: Mapping[str, str] = field(default_factory=dict)
    vllm: Mapping[str, str] = field(default_factory=dict)
    says: str = ""

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The head's folder and its target's."""
        draft, whole = folder / "draft", folder / "target"
        for place, config in ((draft, self.config), (whole, self.target or target())):
            place.mkdir(parents=True, exist_ok=True)
            (place / "config.json").write_text(json.dumps(config))
        for name, content in self.files.items():
            (draft / name).write_text(json.dumps(content))
        if self.bin:
            import torch

            from tests.support.torch_files import as_torch

            torch.save({name: as_torch(one) for name, one in self.tensors().items()}, draft / "pytorch_model.bin")
        else:
            make.write_safetensors(draft / "model.safetensors", self.tensors())
        return draft, whole


LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN = {"rope_theta": 1000000, "rms_norm_eps": 1e-6}
SECTIONS = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]}
QUANTISED = {"quant_method": "fp8", "activation_scheme": "static"}
SPECULATORS = make.speculators_config()
RECIPES, REPORT = "its recipes and sources", "a report that quotes it"
GUESS = {"layer-ids": "warn"}

#: the layout that SGLang's `kimi_k25_eagle3.py` loads
LATENT = latent.draft_config(
    hidden_size=H, vocab_size=V, draft_vocab_size=D, max_position_embeddings=4096, dtype="bfloat16",
    eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
)  # fmt: skip
HEADS = [
    # ---- SpecForge
    Head("lmsys, Qwen3-235B-A22B", "specforge", RECIPES, flat(**QWEN, **eagle([1, 46, 90])),
         target=target("Qwen3MoeForCausalLM", "qwen3_moe", 94), vllm=GUESS),
    Head("lmsys, Llama-3.1-8B (no ids)", "specforge", RECIPES, flat(rope_theta=500000.0), sglang=GUESS, vllm=GUESS,
         says="does not export the ids of its recipe"),
    Head("EAGLE-3.1, Qwen3-30B-A3B", "specforge", RECIPES,
         flat(**QWEN, fc_norm=True, norm_output=True, max_position_embeddings=2048), normed_features,
         target("Qwen3MoeForCausalLM", "qwen3_moe", 48),
         sglang=GUESS | {"norm-output": "warn", "max-position": "warn"},
         vllm=GUESS | {"norm-output": "warn", "max-position": "warn"}, says="trains that with the carry as it is"),
    Head("phi-4 (the target's model_type)", "specforge", RECIPES,
         flat(model_type="phi3", pad_token_id=1, bos_token_id=1, eos_token_id=1, **eagle([1, 15, 28])),
         target=target("Phi3ForCausalLM", "phi3", 32), vllm=GUESS),
    # ---- the EAGLE-3 repository
    Head("Llama-3.1-8B of the EAGLE-3 repository", "eagle", RECIPES,
         without(flat("LlamaForCausalLM", "float16", max_position_embeddings=2048), "rope_theta", "head_dim"),
         lambda: tensors(dtype=np.float16), bin=True,
         sglang={"format": "fail", "max-position": "warn", "dtype": "warn"},
         vllm={"format": "fail", "max-position": "warn", "dtype": "warn"}, says="set architectures"),
    Head("Qwen3-8B by its training code", "eagle", REPORT, flat(**QWEN, max_position_embeddings=4096), bin=True,
         sglang={"rope": "warn"}, vllm={"rope": "warn"}, says="rotates by 10000"),
    Head("Vicuna-13B (40 layers left in)", "eagle", REPORT, flat(num_hidden_layers=40), bin=True,
         sglang={"weights-present": "fail"}, vllm={"weights-present": "fail"}, says="set num_hidden_layers to 1"),
    # ---- AngelSlim
    Head("AngelSlim, Qwen3-8B", "angelslim", RECIPES,
         flat("Eagle3LlamaForCausalLM", target_model_type="qwen3", **QWEN), tensors,
         target("Qwen3ForCausalLM", "qwen3", 36),
         sglang={"format": "fail", "rope": "warn"}, vllm={"rope": "warn"}, says="rotates by 10000"),
    Head("AngelSlim, Hunyuan-4B (tied)", "angelslim", RECIPES,
         flat("Eagle3LlamaForCausalLM", target_model_type="hunyuan_v1_dense", tie_word_embeddings=True),
         target=target("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", 32),
         sglang={"format": "fail", "target-class": "fail", "tied-head": "fail"},
         says="set tie_word_embeddings to false"),
    Head("AngelSlim, Qwen3-VL-4B (sections)", "angelslim", RECIPES,
         flat("Eagle3LlamaForCausalLM", modal_type="VLM", rope_theta=5000000, rope_scaling=SECTIONS),
         target=target("Qwen3VLForConditionalGeneration", "qwen3_vl", 36), sglang={"format": "fail"}),
    # ---- NVIDIA ModelOpt
    Head("ModelOpt, Llama", "modelopt", RECIPES, flat(rope_theta=500000.0, **model_optimizer([1, 15, 28])),
         lambda: tensors(LAYER, t2d=False), vllm=GUESS),
    Head("ModelOpt, gpt-oss-120b short context (one feature)", "modelopt", REPORT,
         flat(**model_optimizer([], draft_vocab_size=V,
                                **eagle([], use_mtp_layernorm=False, use_aux_hidden_state=False))),
         one_feature, target("GptOssForCausalLM", "gpt_oss", 36),
         sglang={"weights-present": "warn"}, vllm={"weights-present": "warn"}),
    Head("ModelOpt, FP8", "modelopt", RECIPES,
         flat(**model_optimizer([1, 15, 28]), quantization_config=QUANTISED), quantised,
         files={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}},
         vllm=GUESS),
    # ---- TorchSpec
    Head("TorchSpec, Qwen3-8B", "torchspec", RECIPES, flat(**QWEN, _torchspec_version="0.1.0", draft_vocab_size=V),
         lambda: whole_vocabulary(MIDLAYER), target("Qwen3ForCausalLM", "qwen3", 36), sglang=GUESS, vllm=GUESS),
    Head("TorchSpec, for vLLM", "torchspec", RECIPES, flat(**QWEN, _torchspec_version="0.1.0", draft_vocab_size=V),
         lambda: whole_vocabulary(LAYER), target("Qwen3ForCausalLM", "qwen3", 36), sglang=GUESS, vllm=GUESS),
    Head("TorchSpec, pruned afterwards", "torchspec", RECIPES, flat(**QWEN, _torchspec_version="0.1.0"),
         pruned_by_offsets, target("Qwen3ForCausalLM", "qwen3", 36), sglang=GUESS | {"head-rows": "fail"},
         vllm=GUESS | {"head-rows": "fail"}, says="its rows were picked by d2t as it is stored"),
    # ---- speculators
    Head("Red Hat, Llama-3.1-8B", "speculators", REPORT,
         SPECULATORS | {"architectures": ["Eagle3Speculator"], "eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
         lambda: tensors(LAYER, embedding=True)),
    Head("Red Hat, Qwen3-8B (norm_before_residual)", "speculators", REPORT,
         SPECULATORS | {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
         lambda: tensors(LAYER, embedding=True), sglang={"residual-norm": "fail"}),
    Head("converted from lmsys' Qwen3-235B-A22B", "speculators", REPORT,
         SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}, lambda: tensors(LAYER, embedding=True),
         target("Qwen3MoeForCausalLM", "qwen3_moe", 94), sglang=GUESS, vllm=GUESS,
         says="look copied from a serving config"),
    # ---- nobody's marks
    Head("a head of Llama's class name", "", REPORT,
         flat("LlamaForCausalLM", rope_theta=500000.0, rope_scaling=LLAMA3, **eagle([1, 15, 28])),
         lambda: tensors(LAYER),
         sglang={"format": "fail"}, vllm={"format": "fail"} | GUESS),
    Head("FP8 by another tool", "", REPORT, flat(quantization_config=QUANTISED, **eagle([1, 15, 28])), quantised,
         vllm=GUESS),
    Head("FP8 with NaN", "", REPORT, flat(quantization_config=QUANTISED, **eagle([1, 15, 28])), lambda: quantised(True),
         sglang={"finite": "fail"}, vllm=GUESS | {"finite": "fail"}),
    Head("two layers, one counted", "", REPORT, flat(**eagle([1, 15, 28])), two_layers,
         sglang={"weight-names": "fail"}, vllm=GUESS | {"weight-names": "fail"}, says="set num_hidden_layers to 2"),
    Head("Kimi-K2.5's own (latent attention)", "", "SGLang's class for it", LATENT,
         lambda: latent.draft_tensors(LATENT), vllm={"format": "skip"}),
    # ---- other kinds
    Head("EAGLE-1", "", REPORT, without(flat("LlamaForCausalLMEagle"), "draft_vocab_size"),
         lambda: block(norms=False) | {"fc.weight": matrix(H, 2 * H), "embed_tokens.weight": matrix(V, H)},
         sglang={"format": "fail"}, vllm={"format": "fail"}, says="an EAGLE-1 or EAGLE-2 head"),
    Head("P-EAGLE", "", RECIPES, flat("PEagleDraftModel"), lambda: tensors(LAYER) | {"mask_hidden": matrix(1, H)},
         sglang={"format": "fail"}, vllm={"format": "fail"}, says="a P-EAGLE draft"),
    Head("DFlash", "", RECIPES, flat("DFlashDraftModel", model_type="qwen3", block_size=16),
         lambda: block() | {"fc.weight": matrix(H, 3 * H), "hidden_norm.weight": matrix(H), "norm.weight": matrix(H)},
         sglang={"format": "fail"}, vllm={"format": "fail"}, says="a DFlash draft"),
    Head("the target given as draft", "", REPORT, target(layers=1),
         lambda: block("model.layers.0.") | {"model.embed_tokens.weight": matrix(V, H), "lm_head.weight": matrix(V, H),
                                             "model.norm.weight": matrix(H)},
         sglang={"format": "fail"}, vllm={"format": "fail"}, says="a whole language model"),
]  # fmt: skip

#: values that the engine's config loader refuses, as published configs have them; and others that it takes
STOPS: dict[str, Config] = {
    **{f"{key}: null": {key: None} for key in ("attention_bias", "mlp_bias", "hidden_act", "use_cache",
       "tie_word_embeddings", "initializer_range", "max_position_embeddings")},
    "initializer_range: 1": {"initializer_range": 1},
    "torch.bfloat16": {"torch_dtype": "torch.bfloat16"},
    "no model_type": {"model_type": ...},
}  # fmt: skip
TAKEN: dict[str, Config] = {
    f"{key}: null": {key: None}
    for key in ("pretraining_tp", "pad_token_id", "rope_scaling", "head_dim", "eagle_config", "quantization_config")
}


def with_values(values: Config) -> Config:
    """A SpecForge head's config with some values; ``...`` leaves a key out."""
    config = flat(**eagle([1, 15, 28])) | values
    return {key: one for key, one in config.items() if one is not ...}


@functools.cache
def judged(number: int, engine: str) -> tuple[str, dict[str, str], str]:
    """Of one of HEADS: the trainer told, what fails or warns for an engine, and all words of that."""
    from eagle_trace_analysis.checkpoint.check import check
    from eagle_trace_analysis.checkpoint.finding import Status
    from eagle_trace_analysis.engines import engine_named
    from tests.support.check_cases import troubles

    with tempfile.TemporaryDirectory() as folder:
        draft, whole = HEADS[number].write(Path(folder))
        result = check(draft, target=whole, engine=engine_named(engine))
    # of a draft whose class has no tables for an engine nothing but that is said
    found = {one.name: one for one in result.findings if one.name == "format" and one.status is Status.SKIP}
    found |= troubles(result)
    words = "; ".join(f"{one.evidence}; {one.fix}" for one in found.values())
    return result.trainer, {name: one.status.value for name, one in found.items()}, words


def table() -> list[str]:
    """The rows of docs/support.md."""
    rows = ["| head | told to be of | adapted from | SGLang | vLLM |", "| --- | --- | --- | --- | --- |"]
    for number, head in enumerate(HEADS):
        both = [judged(number, engine)[1] for engine in ("sglang", "vllm")]
        cells = ["; ".join(f"{name} {status}s" for name, status in found.items()) or "passes" for found in both]
        rows.append(f"| {head.name} | {head.trainer or '-'} | {head.source} | {cells[0]} | {cells[1]} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
