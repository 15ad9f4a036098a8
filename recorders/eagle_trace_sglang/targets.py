"""Whether the installed SGLang has the classes of a pair, and the target's can feed a draft: asked of its sources.

As in `releases`, the sources are parsed and not run: importing SGLang's models takes ten seconds, and drops those whose
kernels are not there.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle_trace.errors import CheckpointError, HostError
from eagle_trace_sglang.releases import installed

#: what SGLang's draft worker asks of a target's class, and what for
CAPTURE, EMBEDDING = "set_eagle3_layers_to_capture", "get_embed_and_head"
#: inheritance deeper than any in SGLang: a circle of names ends here
DEEPEST = 16


@dataclass(frozen=True)
class Module:
    """One file of `sglang/srt/models`, parsed."""

    tree: ast.Module

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Its classes by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Imported names: the module's last part, and the name there."""
        froms = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module)
        return {
            one.asname or one.name: (str(node.module).split(".")[-1], one.name) for node in froms for one in node.names
        }

    @cached_property
    def entries(self) -> set[str]:
        """The classes it registers (`EntryClass`)."""
        found: set[str] = set()
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "EntryClass" for t in node.targets):
                found |= {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
        return found


class Sources:
    """The model classes of an SGLang, by its sources in `folder` (`sglang/srt/models`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Module | None] = {}

    def methods(self, name: str) -> set[str] | None:
        """Which of CAPTURE and EMBEDDING the registered class `name` has, its bases included; None if there is none."""
        # the text is asked first: parsing all 250 files takes seconds
        pattern = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
        for file in sorted(self._folder.glob("*.py")):
            if pattern.search(file.read_text(encoding="utf-8", errors="replace")):
                module = self._module(file.stem)
                if module is not None and name in module.entries:
                    return set(self._methods(file.stem, name, 0))
        return None

    def _module(self, stem: str) -> Module | None:
        if stem not in self._modules:
            try:
                self._modules[stem] = Module(ast.parse((self._folder / f"{stem}.py").read_bytes()))
            except (OSError, SyntaxError):
                self._modules[stem] = None
        return self._modules[stem]

    def _methods(self, stem: str, name: str, depth: int) -> Iterator[str]:
        module = self._module(stem)
        if module is None or depth > DEEPEST:
            return
        node = module.classes.get(name)
        if node is None:
            if name in module.imports:
                yield from self._methods(*module.imports[name], depth + 1)
            return
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name in (CAPTURE, EMBEDDING):
                yield inner.name
        for base in node.bases:
            known = ast.unparse(base).split(".")[-1]
            # a class may bear the name of the one it extends
            if known == name and known in module.imports:
                yield from self._methods(*module.imports[known], depth + 1)
            elif known != name:
                yield from self._methods(stem, known, depth + 1)


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
    release, folder = installed()
    sources = Sources(folder / "models")
    own = next(iter(draft.get("architectures") or ()), None)
    if isinstance(own, str) and sources.methods(own) is None:
        raise CheckpointError(
            f"SGLang {release} has no class {own}, which the draft's config names: a draft of a llama layer is its "
            "LlamaForCausalLMEagle3; `eagle-trace check DRAFT --target TARGET` says whether this is one"
        )
    names = [name for name in target.get("architectures") or () if isinstance(name, str)]
    found = next(((name, has) for name in names if (has := sources.methods(name)) is not None), None)
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
