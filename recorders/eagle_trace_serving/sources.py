"""What the sources of an installed server define: asked by parsing them, which takes no import of the server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HookPoint:
    """A place of a server's that recording stands on.

    Attributes:
        file: below the folder of its sources.
        names: what it must define or import at its top level, `Class.name` for a method or a declared field.
        gives: what is lost without it.
        cpu: needed on a CPU only.
    """

    file: str
    names: tuple[str, ...]
    gives: str
    cpu: bool = False


def missing_names(folder: Path, point: HookPoint) -> list[str]:
    """The names of a hook point that the sources below `folder` do not have; all of them if the file is not there."""
    try:
        tree = ast.parse((folder / point.file).read_bytes())
    except (OSError, SyntaxError):
        return list(point.names)
    known = set(_names(tree.body))
    return [name for name in point.names if name not in known]


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module defines or imports at its top level, also inside `if` and `try`; and `Class.name`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
                yield from (f"{name}.{inner}" for inner in _names(node.body))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (one.asname or one.name for one in names)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If():
                yield from _names([*node.body, *node.orelse])
            case ast.Try():
                yield from _names(
                    [*node.body, *node.orelse, *node.finalbody, *(s for h in node.handlers for s in h.body)]
                )
            case _:
                pass
