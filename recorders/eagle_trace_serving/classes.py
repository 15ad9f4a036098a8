"""What the model classes of an installed server define: asked of its sources.

As in `sources`, they are parsed and not run: importing a server's models takes ten seconds, and drops those whose
kernels are not there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: inheritance deeper than any in a server: a circle of names ends here
DEEPEST = 16


@dataclass(frozen=True)
class Module:
    """One file, parsed."""

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


class Classes:
    """The model classes of an installed server.

    Args:
        folder: of its sources, one file beside the other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Module | None] = {}

    def methods(self, name: str) -> set[str] | None:
        """What the registered class `name` and its bases define; None if there is no such class."""
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
            if isinstance(inner, ast.FunctionDef):
                yield inner.name
        for base in node.bases:
            known = ast.unparse(base).split(".")[-1]
            # a class may bear the name of the one it extends
            if known == name and known in module.imports:
                yield from self._methods(*module.imports[known], depth + 1)
            elif known != name:
                yield from self._methods(stem, known, depth + 1)
