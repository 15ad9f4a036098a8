"""What a draft's worker says of its server, as all servers' manifests say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eagle_trace.manifest import Manifest

#: what a server is made of beside itself
_BESIDE = ("torch", "transformers", "numpy", "eagle-trace")
#: where a target's class keeps the model that computes its layers
_INNER = ("language_model", "model", "llm", "thinker")


def packages(*server: str) -> dict[str, str]:
    """Versions of the distributions that a server is installed by, and of what it computes with; of those there are."""
    found = {}
    for name in (*server, *_BESIDE):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cached_as(target: object, draft: object) -> dict[str, str]:
    """``kv_cache_dtype`` of a manifest's settings, and ``draft_kv_cache_dtype`` where the draft's is another.

    Args:
        target, draft: the dtypes as the server has them (torch's, or their names); None or nothing where it does not
            say.
    """
    kept, drafted = (str(dtype or "").removeprefix("torch.") for dtype in (target, draft))
    told = {"kv_cache_dtype": kept, "draft_kv_cache_dtype": drafted if drafted != kept else ""}
    return {name: dtype for name, dtype in told.items() if dtype}


def target_facts(model: Any, layers: str, flag: str = "") -> dict[str, Any]:
    """What the manifest says of a loaded target: whether it captures several layers for its draft, and which.

    Args:
        model: the target as the server holds it.
        layers: attribute that lists the layers whose input is captured, on the model or on one inside it.
        flag: attribute that says whether any are, if the server has one.

    Returns:
        `architecture`: its class; `captures`: whether it was told to capture (None where it has no such flag);
        `captured_inputs`: layers whose input it feeds the draft (None where it has no such list).
    """
    flags, lists = [], []
    waiting, seen = [model], set()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        flags += [getattr(one, flag)] if flag and isinstance(getattr(one, flag, None), bool) else []
        lists += [getattr(one, layers)] if isinstance(getattr(one, layers, None), list | tuple | set) else []
        waiting += [getattr(one, name, None) for name in _INNER]
    found = next((some for some in lists if some), lists[0] if lists else None)
    return {
        "architecture": type(model).__name__,
        "captures": any(flags) if flags else None,
        "captured_inputs": None if found is None else sorted(int(layer) for layer in found),
    }


def never_computed(why: str, rows: str, sites: Iterable[str]) -> list[dict[str, str]]:
    """Sites of which a server computes nothing, or not for all rows, as a manifest has them."""
    return [{"site": site, "rows": rows, "why": why} for site in sites]


def tell_missing(manifest: Manifest, title: str, missing: Mapping[str, str]) -> None:
    """Write the sites that a draft has no place for, and what it lacks (`tap.hang`), into a manifest."""
    for site, place in missing.items():
        manifest.not_materialised += never_computed(f"{title}'s draft class has no {place}", "all", [site])
    if missing:
        manifest.warnings.append(
            f"this {title}'s draft class has no {', '.join(sorted(set(missing.values())))}: "
            f"not recorded are {', '.join(missing)}"
        )
