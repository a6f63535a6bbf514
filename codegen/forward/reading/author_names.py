"""Reads the author's names from the source of forwards."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from textwrap import dedent
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op
from autopar.planner.model.functions import nested_code, plain_function

_Place = tuple[int, int]  # line, column


def checks_sizes(source: str) -> bool:
    """Whether a forward reads sizes and may raise an error."""
    raises = re.search(r"^\s*(raise|assert)\b", source, flags=re.M) is not None
    return raises and re.search(r"\.(shape|size)\b|\blen\(", source) is not None


def branches_in_training(source: str) -> bool:
    """Whether a forward computes something else in training, with an `if`; dropout is no such case.

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


def left_on_others(source: str) -> frozenset[str]:
    """Return the attributes that a class, after its constructor, sets on other objects."""
    return frozenset(
        node.attr
        for function in _methods(source)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    )


def own_attributes(source: str) -> frozenset[str]:
    """Return the attributes of its own that a class, after its constructor, reads."""
    loads = (_attributes(function, ast.Load) for function in _methods(source))
    return frozenset(name for found in loads for name, _ in found)


def remembers(source: str) -> bool:
    """Whether a class, after its constructor, reads attributes that it sets."""
    stores = (_attributes(function, ast.Store) for function in _methods(source))
    return not own_attributes(source).isdisjoint(name for found in stores for name, _ in found)


def _methods(source: str) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class except its constructor."""
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


_USABLE = re.compile(r"(?!l$)[a-z][a-z0-9_]*")
# Names in source code for ops with another name in ATen.
_ALSO: Mapping[str, str] = MappingProxyType(
    {"to": "float type_as half bfloat16 double long int bool", "view": "reshape flatten unflatten"}
)
_OPERATORS: Mapping[type[ast.AST], str] = MappingProxyType(
    {
        ast.Add: "add", ast.Sub: "sub rsub", ast.Mult: "mul", ast.Div: "div reciprocal",
        ast.MatMult: "matmul mm bmm", ast.Pow: "pow", ast.Mod: "remainder", ast.USub: "neg",
        ast.FloorDiv: "floor_divide", ast.BitAnd: "__and__ bitwise_and logical_and",
        ast.BitOr: "__or__ bitwise_or logical_or", ast.Invert: "bitwise_not logical_not",
        ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A statement that assigns the results of an operation to names."""

    first: int
    last: int
    names: tuple[str, ...]
    does: frozenset[str]  # possible names of the operation
    is_function: bool  # the operation is a plain function, not a module

    def is_by(self, target: str) -> bool:
        """Whether an op is the last operation of the statement."""
        name = target.split(".")[1] if "." in target else target
        return not self.does.isdisjoint((name, name.rstrip("_"), *_ALSO.get(name, "").split()))


def author_names(graph: Graph) -> Mapping[str, str]:
    """Return the names that statements of the model's source give to tensors.

    The last op of a statement makes the assigned value, if it is the statement's last operation: in
    `x = self.norm(x[:, 0])` that is the module. A function's result has the name that its caller
    gives.
    """
    own: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        own[op.call].append(op)
    found: dict[str, str] = {}
    for ops in own.values():
        for lines in (_line_of_function, _line_of_forward):  # the caller's line first
            for setting, run in groupby(ops, key=lambda op: _setting(lines(op))):
                if setting is not None:
                    made = _set_by(setting, tuple(run), graph)
                    found |= zip(made, setting.names, strict=True) if made else ()
    return MappingProxyType({tensor: name for tensor, name in found.items() if name})


def _line_of_function(op: Op) -> str:
    return op.location if op.callers else ""


def _line_of_forward(op: Op) -> str:
    return op.callers[-1] if op.callers else op.location


def _set_by(setting: _Setting, ops: Sequence[Op], graph: Graph) -> tuple[str, ...]:
    """Return the tensors that a statement names, or () if unclear."""
    made = ops[-1].outputs
    if setting.is_by(ops[-1].target):
        return made if len(made) == len(setting.names) else ()
    if not setting.is_function or len(setting.names) != 1:
        return ()
    inside, readers = {op.name for op in ops}, graph.index.readers
    left = [
        name
        for op in ops
        for name in op.outputs
        if any(reader.name not in inside for reader in readers[name])
    ]
    return tuple(left) if len(left) == 1 else ()


def unpacked(source: str) -> Mapping[str, tuple[str, ...]]:
    """Return, for each variable, the names into which a function unpacks it."""
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:  # a lambda inside an expression
        return MappingProxyType({})
    return MappingProxyType(
        {
            node.value.id: _names(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and isinstance(node.targets[0], ast.Tuple)
        }
    )


@cache
def _setting(location: str) -> _Setting | None:
    """Return the innermost assignment at file:line."""
    file, _, line = location.rpartition(":")
    if not line.isdigit():
        return None
    around = [one for one in _settings(file) if one.first <= int(line) <= one.last]
    return min(around, key=lambda one: one.last - one.first, default=None)


@cache
def _settings(file: str) -> tuple[_Setting, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(_present(file))))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_settings_in(tree))


def _present(file: str) -> str:
    """Return the current path of a plan's file: projects move, and packages differ.

    It is loaded, because the model is built. Of several files with its name, the most similar path
    is taken.
    """
    loaded = {str(getattr(module, "__file__", None)) for module in tuple(sys.modules.values())}
    if file in loaded:
        return file
    parts = Path(file).parts[::-1]

    def alike(other: str) -> int:
        pairs = zip(parts, Path(other).parts[::-1], strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    named = sorted(one for one in loaded if Path(one).name == Path(file).name)
    return max(named, key=alike, default=file)


def _settings_in(tree: ast.AST) -> Iterator[_Setting]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, does = node.targets[0], _does(node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, does = node.target, _does(node.value)
        elif isinstance(node, ast.AugAssign):
            target, does = node.target, _OPERATORS.get(type(node.op), "")
        else:
            continue
        yield _Setting(
            first=node.lineno,
            last=node.end_lineno or node.lineno,
            names=_names(target),
            does=frozenset(does.split()),
            is_function=isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name),
        )


def _names(target: ast.AST) -> tuple[str, ...]:
    """Return the assigned variables; "" for names that a script cannot use."""
    parts = target.elts if isinstance(target, ast.Tuple) else (target,)
    names = [part.id if isinstance(part, ast.Name) else "" for part in parts]
    return tuple(name if _USABLE.fullmatch(name) else "" for name in names)


def _does(value: ast.expr) -> str:
    """Return the possible name of an expression's outermost operation."""
    match value:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
        case ast.BinOp(op=operator) | ast.UnaryOp(op=operator):
            return _OPERATORS.get(type(operator), "")
        case ast.Compare(ops=[operator]):
            return _OPERATORS.get(type(operator), "")
        case ast.Subscript():
            return "slice select index"
        case ast.IfExp(body=body):
            return _does(body)
    return ""
