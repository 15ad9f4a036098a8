"""Drafts as `torch.save` writes them."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tests.support.tensor_cases import flat, tensors


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


STATE = OrderedDict((name, as_torch(value)) for name, value in tensors().items())


def write(folder: Path, state: Any = STATE, name: str = "pytorch_model.bin", **how: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(flat()))
    torch.save(state, folder / name, **how)
    return folder
