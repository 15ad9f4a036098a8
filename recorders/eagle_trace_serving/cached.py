"""In which dtype a server keeps keys and values, as all hosts' manifests say it."""

from __future__ import annotations


def cached_as(target: object, draft: object) -> dict[str, str]:
    """``kv_cache_dtype`` of a manifest's settings, and ``draft_kv_cache_dtype`` where the draft's is another.

    Args:
        target, draft: the dtypes as the server has them (torch's, or their names); None or nothing where it does not
            say.
    """
    kept, drafted = (str(dtype or "").removeprefix("torch.") for dtype in (target, draft))
    told = {"kv_cache_dtype": kept, "draft_kv_cache_dtype": drafted if drafted != kept else ""}
    return {name: dtype for name, dtype in told.items() if dtype}
