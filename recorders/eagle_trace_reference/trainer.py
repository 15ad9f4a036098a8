"""The reference forward as a `TrainingHost`, and where its sites are."""

from __future__ import annotations

from typing import Any

import torch

from eagle_trace.errors import UsageError
from eagle_trace.recording.hooks import Hooks
from eagle_trace.recording.tap import after, before
from eagle_trace_reference.host import CLASS
from eagle_trace_reference.load import load_draft
from eagle_trace_reference.model import LatentDraft
from eagle_trace_reference.releases import check_release
from eagle_trace_training.documents import Pack
from eagle_trace_training.host import LiveDraft, Receive, TrainingHost
from eagle_trace_training.sites import ENTRANCE, SiteTap, layer_taps

LATENT_ATTENTION = (
    after("q_a_proj", "q_a"),
    after("kv_a_proj_with_mqa", "kv_a"),
    after("q_a_layernorm", "q_a_norm"),
    after("kv_a_layernorm", "kv_a_norm"),
    after("q_b_proj", "q"),
    after("rotary", "q_rope", lambda turned: turned[0].flatten(1)),
    after("rotary", "k_rope", lambda turned: turned[1].flatten(1)),
)
LAYER = "layers.0"
TAPS = (
    *ENTRANCE,
    before(LAYER, "hidden", name="hidden"),
    before(f"{LAYER}.self_attn.rotary", "position", 2),
    *layer_taps(LAYER, attention=LATENT_ATTENTION),
    after("norm", "norm"),
    after("lm_head", "logits"),
)


def sites(hooks: Hooks, model: LatentDraft, receive: Receive) -> SiteTap:
    """All sites, and the carry, which is normed or not."""
    return SiteTap(hooks, model, [*TAPS, after("norm" if model.shape.norm_output else LAYER, "carry")], receive)


def changes(dtype: str) -> list[str]:
    """What a reader must know: that no trainer computed this."""
    return [
        f"the forward is eagle-trace's own reference of {CLASS}, in plain torch, and not a trainer's: what a "
        "trainer computes otherwise than the draft's config says is not seen here",
        f"no autocast: parameters and activations are {dtype} throughout, as a server holds them",
    ]


def forward(model: Any, pack: Pack, hidden_states: Any) -> None:
    """See `LatentDraft.forward`."""

    def rows(numbers: Any) -> Any:
        return torch.from_numpy(numbers).long().to(hidden_states.device)

    model(rows(pack.token_ids), rows(pack.document_ids), rows(pack.positions), hidden_states, pack.steps)


def live(_model: Any) -> LiveDraft:
    """Raises UsageError: nothing trains with it."""
    raise UsageError("the reference forward trains nothing: give --draft, and no training command")


#: documents packed along T, keys and values expanded
TRAINER = TrainingHost(
    name="reference",
    packages=("torch", "transformers", "numpy"),
    samples_are="training data: no trainer belongs to the reference forward, --features takes compute or serve",
    check=check_release,
    load=load_draft,
    changes=changes,
    sites=sites,
    forward=forward,
    live=live,
)
