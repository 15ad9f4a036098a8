"""A tiny target and a tiny EAGLE-3 draft that ship with the package, so that all can be tried offline.

Both are really trained, on the English reference text inside the Python standard library, by
`python -m eagle_trace.demo.build`: the target is a byte-level Llama of 8 layers, the draft was trained by
speculators on the target's own greedy answers. Importing this package imports no torch.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def models_dir() -> Path:
    """The folder of `target/` (Hugging Face format) and `draft/` (speculators format)."""
    return _HERE / "models"


def prompts_file() -> Path:
    """JSON lines, one `{"prompt": text}` each; the draft was trained on none of them."""
    return _HERE / "prompts.jsonl"
