"""Training data that a trainer captured beforehand, as files of tensors."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_trace.capture import Array
from eagle_trace.errors import CheckpointError
from eagle_trace_training.weights import loading


@dataclass(frozen=True)
class TorchSample:
    """One sequence in a file that torch.save wrote, also gzipped (`Sample`).

    A trainer unpickles whatever is in such a file; here nothing but tensors is read.

    Attributes:
        file: the file, which holds tensors by name.
        tokens: name of the ids, [..., T].
        fed: name of the features, [..., T, n * G].
        of: whose file it is, as a refusal ends.
    """

    file: Path
    tokens: str
    fed: str
    of: str

    @cached_property
    def _held(self) -> Any:
        with loading(f"cannot read {self.file}"):
            if self.file.suffix == ".gz":
                with gzip.open(self.file) as stream:
                    return torch.load(stream, weights_only=True, map_location="cpu")
            return torch.load(self.file, weights_only=True, mmap=True, map_location="cpu")

    def _get(self, name: str) -> Any:
        if not isinstance(self._held, dict) or not isinstance(self._held.get(name), torch.Tensor):
            raise CheckpointError(f"{self.file} holds no {name}: it is not {self.of}")
        return self._held[name]

    @property
    def token_ids(self) -> Array:
        """x_0, x_1, ...: int64 [T]."""
        ids: Array = self._get(self.tokens).reshape(-1).long().numpy()
        return ids

    def width(self) -> int:
        """n * G."""
        return int(self._get(self.fed).shape[-1])

    def features(self, count: int) -> Any:
        """Features [count, n * G]."""
        held = self._get(self.fed)
        return held.reshape(-1, held.shape[-1])[:count].clone()
