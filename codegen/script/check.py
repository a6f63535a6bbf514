"""Checks a script before it is written: only what a training script needs may stand in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from autopar.codegen.known_names import KNOWN

_TOP = (
    ast.Import,
    ast.ImportFrom,
    ast.ClassDef,
    ast.FunctionDef,
    ast.Assign,
    ast.AnnAssign,
)
_DUNDERS = frozenset({"__file__", "__name__"})
_BUILTINS = frozenset(
    {
        "ValueError", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len",
        "list", "max", "min", "print", "property", "range", "reversed", "round", "set", "slice",
        "sorted", "str", "sum", "super", "tuple", "type", "zip",
    }
)  # fmt: skip


class UnsafeScriptError(AssertionError):
    """A script that holds what no plan asks for: a bug of ours, or a plan that was forged."""


def check_script(script: str) -> None:
    """Refuse a script that is no Python, or does anything that training does not need."""
    tree = ast.parse(script)
    faults = [*_strange_statements(tree), *_strange_names(tree)]
    if faults:
        raise UnsafeScriptError("the script would not be safe: " + "; ".join(faults))


def _strange_statements(tree: ast.Module) -> Iterator[str]:
    """Yield what stands at the top of the file and is neither definition nor data."""
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr)
        if not (isinstance(node, _TOP) or is_docstring or ast.unparse(node) == _MAIN):
            text = ast.unparse(node)
            if not text.startswith("sys.path.insert(0, str(Path(__file__).resolve().parent"):
                yield f"line {node.lineno}: {text[:60]!r}"


_MAIN = "if __name__ == '__main__':\n    main()"


def _strange_names(tree: ast.Module) -> Iterator[str]:
    """Yield names that nothing in the script defines, and any with two underscores in front."""
    defined = {*_defined(tree), *_BUILTINS, *_DUNDERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in defined:
            yield f"line {node.lineno}: the name {node.id}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            yield f"line {node.lineno}: the attribute {node.attr}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in KNOWN and alias.asname not in ("model_file", "F"):
                    yield f"line {node.lineno}: import {alias.name}"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
