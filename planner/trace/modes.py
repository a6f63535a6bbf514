"""Looks at which modules train and which evaluate, as the constructor has left them.

A training leaves modes as they are, as a plain loop does that never calls `model.train()`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

from torch import nn

from autopar.planner.errors import InputError

_LONGEST = 60  # characters of code that an error shows


def check_root_trains(
    model: nn.Module, build_model: Callable[..., Any], name: str, where: str
) -> None:
    """Refuse a model that evaluates as a whole, as from_pretrained returns it; show what to write.

    Its dropout would be off, and its batch norms would keep their statistics.
    """
    if model.training:
        return
    line, returned = _last_return(inspect.unwrap(build_model))
    raise InputError(
        "the model is in eval mode: it has no dropout, and its batch norms learn no statistics",
        where=f"{where}:{line}" if line else f"{name} of {where}",
        expected="a model to train; parts that stay frozen may be in eval mode",
        fix=f"return {returned.removesuffix('.eval()') or 'model'}.train()",
    )


def _last_return(function: Callable[..., Any]) -> tuple[int, str]:
    """Return the line of a function's last `return`, and what stands there if that is short."""
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return 0, ""
    *_, last = (None, *_returns(tree))
    if last is None or last.value is None:
        return 0, ""
    text = ast.unparse(last.value)
    is_bound = isinstance(last.value, ast.Name | ast.Attribute | ast.Call)
    shown = text if is_bound else f"({text})"
    return first + last.lineno - 1, shown if len(shown) <= _LONGEST else ""


def _returns(tree: ast.AST) -> Iterator[ast.Return]:
    """Yield the returns of a function, and not those of functions inside it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(node)


def parts_in_eval_mode(model: nn.Module) -> tuple[str, ...]:
    """Return the outermost parts that evaluate and yet learn, by name.

    A single layer that evaluates was put so on purpose: batch norms that keep their statistics.
    """
    return tuple(_evaluating(model, ""))


def _evaluating(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        own = f"{path}.{name}".lstrip(".")
        if child.training:
            yield from _evaluating(child, own)
        elif any(child.children()) and any(p.requires_grad for p in child.parameters()):
            yield own
