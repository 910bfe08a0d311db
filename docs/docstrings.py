"""Docstrings that a class puts together, for the reader of sources that makes the API page.

Classes of optimizers say ``__doc__ = f"...{OPTIONS_DOC}..."``; the reader runs nothing and would
find no docstring.
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
