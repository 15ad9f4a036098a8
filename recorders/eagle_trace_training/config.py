"""What a draft's config and its map of the vocabulary may hold, whoever trained it: what nobody computes is refused.

A trainer's own loader takes much without a word that makes a forward of nonsense: a norm of a negative eps, frequencies
of a theta of 0, ids beyond the target's vocabulary. `eagle-trace check` fails such a folder in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np

from eagle_trace.checkpoints import differ_by_padding
from eagle_trace.errors import CheckpointError

#: what a form of rotary embedding cannot do without; of others nothing is known here
NEEDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
#: more than these no forward in float32 can hold
MOST, LARGEST = 2**31 - 1, float(np.finfo(np.float32).max)

Judge = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    # no number that is not finite is within the bounds
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


COUNT: Judge = (lambda value: type(value) is int and 1 <= value <= MOST, "a whole number of 1 or more")
FLAG: Judge = (lambda value: value in (True, False) and not isinstance(value, str), "true or false")
NOT_NEGATIVE: Judge = (lambda value: _is_number(value) and value >= 0, "a number of 0 or more")
POSITIVE: Judge = (lambda value: _is_number(value) and value > 0, "a number above 0")
OBJECT: Judge = (lambda value: isinstance(value, Mapping) or not value, "an object")

KEYS: Mapping[str, Judge] = {
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings", "target_hidden_size",
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "pretraining_tp",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "norm_output", "fc_norm", "use_aux_norm", "norm_before_residual", "norm_before_fc", "attention_bias",
            "mlp_bias", "bias", "tie_word_embeddings", "rope_interleave", "embed_requires_grad",
        ),
        FLAG,
    ),
    "rms_norm_eps": NOT_NEGATIVE,
    "rope_theta": POSITIVE,
    "original_max_position_embeddings": POSITIVE,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
}  # fmt: skip
ROPE_KEYS: Mapping[str, Judge] = {
    **dict.fromkeys(
        (
            "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
            "beta_fast", "beta_slow", "partial_rotary_factor",
        ),
        POSITIVE,
    ),
    "mscale": NOT_NEGATIVE,
    "mscale_all_dim": NOT_NEGATIVE,
}  # fmt: skip


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config by the first key whose value no forward can be computed with; an absent key is never one.

    Args:
        folder: of the draft.
        config: of its decoder, with what beside it says what is computed.

    Raises:
        CheckpointError: see above; the sentence names the key and the value.
    """
    for place, value, (fits, what) in _judged(config):
        if value is not None and not fits(value):
            raise CheckpointError(f"{place} in the config of {folder} is {short(value)}, not {what}")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        form = rope_form(rope)
        for key in NEEDS.get(form, ()):
            if rope.get(key) is None:
                raise CheckpointError(f"{name} of the form {form} has no {key} in the config of {folder}")


def _judged(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Judge]]:
    for key, judge in KEYS.items():
        yield key, config.get(key), judge
    for name in ("rope_scaling", "rope_parameters"):
        # another kind of value was refused by now
        yield from ((f"{name}.{key}", (config.get(name) or {}).get(key), judge) for key, judge in ROPE_KEYS.items())


def rope_form(rope: Mapping[str, Any]) -> str:
    """The form of rotary embedding that is asked for, in whichever way the config is written."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def check_map(folder: Path, d2t: Any, rows: int, vocabulary: int) -> None:
    """Refuse a d2t by which draft ids are not those of target tokens.

    Args:
        folder: of the draft.
        d2t: offset of each draft id, as it is stored; None if it is not.
        rows: ids that the draft scores.
        vocabulary: ids of the target.

    Raises:
        CheckpointError: see above.
    """
    if d2t is None:
        # padding alone may be left out: the ids are then the first of the target's
        if rows != vocabulary and not (rows < vocabulary and differ_by_padding(rows, vocabulary)):
            raise CheckpointError(
                f"there is no d2t in {folder}, but the draft has {rows:,} ids for {vocabulary:,} target ids: draft ids "
                "would be taken for target ids"
            )
        return
    dtype = str(d2t.dtype).removeprefix("torch.")
    if d2t.ndim != 1 or not dtype.startswith("int") or dtype == "int8":
        raise CheckpointError(
            f"d2t in {folder} is stored as {dtype} {list(d2t.shape)}: it is added to a range of ids, one int64 offset "
            "per draft id"
        )
    if len(d2t) != rows:
        raise CheckpointError(
            f"d2t in {folder} has {len(d2t):,} entries for a draft vocabulary of {rows:,}: it was built for another one"
        )
    ids = d2t.long().cpu().numpy() + np.arange(rows)
    inside = int(((ids >= 0) & (ids < vocabulary)).sum())
    if inside < rows:
        raise CheckpointError(
            f"d2t in {folder} makes {inside:,} of {rows:,} target ids in range, of {vocabulary:,}: it holds offsets "
            "(target id less draft id), and these are for another target, or are ids (see `eagle-trace check`)"
        )


def check_shapes(folder: Path, stored: Mapping[str, Any], built: Mapping[str, Any]) -> None:
    """Refuse a tensor of another shape than its place has in the module that a config makes.

    Args:
        folder: of the draft.
        stored: shapes of its tensors, by the module's names.
        built: the module's tensors, on whatever device.

    Raises:
        CheckpointError: see above; a trainer's own loader says so at length, or only logs it.
    """
    for name in sorted(stored.keys() & built.keys()):
        shape, place = list(stored[name]), list(built[name].shape)
        if shape != place:
            raise CheckpointError(f"{name} in {folder} is {shape}, its config makes {place}")


def check_tables(folder: Path, model: Any) -> None:
    """Refuse a draft whose module made tables of its config that are no numbers, as its rotary embedding may.

    Raises:
        CheckpointError: see above.
    """
    for name, table in model.named_buffers():
        if table.is_floating_point() and not table.isfinite().all():
            raise CheckpointError(
                f"the config of {folder} asks for a rotary embedding whose cosines and sines are not numbers ({name})"
            )


def refuse_first(folder: Path, found: Collection[tuple[object, str]], why: str) -> None:
    """Raise CheckpointError for the first of (whether it is so, what the folder does) that is so."""
    for wrong, what in found:
        if wrong:
            raise CheckpointError(f"{folder} {what}{why}")
