"""Reads in the source of a forward what a graph of its ops does not show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from textwrap import dedent

_Place = tuple[int, int]  # line, column


def checks_sizes(source: str) -> bool:
    """Whether a forward reads sizes and may raise an error."""
    raises = re.search(r"^\s*(raise|assert)\b", source, flags=re.M) is not None
    return raises and re.search(r"\.(shape|size)\b|\blen\(", source) is not None


def branches_in_training(source: str) -> bool:
    """Whether a forward does something else in training, by an `if`; dropout takes no such thing.

    What asks for checkpoints of a library's own as well is no other computation.
    """
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:
        return False
    tests = (ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If))
    return any("self.training" in test and "checkpoint" not in test for test in tests)


def keeps_state(source: str) -> bool:
    """Whether a forward reads an attribute before it sets it: what an earlier call has left."""
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:  # a lambda amid an expression
        return False
    first_set: dict[str, _Place] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _attributes(node.target, ast.Store):
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name, _ in _attributes(node, ast.Store):
                end = (node.end_lineno or 0, node.end_col_offset or 0)
                first_set[name] = min(end, first_set.get(name, end))
    return any(
        name in first_set and place < first_set[name] for name, place in _attributes(tree, ast.Load)
    )


def left_on_others(source: str) -> frozenset[str]:
    """Return the attributes that a class, once built, sets on what is not itself."""
    return frozenset(
        node.attr
        for function in _methods(source)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    )


def own_attributes(source: str) -> frozenset[str]:
    """Return the attributes of its own that a class, once built, reads."""
    loads = (_attributes(function, ast.Load) for function in _methods(source))
    return frozenset(name for found in loads for name, _ in found)


def remembers(source: str) -> bool:
    """Whether a class, once built, reads attributes that it sets."""
    stores = (_attributes(function, ast.Store) for function in _methods(source))
    return not own_attributes(source).isdisjoint(name for found in stores for name, _ in found)


def _methods(source: str) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class but its constructor."""
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:
        return
    for statement in tree.body[:1]:
        for inner in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef) and inner.name != "__init__":
                yield inner


def _attributes(tree: ast.AST, context: type[ast.expr_context]) -> list[tuple[str, _Place]]:
    return [
        (node.attr, (node.lineno, node.col_offset))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
