"""The family eagle3-mla: a draft as eagle3's, with multi-head latent attention (DeepSeek-V2, section 2.1).

Queries, keys and values go through two narrow projections: `q_a` of width D (q_lora_rank), and `kv_a`, a latent of
width L (kv_lora_rank) beside the one key of width R (qk_rope_head_dim) that is rotated and shared by all heads. `q`
has, for each of h heads, P elements that meet the latent (qk_nope_head_dim) and R that are rotated; A = h x v_head_dim.

Keys and values of single heads have no site: a server either computes them from the latent (`kv_b_proj`, expanded) or
multiplies queries and sums by that matrix's parts instead (absorbed), so what both forms have is the latent, its key,
and the output. `kv_b_proj` therefore shows at ``attn.context`` first.
"""

from __future__ import annotations

from functools import partial

from eagle_trace.families import eagle3
from eagle_trace.families.base import Family, Site


def _attention(n: int, into: tuple[str, ...]) -> list[Site]:
    at, module = f"layer.{n}.attn", f"layers.{n}.self_attn"
    return [
        Site(
            f"{at}.q_a", ("D",), "value", "all", into, product=True, parameters=(f"{module}.q_a_proj",),
            meaning="queries projected down",
        ),
        Site(
            f"{at}.kv_a", ("L+R",), "value", "all", into, product=True, parameters=(f"{module}.kv_a_proj_with_mqa",),
            meaning="latent of keys and values before its norm, and the shared key before rotation",
        ),
        Site(
            f"{at}.q_a_norm", ("D",), "value", "all", (f"{at}.q_a",), kernel_roundings=eagle3.NORM,
            parameters=(f"{module}.q_a_layernorm",), meaning="queries projected down, after their norm",
        ),
        Site(
            f"{at}.kv_a_norm", ("L",), "value", "all", (f"{at}.kv_a",), kernel_roundings=eagle3.NORM,
            parameters=(f"{module}.kv_a_layernorm",), meaning="latent of keys and values, as it is cached",
        ),
        Site(
            f"{at}.q", ("h*(P+R)",), "value", "all", (f"{at}.q_a_norm",), product=True, split_by="query heads",
            parameters=(f"{module}.q_b_proj",), meaning="queries before rotation",
        ),
        Site(
            f"{at}.q_rope", ("h*R",), "value", "all", (f"{at}.q", "position"), rotated=True,
            kernel_roundings=eagle3.ROTATION, split_by="query heads", meaning="rotated parts of the queries",
        ),
        Site(
            f"{at}.k_rope", ("R",), "value", "all", (f"{at}.kv_a", "position"), rotated=True,
            kernel_roundings=eagle3.ROTATION, meaning="rotated key, one for all heads",
        ),
        # absorbed, four products are rounded: queries by keys' part, weights, their sum, and that by values' part
        Site(
            f"{at}.context", ("A",), "value", "all",
            (f"{at}.q", f"{at}.q_rope", f"{at}.k_rope", f"{at}.kv_a_norm"), product=True,
            carried=(f"{at}.k_rope", f"{at}.kv_a_norm"), roundings=4, kernel_roundings=eagle3.ATTENTION,
            split_by="query heads", parameters=(f"{module}.kv_b_proj",),
            meaning="attention output before the output projection",
        ),
    ]  # fmt: skip


EAGLE3_MLA = Family("eagle3-mla", partial(eagle3.sites, attention=_attention))
