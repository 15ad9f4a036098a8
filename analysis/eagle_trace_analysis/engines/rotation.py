"""Whether the tables of a rotary embedding hold numbers: a server builds them of nearly anything that a config says.

Formulas as in SGLang 0.5.23's `layers/rotary_embedding` (`factory.py`, `base.py`, `yarn.py`, `rope_variant.py`), which
vLLM's `model_executor/layers/rotary_embedding` has, too. `tests/integration/test_engine_judge.py` holds them against
the installed classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_trace_analysis.engines.refusal import Refusal, is_number, shown

Float32 = NDArray[np.float32]

#: keys of a rotary embedding that enter its tables, and a value that does no harm there (None: leave it out)
_HARMLESS: dict[str, Any] = {
    "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None,
    "attn_factor": None, "attention_factor": None, "extrapolation_factor": None, "alpha": None, "short_factor": None,
    "long_factor": None, "short_mscale": None, "long_mscale": None,
}  # fmt: skip
YARN = ("yarn", "deepseek_yarn")


class Table(NamedTuple):
    """A table of cosines and sines.

    Attributes:
        rows: positions that it has.
        frequencies: angle per position [rotated / 2].
        factor: on cosines and sines.
        on_scores: factors of yarn's on the scores of latent attention.
    """

    rows: float
    frequencies: Float32
    factor: float = 1.0
    on_scores: tuple[float, ...] = ()


def rotation_fault(rope: Mapping[str, Any], width: int, positions: int, *, scores: bool = False) -> Refusal | None:
    """Why an engine's tables of cosines and sines cannot be computed with; None if they can.

    Args:
        rope: the rotary embedding in one form (`Engine.rope_settings`).
        width: elements of a head that it is for, before `partial_rotary_factor`.
        positions: `max_position_embeddings`.
        scores: whether the square of yarn's factor is on the scores, as it is in latent attention.
    """

    def why_not(of: Mapping[str, Any]) -> str | None:
        return _why(of, width, positions, scores)

    why = why_not(rope)
    if why is None:
        return None
    held = [key for key in _HARMLESS if key in rope]
    guilty = [key for key in held if why_not(_without(rope, key)) is None] or held
    said = ", ".join(f"{key} is {shown(rope[key])}" for key in guilty)
    form = "" if rope["rope_type"] == "default" else f" for a rotary embedding of the form {rope['rope_type']}"
    return Refusal(guilty[0], f"{said}{form}: {why}", f"set {' and '.join(guilty)} as trained")


def runs_backwards(rope: Mapping[str, Any]) -> bool:
    """Whether yarn's ramp, from what is left as it is to what is divided by the factor, runs the other way.

    Equal ends, as Kimi-K2 is published with, are rounded apart and make a ramp of one pair in the right direction.
    """
    fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
    return rope["rope_type"] in YARN and is_number(fast) and is_number(slow) and fast < slow


def _without(rope: Mapping[str, Any], key: str) -> dict[str, Any]:
    rest = {name: value for name, value in rope.items() if name != key}
    return rest if _HARMLESS[key] is None else rest | {key: _HARMLESS[key]}


def _why(rope: Mapping[str, Any], width: int, positions: int, scores: bool) -> str | None:
    with np.errstate(all="ignore"):
        try:
            tables = _tables(rope, width, positions)
            rows = [math.ceil(table.rows) for table in tables]
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return "the server stops while it builds the table of cosines and sines"
        if min(rows) < 1:
            return "the table of cosines and sines has no row"
        for count, table in zip(rows, tables, strict=True):
            # the first row and the last have the extreme angles
            angles = np.outer(np.asarray([0, count - 1], np.float32), table.frequencies)
            factors = np.asarray((table.factor, *(table.on_scores if scores else ())), np.float32)
            if not np.isfinite(angles).all() or not np.isfinite(factors).all():
                return "cosines and sines are not numbers"
            if not factors.all():
                return "cosines and sines are all zero"
    return None


def _tables(rope: Mapping[str, Any], width: int, positions: int) -> list[Table]:
    form, theta = rope["rope_type"], rope["rope_theta"]
    share = rope.get("partial_rotary_factor", 1.0)
    rotated = int(width * share) if share < 1 else width
    factor = rope.get("factor", 1.0)
    if form == "linear":
        return [Table(positions * factor, _plain(theta, rotated) / factor)]
    if form == "dynamic":
        # SGLang takes alpha where it is there
        grown = rope["alpha"] if "alpha" in rope else factor * (positions * factor) / positions - (factor - 1)
        rows = positions if "alpha" in rope else positions * factor
        return [Table(rows, _plain(float(theta * grown ** (rotated / (rotated - 2))), rotated))]
    if form == "llama3":
        return [Table(positions, _llama3(_plain(theta, rotated), rope, factor, positions))]
    if form in YARN:
        return [_yarn(rope, theta, rotated, factor, positions)]
    if form == "longrope":
        return _longrope(rope, theta, rotated, positions)
    return [Table(positions, _plain(theta, rotated))]


def _plain(theta: float, rotated: int) -> Float32:
    found: Float32 = 1.0 / _powers(theta, rotated)
    return found


def _powers(theta: float, rotated: int) -> Float32:
    found: Float32 = np.float32(theta) ** (np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated))
    return found


def _llama3(plain: Float32, rope: Mapping[str, Any], factor: float, positions: int) -> Float32:
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    old = rope.get("original_max_position_embeddings", positions)
    longest, shortest = old / low, old / high
    wave = 2 * math.pi / plain
    smooth = (old / wave - low) / (high - low) if low != high else 0
    divided = plain / np.float32(factor)
    between = (1 - smooth) * plain / np.float32(factor) + smooth * plain
    found: Float32 = np.where(wave < shortest, plain, np.where(wave > longest, divided, between)).astype(np.float32)
    return found


def _yarn(rope: Mapping[str, Any], theta: float, rotated: int, factor: float, positions: int) -> Table:
    old = rope.get("original_max_position_embeddings", positions)
    latent = rope["rope_type"] == "deepseek_yarn"
    named = "mscale" in rope and "mscale_all_dim" in rope
    every = _grown(factor, float(rope.get("mscale_all_dim", 0))) if latent or named else 1.0
    scale = _grown(factor, float(rope.get("mscale", 1))) if latent or named else _grown(factor, 1.0)
    scale = scale / every * rope.get("attn_factor", 1) * (rope.get("attention_factor") or 1)

    def place(rotations: float) -> float:
        return float(rotated * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta)))

    low, high = place(rope.get("beta_fast", 32)), place(rope.get("beta_slow", 1))
    if latent or rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    high += 0.001 if low == high else 0
    powers = _powers(theta, rotated)
    ramp = np.clip((np.arange(rotated // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = (1 - ramp) * np.float32(rope.get("extrapolation_factor", 1))
    frequencies = 1.0 / (np.float32(factor) * powers) * (1 - kept) + 1.0 / powers * kept
    return Table(old * factor, frequencies.astype(np.float32), scale, (every, every * every))


def _grown(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Mapping[str, Any], theta: float, rotated: int, positions: int) -> list[Table]:
    old = rope.get("original_max_position_embeddings", positions)
    longer = positions / old
    scale = math.sqrt(1 + math.log(longer) / math.log(old)) if longer > 1 else 1.0
    powers = _powers(theta, rotated)
    tables = []
    for length, name in ((old, "short"), (positions, "long")):
        own = rope.get(f"{name}_mscale")
        frequencies = 1.0 / (np.asarray(rope[f"{name}_factor"], dtype=np.float32) * powers)
        tables.append(Table(length, frequencies, scale if own is None else own))
    return tables
