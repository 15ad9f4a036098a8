"""What the installed SGLang's own loader makes of draft folders, tensor by tensor.

Run in a process of its own (SGLang keeps its state for the life of a process). Config, quantisation, files and names go
through SGLang's code; the class is built on the CPU with memory of a known pattern, so that what no file fills shows.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.own_process import run_module

#: two fills: a byte that keeps both was written by nobody
FILLS = (0x5A, 0xA5)


def ask(folder: Path, model: Path, drafts: Sequence[Path]) -> dict[str, Any]:
    """One of ``verdicts`` per draft: ``error``, or ``dropped`` (stored names) and ``unset`` (parameters) and what the
    class holds; and the engine's ``methods`` of quantisation, ``classes`` of other drafts, ``algorithms``.

    Args:
        folder: an empty folder for the exchange.
        model: a target that SGLang's settings can be made from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"model": str(model), "store": str(folder / "store"), "out": str(folder / "out.json")}
    (folder / "job.json").write_text(json.dumps(job | {"drafts": [str(draft) for draft in drafts]}))
    run_module("tests.support.tensor_judge", folder / "job.json")
    answer: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return answer


def prepare(model: str, store: str) -> None:
    """SGLang's process-wide state, as one rank on a CPU that answers for a GPU where a method asks for one."""
    import torch
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.quantization.gptq.schemes import gptq_cpu
    from sglang.srt.models import llama_eagle3
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    # what the kernels of a CPU cannot do is not asked
    vars(gptq_cpu)["_check_cpu_amx_support"] = lambda _: None
    vars(llama_eagle3)["get_spec"] = lambda: types.SimpleNamespace(speculative_draft_window_size=None)
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    publish(
        prepare_server_args(["--model-path", model, "--device", "cpu", "--skip-tokenizer-init"]),
        role="scheduler",
        ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None),
    )
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}"
    )
    initialize_model_parallel()


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.data.reshape(-1).contiguous().view(torch.uint8)


def _fill(model: Any, byte: int) -> None:
    import torch

    for param in model.parameters():
        param.data = (
            torch.full((_bytes(param).numel(),), byte, dtype=torch.uint8).view(param.dtype).reshape(param.shape)
        )


def _untouched(model: Any, byte: int) -> dict[str, Any]:
    return {name: _bytes(param) == byte for name, param in model.named_parameters()}


def _weights(settings: Any, model: Any) -> Iterator[tuple[str, Any]]:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    yield from DefaultModelLoader(LoadConfig())._get_all_weights(settings, model)


def build(folder: Path) -> tuple[Any, Any]:
    """Settings and class of a draft folder, as the model loader makes them."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    settings = ModelConfig(str(folder), is_draft_model=True, trust_remote_code=False)
    quantisation = loader._get_quantization_config(settings, LoadConfig())
    before = torch.get_default_dtype()
    torch.set_default_dtype(settings.dtype)
    try:
        return settings, LlamaForCausalLMEagle3(settings.hf_config, quant_config=quantisation)
    finally:
        torch.set_default_dtype(before)


def judge(folder: Path) -> dict[str, Any]:
    """Verdict on one folder."""
    import torch

    try:
        settings, model = build(folder)
        weights = list(_weights(settings, model))
        kept: dict[str, Any] = {}
        for byte in FILLS:
            _fill(model, byte)
            model.load_weights(iter(weights))
            found = _untouched(model, byte)
            kept = {name: (kept[name] & same) if kept else same for name, same in found.items()}
        dropped = []
        for name, tensor in weights:
            if not torch.is_tensor(tensor):
                continue
            changed = False
            model.hot_token_id = None
            for byte in FILLS:
                _fill(model, byte)
                model.load_weights([(name, tensor)])
                changed |= not all(bool(same.all()) for same in _untouched(model, byte).values())
            if not changed and model.hot_token_id is None and "t2d" not in name:
                dropped.append(name)
    except Exception as error:  # noqa: BLE001 (whatever stops the engine is the verdict)
        return {"error": f"{type(error).__name__}: {error}"}
    # an embedding that is not shipped comes from the target, and the scales of a KV cache begin as 1
    fine = ("model.embed_tokens.weight", ".attn.k_scale", ".attn.v_scale")
    unset = [name for name, same in kept.items() if bool(same.any()) and not name.endswith(fine)]
    params = dict(model.named_parameters())
    return {
        "error": None,
        "dropped": sorted(dropped),
        "unset": sorted(unset),
        "params": sorted(params),
        "quantised": sorted({name.rpartition(".")[0] for name, one in params.items() if not one.is_floating_point()
                             or one.element_size() == 1}),
    }  # fmt: skip


def tables() -> dict[str, list[str]]:
    """What there is in the engine beside the class."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.models import dflash, kimi_k25_eagle3, llama_eagle, mistral_eagle, qwen2_eagle
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    modules = (dflash, kimi_k25_eagle3, llama_eagle, mistral_eagle, qwen2_eagle)
    return {
        "methods": sorted(QUANTIZATION_METHODS),
        "classes": [one.__name__ for module in modules for one in module.EntryClass],
        "algorithms": [one.name for one in SpeculativeAlgorithm],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prepare(job["model"], job["store"])
    verdicts = [judge(Path(draft)) for draft in job["drafts"]]
    Path(job["out"]).write_text(json.dumps({"verdicts": verdicts, **tables()}))


if __name__ == "__main__":
    main()
