"""Docstrings and signatures that are made when a module is imported, for the API page.

The reader of sources that makes the page runs nothing. Classes of optimizers say ``__doc__ =
f"...{OPTIONS_DOC}..."``, in which it would find no docstring. `swap` and `unswap` get their first
argument from a decorator.
"""

from __future__ import annotations

import ast
from pathlib import Path

import griffe

OPTIONS = Path(__file__).parents[1] / "python" / "onepass" / "optim" / "options.py"


class PutTogether(griffe.Extension):
    def on_class_instance(self, *, node: ast.AST, cls: griffe.Class, **_) -> None:
        if not isinstance(node, ast.ClassDef):
            return
        for given in _assigned(node, "__doc__"):
            parts = given.values if isinstance(given, ast.JoinedStr) else [given]
            cls.docstring = griffe.Docstring(
                "".join(map(_text, parts)), lineno=given.lineno, parent=cls
            )

    def on_function_instance(self, *, func: griffe.Function, **_) -> None:
        if any(str(decorator.value) == "_all_or_nothing" for decorator in func.decorators):
            del func.parameters[func.parameters[0].name]


def _text(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return part.value
    (options,) = _assigned(ast.parse(OPTIONS.read_text(encoding="utf-8")), part.value.id)
    return options.value


def _assigned(node: ast.Module | ast.ClassDef, name: str) -> list[ast.expr]:
    """What a module or class assigns to a name."""
    return [
        statement.value
        for statement in node.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
    ]
