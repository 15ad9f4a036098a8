"""What `eagle-trace check` costs on a 2 GB draft: seconds and peak memory. Prints; asserts nothing.

    python tests/benchmarks/bench_check.py [--gigabytes 2] [--reference]

The checkpoint is written to a temporary folder and has the shape of a draft for a large target (hidden 7168,
draft vocabulary 32000), bfloat16. The check runs in a process of its own, twice. The file was just written,
so it is in the page cache: from a cold disk add the time that reading it takes.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

HIDDEN, HEADS, KEYS, HEAD_DIM, DRAFT_VOCABULARY, VOCABULARY = 7168, 64, 8, 112, 32000, 163840

RUN = """
import resource, sys, time
from pathlib import Path
start = time.perf_counter()
from eagle_trace_analysis.checkpoint.check import check
reference = Path(sys.argv[2]) if len(sys.argv) > 2 else None
result = check(Path(sys.argv[1]), reference=reference)
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
troubled = [f.name for f in result.findings if f.status.value in ("warn", "fail")]
print(f"{seconds:.2f} s, peak {peak:.0f} MB, warned or failed: {troubled}")
"""


def main() -> None:
    """Write the checkpoint and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--reference", action="store_true", help="compare with a second copy as well")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        size = write_draft(draft, int(options.gigabytes * 1e9))
        print(f"draft of {size / 1e9:.2f} GB")
        command = [sys.executable, "-c", RUN, str(draft)]
        if options.reference:
            write_draft(Path(folder) / "reference", int(options.gigabytes * 1e9))
            command.append(str(Path(folder) / "reference"))
        for attempt in ("first", "second"):
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                env={"PYTHONPATH": f"{root}:{root / 'analysis'}"},
            )
            print(f"{attempt}: {done.stdout.strip()}")


def write_draft(folder: Path, size: int) -> int:
    """A healthy flat draft whose MLP makes it about `size` bytes; returns the bytes written."""
    folder.mkdir()
    fixed = (
        3 * HIDDEN * HIDDEN
        + 2 * HIDDEN * (HEADS + 2 * KEYS) * HEAD_DIM
        + HIDDEN * (HEADS * HEAD_DIM + DRAFT_VOCABULARY)
    )
    middle = max((size // 2 - fixed) // (3 * HIDDEN), 64)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (KEYS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (KEYS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (middle, HIDDEN),
        "layers.0.mlp.up_proj.weight": (middle, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, middle),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCABULARY, HIDDEN),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": middle,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return write_weights(folder / "model.safetensors", shapes)


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Heavy-tailed bfloat16 values and a d2t; returns the bytes written."""
    draw = np.random.default_rng(0)
    # one block of values, repeated from another start each time: drawing 1e9 numbers would take minutes
    block = (draw.standard_t(5, 4_000_037) * 0.02).astype(ml_dtypes.bfloat16)
    ids = np.sort(draw.permutation(VOCABULARY)[:DRAFT_VOCABULARY])
    header, at = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    header["d2t"] = {
        "dtype": "I64",
        "shape": [DRAFT_VOCABULARY],
        "data_offsets": [at, at + 8 * DRAFT_VOCABULARY],
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                part = block[: min(left, len(block))]
                file.write(part.tobytes())
                left -= len(part)
        file.write((ids - np.arange(DRAFT_VOCABULARY)).astype(np.int64).tobytes())
    return path.stat().st_size


if __name__ == "__main__":
    main()
