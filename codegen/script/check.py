"""Checks a script before it is written: only what a training script needs may stand in it."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator

from autopar.codegen.known_names import KNOWN, KNOWN_ALONE

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
_BUILTINS_ALONE = _BUILTINS | {"bytes", "getattr", "hasattr", "iter", "map", "next"}


class UnsafeScriptError(AssertionError):
    """A script that holds what no plan asks for: a bug of ours, or a plan that was forged."""


def check_script(script: str) -> None:
    """Refuse a script that is no Python, or does anything that training does not need."""
    _check(script, KNOWN, _BUILTINS)


def check_plain_loop(script: str) -> None:
    """Refuse the same of a loop of plain PyTorch, which does by itself what the runtime does."""
    _check(script, KNOWN_ALONE, _BUILTINS_ALONE)


def _check(script: str, modules: Container[str], builtins: Iterable[str]) -> None:
    tree = ast.parse(script)
    faults = [*_strange_statements(tree), *_strange_names(tree, modules, builtins)]
    if faults:
        raise UnsafeScriptError("the script would not be safe: " + "; ".join(faults))


def _strange_statements(tree: ast.Module) -> Iterator[str]:
    """Yield what stands at the top of the file and is neither definition nor data."""
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr)
        if not (isinstance(node, _TOP) or is_docstring or ast.unparse(node) in _OF_A_SCRIPT):
            text = ast.unparse(node)
            if not text.startswith("sys.path.insert(0, str(Path(__file__).resolve().parent"):
                yield f"line {node.lineno}: {text[:60]!r}"


_OF_A_SCRIPT = tuple(
    f"if __name__ == '__main__':\n    {called}()" for called in ("tell_errors_once", "main")
)


def _strange_names(
    tree: ast.Module, modules: Container[str], builtins: Iterable[str]
) -> Iterator[str]:
    """Yield names that nothing in the script defines, and any with two underscores in front."""
    defined = {*_defined(tree), *builtins, *_DUNDERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in defined:
            yield f"line {node.lineno}: the name {node.id}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not _is_super(node):
            yield f"line {node.lineno}: the attribute {node.attr}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in modules and alias.asname not in ("model_file", "F"):
                    yield f"line {node.lineno}: import {alias.name}"


def _is_super(node: ast.Attribute) -> bool:
    return ast.unparse(node) == "super().__init__"


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
