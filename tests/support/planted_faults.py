"""The faults themselves, one entry a fault, and the edits they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.numpy_target import TEXTS, Target, read_tensors, rms
from tests.support.pairs import DRAFT, TARGET
from tests.support.plant_edits import (
    HEAD,
    HIDDEN_NORM,
    OUT,
    K,
    Q,
    V,
    after_final_norm,
    deployed_offsets,
    drop,
    each_norm,
    embedding_head,
    fresh,
    half,
    heads,
    ids,
    layers,
    nan_at,
    offsets,
    ones_for,
    own_embedding,
    put,
    rename,
    several,
    swap,
    trained_ids,
    with_bos,
    without,
)
from tests.support.planted import Planted, copy_checkpoint

CHUNK = 8
EMBEDDING = "embed_tokens.weight"

HEALTHY = [
    Planted("healthy", None, None),
    Planted("position-offset", None, None, serve={"shift": 1}),
]


def faults() -> list[Planted]:
    """Every fault; built when asked for, since some need the models."""
    head = read_tensors(DRAFT)["d2t"]
    return [
        Planted(
            "single-layer",
            "single-layer-features",
            "fused",
            serve={"pick": lambda s: s[-1]},
            config=put("eagle_config", "use_aux_hidden_state", value=False),
        ),
        Planted(
            "algorithm-eagle",
            "single-layer-features",
            "fused",
            serve={"pick": lambda s: s[-1], "d2t": np.zeros(320, dtype=np.int64)},
            serve_tensors=embedding_head(320),
            serve_write={"settings": {"algorithm": "EAGLE"}, "dropped": [HEAD]},
        ),
        Planted(
            "layer-ids-shifted",
            "layer-ids-shifted",
            "target.hidden.0",
            config=ids(2, 4, 5),
            serve={"pick": layers(3, 5, 6)},
        ),
        Planted(
            "layer-ids-shifted-unknown-layers",
            "layer-ids-shifted",
            "target.hidden.0",
            config=ids(2, 4, 5),
            serve={"pick": layers(3, 5, 6)},
            train_write={"layers": False},
        ),
        Planted(
            "one-layer-id-wrong",
            "layer-ids-shifted",
            "target.hidden.2",
            config=ids(1, 3, 5),
            serve={"pick": layers(2, 4, 6)},
        ),
        Planted(
            "layer-ids-default",
            "layer-ids-default",
            "target.hidden.0",
            config=drop("eagle_config", "eagle_aux_hidden_state_layer_ids"),
            trained=trained_ids(1, 3, 6),
            train={"pick": layers(1, 3, 6)},
        ),
        Planted(
            "layer-ids-ignored",
            "layer-ids-ignored",
            "target.hidden.0",
            config=ids(0, 2, 5),
            trained=trained_ids(1, 3, 6),
            train={"pick": layers(1, 3, 6)},
        ),
        Planted("features-permuted", "features-permuted", "target.hidden.0", serve={"pick": layers(4, 2, 5)}),
        Planted(
            "features-permuted-by-ids",
            "features-permuted",
            "target.hidden.0",
            config=ids(3, 1, 4),
            serve={"pick": layers(4, 2, 5)},
        ),
        Planted(
            "features-zero",
            "features-degenerate",
            "target.hidden.1",
            train={"pick": lambda s: np.concatenate([s[2], 0 * s[4], s[5]], axis=1)},
        ),
        Planted("features-one-layer-thrice", "features-degenerate", "target.hidden.1", train={"pick": layers(2, 2, 2)}),
        Planted(
            "features-of-another-prompt",
            "features-degenerate",
            "target.hidden.0",
            train_write={"answer": lambda n: (n + 1) % 3},
        ),
        Planted(
            "features-without-residual",
            "features-without-residual",
            "target.hidden.0",
            serve={"summand": lambda _states, branches: branches},
        ),
        Planted(
            "features-without-the-last-branch",
            "features-without-residual",
            "target.hidden.0",
            serve={"summand": lambda states, branches: states - branches},
        ),
        Planted(
            "features-normed",
            "features-normed",
            "target.hidden.0",
            train={"pick": lambda s: layers(2, 4, 5)(after_final_norm(s))},
        ),
        Planted(
            "features-after-the-final-norm",
            "features-normed",
            "target.hidden.2",
            trained=trained_ids(2, 4, 8),
            config=ids(1, 3, 7),
            train={"pick": layers(2, 4, 8)},
            serve={"pick": layers(2, 4, 9)},
        ),
        Planted("tokens-differ", "tokens-differ", "token", serve_write={"prompts": with_bos()}),
        Planted("input-shift", "input-shift", "token", serve={"fed": 0}),
        Planted(
            "bonus-token-before",
            "tokens-fed-wrongly",
            "token",
            serve={"feeds": lambda x, root, path, n: path[-1] if path else x[root + (0 if n else 1)]},
        ),
        Planted(
            "draft-token-before",
            "tokens-fed-wrongly",
            "token",
            serve={"feeds": lambda x, root, path, _: path[0] if path else x[root + 1]},
        ),
        Planted(
            "chunk-ends-with-the-last-token",
            "chunk-end-token",
            "token",
            serve={"chunk": CHUNK, "feeds": last_at_chunk_ends},
        ),
        Planted("draft-ids-unmapped", "tokens-fed-wrongly", "token", serve={"unmapped": True}),
        Planted("positions-of-the-prefill", "positions-wrong", "position", serve={"shift": lambda _r, _p, n: not n}),
        Planted(
            "positions-of-extends",
            "positions-wrong",
            "position",
            serve={"shift": lambda _, path, n: int(n > 0 and not path)},
        ),
        Planted(
            "positions-of-all-extends", "positions-wrong", "position", serve={"shift": lambda _r, p, _n: 3 * (not p)}
        ),
        Planted(
            "positions-of-steps", "positions-wrong", "position", serve={"shift": lambda _r, p, _n: int(len(p) > 0)}
        ),
        Planted("positions-that-grow", "positions-wrong", "position", serve={"shift": lambda _r, p, _n: len(p)}),
        Planted("carry-of-the-first-step", "carry-of-another-row", "hidden", serve={"carry": lambda r, _: (r, ())}),
        Planted(
            "carry-of-the-root-before",
            "carry-of-another-row",
            "hidden",
            serve={"carry": lambda r, path: (r - (len(path) == 1), path[:-1])},
        ),
        Planted(
            "slot-of-the-first-step",
            "kv-slot-of-another-step",
            "layer.0.attn.context",
            serve={"slot": lambda r, path: (r + 1,) if len(path) == 2 else ()},
        ),
        Planted(
            "features-one-row-late",
            "input-shift",
            "target.hidden.0",
            train={"pick": lambda s: np.roll(layers(2, 4, 5)(s), 1, axis=0)},
        ),
        Planted(
            "features-late-behind-verify-rounds",
            "input-shift",
            "target.hidden.0",
            serve={"feature": lambda root, n: root - (n > 0)},
        ),
        Planted(
            "weights-dropped",
            "weights-dropped",
            "layer.0.hidden_norm",
            stored=rename(HIDDEN_NORM, "decoder.hidden_norm.weight"),
            serve_tensors=lambda t: t.update({HIDDEN_NORM: np.ones(128)}),
            serve_write={"dropped": ["decoder.hidden_norm.weight"], "shipped": without(HIDDEN_NORM)},
        ),
        Planted(
            "weights-dropped-q",
            "weights-dropped",
            "layer.0.attn.q",
            stored=rename(Q, "decoder.self_attn.q_proj.weight"),
            serve_tensors=fresh(Q),
            serve_write={"dropped": ["decoder.self_attn.q_proj.weight"], "shipped": without(Q)},
        ),
        Planted(
            "lm-head-missing",
            "weights-missing",
            "logits",
            stored=drop(HEAD),
            serve_tensors=fresh(HEAD),
            serve_write={"shipped": without(HEAD)},
        ),
        Planted(
            "lm-head-tied",
            "lm-head-tied",
            "logits",
            config=put("tie_word_embeddings", value=True),
            serve_tensors=embedding_head(80),
            serve_write={"params": _params_without_head(), "dropped": [HEAD]},
        ),
        Planted(
            "lm-head-from-target",
            "lm-head-from-target",
            "logits",
            config=put("draft_vocab_size", value=None),
            serve_tensors=embedding_head(320),
            serve={"d2t": np.zeros(320, dtype=np.int64)},
        ),
        Planted(
            "embedding-of-nobody",
            "weights-differ",
            "embed",
            serve_tensors=lambda held: held.update({EMBEDDING: held[EMBEDDING] * 1.25}),
        ),
        Planted(
            "embedding-replaced",
            "embedding-replaced",
            "embed",
            trained_stored=own_embedding,
            trained=put("embed_requires_grad", value=True),
        ),
        Planted(
            "d2t-holds-ids",
            "d2t-absolute",
            "topk.target_id",
            stored=offsets(lambda d, n: d + n),
            serve=deployed_offsets(lambda d, n: d + n),
            serve_tensors=lambda t: t.update(d2t=head + np.arange(len(head))),
        ),
        Planted(
            "d2t-minus-arange",
            "d2t-absolute",
            "topk.target_id",
            stored=offsets(lambda d, n: d - n),
            serve=deployed_offsets(lambda d, n: d - n),
            serve_tensors=lambda t: t.update(d2t=head - np.arange(len(head))),
        ),
        Planted(
            "d2t-zeros",
            "d2t-missing",
            "topk.target_id",
            stored=offsets(lambda d, _: 0 * d),
            serve=deployed_offsets(lambda d, _: 0 * d),
            serve_tensors=lambda t: t.update(d2t=0 * head),
        ),
        Planted(
            "d2t-stale",
            "d2t-stale",
            "topk.target_id",
            stored=offsets(lambda d, _: d + 1),
            serve=deployed_offsets(lambda d, _: d + 1),
            serve_tensors=lambda t: t.update(d2t=head + 1),
        ),
        Planted(
            "residual-norm",
            "residual-norm",
            "layer.0.attn.residual",
            trained=put("norm_before_residual", value=True),
            train={"norm_residual": True},
        ),
        Planted(
            "norm-before-fc",
            "fc-norm-ignored",
            "fc.in",
            trained=put("norm_before_fc", value=True),
            trained_stored=ones_for("input_norm.weight", 384),
            train={"before_fc": lambda x, t, eps: rms(x, t["input_norm.weight"], eps)},
        ),
        Planted(
            "fc-norm",
            "fc-norm-ignored",
            "fc.in",
            trained=put("fc_norm", value=True),
            trained_stored=several(*(ones_for(f"fc_norm.{n}.weight", 128) for n in range(3))),
            train={"before_fc": each_norm},
        ),
        Planted(
            "fc-norm-not-trained",
            "fc-norm-ignored",
            "fc.in",
            config=put("eagle_config", "norm_before_fc", value=True),
            serve={"before_fc": lambda x, _, eps: rms(x, np.ones(384), eps)},
        ),
        Planted(
            "carry-norm", "carry-norm", "carry", trained=put("norm_output", value=True), train={"norm_output": True}
        ),
        Planted("head-norm", "head-norm", "norm", trained=put("head_norm", value=False), train={"head_norm": False}),
        Planted("head-norm-of-the-engine", "head-norm", "norm", serve={"head_norm": False}),
        Planted(
            "norm-eps", "norm-eps", "layer.0.embed_norm", config=put("rms_norm_eps", value=1e-2), serve={"eps": 1e-2}
        ),
        Planted("norm-eps-of-the-engine", "norm-eps", "layer.0.embed_norm", serve={"eps": 1e-3}),
        Planted("norm-offset", "norm-offset", "layer.0.embed_norm", serve={"offset": True}),
        Planted(
            "rope-theta",
            "rope-theta",
            "layer.0.attn.q_rope",
            config=put("rope_parameters", "rope_theta", value=500.0),
            serve={"theta": 500.0},
        ),
        Planted("rope-theta-of-the-engine", "rope-theta", "layer.0.attn.q_rope", serve={"theta": 20000.0}),
        *(
            Planted(
                f"rope-tables-{rounded}",
                "rope-tables",
                "layer.0.attn.q_rope",
                trained=put("rope_rounded", value=rounded),
                train={"rounded": rounded},
            )
            for rounded in ("frequencies", "angles")
        ),
        Planted("rope-tables-of-the-engine", "rope-tables", "layer.0.attn.q_rope", serve={"rounded": "frequencies"}),
        Planted("rope-interleaved", "rope-layout", "layer.0.attn.q_rope", serve={"layout": "pairs"}),
        Planted("rope-partial", "rope-layout", "layer.0.attn.q_rope", serve={"share": 0.5}),
        Planted(
            "max-position",
            "max-position",
            "layer.0.attn.q_rope",
            config=put("max_position_embeddings", value=32),
            serve={"limit": 32},
        ),
        Planted(
            "query-heads-permuted", "qkv-order", "layer.0.attn.q", serve_tensors=heads(Q, [2, 3, 0, 1]), loaded=True
        ),
        Planted("keys-and-values-swapped", "qkv-order", "layer.0.attn.k", serve_tensors=swap(K, V), loaded=True),
        Planted("sliding-window", "sliding-window", "layer.0.attn.context", serve={"window": 24}),
        Planted("sliding-window-of-one", "sliding-window", "layer.0.attn.context", serve={"window": 1}),
        Planted(
            "sliding-window-flag",
            "sliding-window",
            "layer.0.attn.context",
            serve={"window": 24},
            serve_write={"settings": {"sglang_args": ["--speculative-draft-window-size", "24"]}},
        ),
        Planted("softmax-scale-of-the-engine", "softmax-scale", "layer.0.attn.context", serve={"scale": 0.25}),
        Planted("kv-not-refreshed", "kv-not-refreshed", "layer.0.attn.context", serve={"stale": True}),
        Planted("rows-never-computed", "kv-rows-missing", "layer.0.attn.context", serve={"skipped": range(34, 38)}),
        Planted("slots-behind-that-grow", "kv-length", "layer.0.attn.context", serve={"behind": lambda step: step}),
        Planted("keys-of-draft-steps-unseen", "kv-length", "layer.0.attn.context", serve={"behind": lambda s: -s}),
        Planted("own-key-of-every-row-unseen", "kv-length", "layer.0.attn.context", serve={"behind": lambda _: -1}),
        Planted("slot-behind-every-row", "kv-length", "layer.0.attn.context", serve={"behind": lambda _: 1}),
        Planted("kv-cached-prefix", "kv-cached-prefix", "layer.0.attn.context", serve={"prefix": (10, 1.5)}),
        Planted(
            "kv-cache-dtype",
            "kv-cache-dtype",
            "layer.0.attn.context",
            serve={"cached": ml_dtypes.bfloat16},
            serve_write={"settings": {"kv_cache_dtype": "bfloat16"}},
        ),
        Planted("attention-not-reduced", "tp-shard", "layer.0.attn.out", serve_tensors=half(OUT), loaded=True),
        Planted(
            "mlp-not-reduced",
            "tp-shard",
            "layer.0.mlp.out",
            serve_tensors=half("layers.0.mlp.down_proj.weight"),
            loaded=True,
        ),
        Planted("nan", "nonfinite", "layer.0.mlp.out", serve={"damage": nan_at("layer.0.mlp.out")}),
        Planted("verify-rejects", "verify-rejects", None, serve={"refuses": True}),
        Planted(
            "metric",
            "metric",
            None,
            serve_write={"settings": {"server_counts": {"r": {"spec_accept_length": 1.04, "spec_verify_ct": 24}}}},
        ),
    ]


def last_at_chunk_ends(tokens: Any, root: int, path: Any, _round: int) -> int:
    """The last row of a chunk is fed the last token of the prompt, which is a text of `TEXTS`."""
    if path:
        return int(path[-1])
    prompt = next(len(text.encode()) for text in TEXTS if bytes(tokens[: len(text.encode())]) == text.encode())
    inside = root + 1 < prompt
    return int(tokens[prompt - 1] if inside and (root + 1) % CHUNK == 0 else tokens[root + 1])


def _params_without_head() -> Any:
    held = read_tensors(DRAFT)
    held.pop(HEAD)
    return held


def target_with_noise(folder: Path, first_layer: int = 0, names: tuple[str, ...] = ("",)) -> Planted:
    """The server's target is another one: matrices of some layers (those whose names hold one of `names`) a little off.

    The features are those of layers 2, 4 and 5, by their inputs.
    """

    def stir(held: dict[str, Any]) -> None:
        draw = np.random.default_rng(9)
        for name, one in held.items():
            layer = int(name.split(".")[2]) if ".layers." in name else -1
            if one.ndim == 2 and "embed" not in name and layer >= first_layer and any(part in name for part in names):
                held[name] = (one.astype(np.float64) * (1 + 0.05 * draw.standard_normal(one.shape))).astype(one.dtype)

    path, _ = copy_checkpoint(TARGET, folder / "other-target", None, stir)
    first = next(k for k, layer in enumerate((2, 4, 5)) if layer > first_layer)
    return Planted("target-differs", "target-differs", f"target.hidden.{first}", serve={"target": Target(path)})


def two_faults() -> Planted:
    """A server of single-layer features that also has the wrong eps."""
    one, two = (next(p for p in faults() if p.name == name) for name in ("single-layer", "norm-eps"))
    config = several(one.config or (lambda _: None), two.config or (lambda _: None))
    return replace(one, name="two-faults", config=config, serve={**one.serve, **two.serve})
