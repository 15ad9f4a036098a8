"""SGLang's own module about keys, from its file alone: it needs no torch, which its package would import."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from eagle_trace_sglang.releases import RELEASES

NAME = "sglang.srt.utils.auth"


def sglang_auth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`sglang.srt.utils.auth` of the installed release, found by whoever imports it."""
    spec = importlib.util.spec_from_file_location(NAME, RELEASES.installed()[1] / "utils" / "auth.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module
