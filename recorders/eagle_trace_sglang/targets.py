"""Whether the installed SGLang has the classes of a pair, and the target's can feed a draft: asked of its sources."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_trace.errors import CheckpointError, HostError
from eagle_trace_serving.classes import Classes
from eagle_trace_sglang.releases import RELEASES

#: what SGLang's draft worker asks of a target's class, and what for
CAPTURE, EMBEDDING = "set_eagle3_layers_to_capture", "get_embed_and_head"


def check_classes(target: Mapping[str, Any], draft: Mapping[str, Any], extra: Sequence[str] = ()) -> None:
    """Refuse a draft whose class the installed SGLang does not have, and a target whose class cannot feed a draft.

    A target's class that SGLang's sources do not have (of another package, or of none) is left to SGLang to judge.

    Args:
        target, draft: their configs.
        extra: the user's own arguments for SGLang.

    Raises:
        CheckpointError: SGLang has no class of the draft's name.
        HostError: the target's class lacks what SGLang's draft worker asks for; the message says so.
    """
    if os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") or any(w.startswith("--speculative-algo") for w in extra):
        return
    release, folder = RELEASES.installed()
    classes = Classes(folder / "models")
    own = next(iter(draft.get("architectures") or ()), None)
    if isinstance(own, str) and classes.methods(own) is None:
        raise CheckpointError(
            f"SGLang {release} has no class {own}, which the draft's config names: a draft of a llama layer is its "
            "LlamaForCausalLMEagle3; `eagle-trace check DRAFT --target TARGET` says whether this is one"
        )
    names = [name for name in target.get("architectures") or () if isinstance(name, str)]
    found = next(((name, has) for name in names if (has := classes.methods(name)) is not None), None)
    if found is None:
        return
    name, has = found
    eagle = draft.get("eagle_config")
    captures = not isinstance(eagle, Mapping) or bool(eagle.get("use_aux_hidden_state", True))
    lacks = [EMBEDDING] * (EMBEDDING not in has) + [CAPTURE] * (captures and CAPTURE not in has)
    if lacks:
        raise HostError(
            f"SGLang {release} cannot serve an EAGLE-3 draft of the target class {name}: the class has no "
            f"{' and no '.join(lacks)}, so the server would stop while it starts; use another target, or "
            "a release or an engine whose class has it"
        )
