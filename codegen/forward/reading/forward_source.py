"""Answers questions about the source of forwards and classes: sizes, attributes, modes."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from textwrap import dedent
from types import CodeType, FunctionType
from typing import Any

from autopar.planner.model.functions import nested_code, plain_function

_Place = tuple[int, int]  # line, column


def checks_sizes(source: str) -> bool:
    """Whether a forward reads sizes and may raise an error."""
    raises = re.search(r"^\s*(raise|assert)\b", source, flags=re.M) is not None
    return raises and re.search(r"\.(shape|size)\b|\blen\(", source) is not None


def branches_in_training(source: str) -> bool:
    """Whether a forward has an `if` that asks for `self.training`.

    A condition that also asks for a library's own checkpointing does not count.
    """
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:
        return False
    tests = (ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If))
    return any("self.training" in test and "checkpoint" not in test for test in tests)


def keeps_state(source: str) -> bool:
    """Whether a forward reads an attribute before it sets it, and so depends on earlier calls."""
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:  # a lambda inside an expression
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


def left_on_others(sources: Iterable[str], called: Set[str]) -> frozenset[str]:
    """Return the attributes that classes, outside of constructors, set on other objects.

    Only methods that a step may run count: those that a forward names, directly or through other
    methods, and those in `called`. A step never runs `set_input_embeddings`.
    """
    methods: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for source in sources:
        for method in _methods(source):
            methods[method.name].append(method)
    waiting = [name for name in methods if name in called or name.startswith(("forward", "__"))]
    reached, found = set(waiting), set[str]()
    while waiting:
        name = waiting.pop()
        for node in (node for method in methods[name] for node in ast.walk(method)):
            if isinstance(node, ast.Attribute) and node.attr in methods.keys() - reached:
                reached.add(node.attr)
                waiting.append(node.attr)
            if isinstance(node, ast.Attribute) and _is_set_on_other(node) and name != _CONSTRUCTOR:
                found.add(node.attr)
    return frozenset(found)


def _is_set_on_other(node: ast.Attribute) -> bool:
    is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node.ctx, ast.Store) and not is_own


def own_attributes(source: str) -> frozenset[str]:
    """Return the attributes of `self` that a class reads outside of its constructor."""
    loads = (_attributes(function, ast.Load) for function in _run_later(source))
    return frozenset(name for found in loads for name, _ in found)


def remembers(source: str) -> bool:
    """Whether a class, outside of its constructor, reads attributes that it also sets there."""
    stores = (_attributes(function, ast.Store) for function in _run_later(source))
    return not own_attributes(source).isdisjoint(name for found in stores for name, _ in found)


_CONSTRUCTOR = "__init__"


def _run_later(source: str) -> Iterator[ast.FunctionDef]:
    """Return the methods of a class except its constructor."""
    return (method for method in _methods(source) if method.name != _CONSTRUCTOR)


def _methods(source: str) -> Iterator[ast.FunctionDef]:
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:
        return
    for statement in tree.body[:1]:
        for inner in statement.body if isinstance(statement, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
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


_READING = frozenset({"shape", "size", "numel", "nelement", "len"})


def reads_sizes(forward: Callable[..., Any], owner: type) -> bool:
    """Whether a forward, or a user's method or function that it names, reads a size."""
    waiting, met = [plain_function(forward)], set[CodeType]()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function.__code__ in met:
            continue
        met.add(function.__code__)
        names = {name for code in nested_code(function.__code__) for name in code.co_names}
        if names & _READING:
            return True
        waiting += [found for name in names for found in _meant(name, function, owner)]
    return False


def _meant(name: str, function: FunctionType, owner: type) -> Iterator[Any]:
    """Yield what a name in a function may refer to, outside of torch: a method or a global."""
    method = inspect.getattr_static(owner, name, None)
    for found in (getattr(method, "__func__", method), function.__globals__.get(name)):
        if not str(getattr(found, "__module__", "torch")).startswith("torch"):
            yield inspect.unwrap(found) if isinstance(found, FunctionType) else found


def numbers_read(source: str) -> frozenset[str]:
    """Return the attributes of attributes of `self` in the source of a class: "config.eps"."""
    try:
        nodes = ast.walk(ast.parse(dedent(source)))
    except SyntaxError:
        return frozenset()
    texts = (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(text[5:] for text in texts if re.fullmatch(r"self(\.[a-z]\w*){2,}", text))
