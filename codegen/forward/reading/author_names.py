"""Reads the names that a model's source gives to values and numbers."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType

from autopar.planner.errors import SourceSpan
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import LOSS_CALL, Op, refs

_USABLE = re.compile(r"(?!l$)[a-z][a-z0-9_]*")
_Position = tuple[int, int, int, int]  # line, column, end line, end column
_FIELDS = ("values", "indices")  # fields of the results of torch.max and torch.topk
# Methods that may run no op, because they may return their argument.
_MAY_RUN_NO_OP = frozenset(
    {"to", "float", "half", "bfloat16", "type_as", "contiguous", "expand", "view", "reshape"}
)


def author_names(graph: Graph) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return, for each tensor, the names that the model's source gives it, the innermost one first.

    Each name comes with the module call whose code gives it.
    """
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    spans = {span for op in graph.ops for span in op.spans}

    def add(call: str, span: SourceSpan, tensors: Sequence[str], *, is_function: bool) -> None:
        names = _names_at(span, spans)
        if not is_function or len(names) == len(tensors):
            for tensor, name in zip(tensors, names, strict=False):
                found[tensor] += [(call, name)] if name else []

    own: dict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        own[caller(op.call, op.spans, graph)].append(op)
    for call, ops in own.items():
        for depth in range(max(len(op.spans) for op in ops), 0, -1):
            for around, run in groupby(ops, key=lambda op: op.spans[-depth:]):
                if len(around) == depth:
                    made, is_function = _made(tuple(run), depth, graph)
                    add(call, around[0], made, is_function=is_function)
    for function in graph.functions:
        for span in function.spans[:1]:
            add(function.call, span, tuple(refs(function.result)), is_function=True)
    for record in reversed(tuple(graph.calls.values())):  # inner calls first: they begin later
        parent = LOSS_CALL if record.parent is None else record.parent
        if record.spans and parent == caller(parent, record.spans, graph):
            add(parent, record.spans[0], tuple(refs(record.result)), is_function=True)
    return MappingProxyType(found)


def caller(call: str, spans: Sequence[SourceSpan], graph: Graph) -> str:
    """Return the call whose code contains the expression with these spans, from `call` outwards.

    Ops in torch's own modules have the spans of the author's expression that calls these modules.
    """
    while spans and call in graph.calls and graph.calls[call].spans == spans:
        parent = graph.calls[call].parent
        call = LOSS_CALL if parent is None else parent
    return call


def _made(run: Sequence[Op], depth: int, graph: Graph) -> tuple[Sequence[str], bool]:
    """Return the results of the expression that runs some ops, and whether it calls a function.

    A function's results are the tensors that other code reads; other expressions have the results
    of their last op.
    """
    if all(len(op.spans) == depth for op in run):
        return run[-1].outputs, False
    inside, readers = {op.name for op in run}, graph.index.readers
    return [
        name
        for op in run
        for name in op.outputs
        if name == graph.loss or any(reader.name not in inside for reader in readers[name])
    ], True


def _names_at(span: SourceSpan, made: Set[SourceSpan]) -> tuple[str, ...]:
    """Return the names that the source gives to an expression's results."""
    file = _file_names(span.file)
    names, around = file.names.get(span[1:], ()), file.no_ops.get(span[1:])
    while not names and around is not None and SourceSpan(span.file, *around) not in made:
        names, around = file.names.get(around, ()), file.no_ops.get(around)
    return names


@lru_cache(maxsize=512)
def parsed(source: str) -> ast.Module:
    """Return the tree of a class or function; empty for a lambda inside an expression."""
    try:
        return ast.parse(dedent(source))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def unpacked(tree: ast.AST) -> Mapping[str, tuple[str, ...]]:
    """Return, for each variable, the names into which code unpacks it."""
    return MappingProxyType(
        {
            node.value.id: _names(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and isinstance(node.targets[0], ast.Tuple)
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An operand or argument that is arithmetic, such as the power in `x * self.dim**-0.5`.

    `beside` is the first of the other operands, here `x`.
    """

    tree: ast.expr
    beside: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileNames:
    """The names that a file gives to the results of its expressions, by their positions."""

    names: Mapping[_Position, tuple[str, ...]]
    no_ops: Mapping[_Position, _Position]  # argument of a call that may run no op → the call
    given: Mapping[_Position, tuple[tuple[str, ...], ...]]  # see attributes_given
    formulas: Mapping[_Position, Sequence[Formula]]
    indices: Set[_Position]  # of expressions with an index: `x[:, None]`


@cache
def _file_names(file: str) -> _FileNames:
    try:
        tree = ast.parse("".join(linecache.getlines(_current_path(file))))
    except (SyntaxError, ValueError):
        return _FileNames(names={}, no_ops={}, given={}, formulas={}, indices=frozenset())
    names = {where: name for node, name in _named(tree) for where in _positions(node)}
    no_ops = {
        where: _positions(node)[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MAY_RUN_NO_OP
        for where in _positions(node.func.value)
    }
    formulas: dict[_Position, list[Formula]] = defaultdict(list)
    for where, formula in _formulas(tree):
        formulas[where].append(formula)
    indexed = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    return _FileNames(
        names=names,
        no_ops=no_ops,
        given=dict(_given(tree)),
        formulas=formulas,
        indices={where for node in indexed for where in _positions(node)},
    )


def _current_path(file: str) -> str:
    """Return where a traced file is now: a project may move, a package be installed elsewhere.

    The file is loaded, because the model was built. Of several files with its name, the most
    similar path is taken.
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


def attributes_given(span: SourceSpan) -> tuple[tuple[str, ...], ...]:
    """Return, for each argument of an expression, the attributes of `self` that may be its value.

    `f(x, self.config.eps)` has ((), ("config.eps",)). A variable stands for the values assigned to
    it.
    """
    return _file_names(span.file).given.get(span[1:], ())


def is_index(span: SourceSpan) -> bool:
    """Whether an expression is a value with an index in square brackets."""
    return span[1:] in _file_names(span.file).indices


def formulas_given(span: SourceSpan) -> Sequence[Formula]:
    """Return the formulas among the operands or arguments of an expression.

    A variable stands for the formulas assigned to it.
    """
    return _file_names(span.file).formulas.get(span[1:], ())


def _formulas(tree: ast.AST) -> Iterator[tuple[_Position, Formula]]:
    nodes = list(ast.walk(tree))
    variables: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() | ast.Call() as value):
                variables[name].append(value)
    for node in nodes:
        match node:
            case ast.Call(func=function, args=args, keywords=keywords):
                owner = [function.value] if isinstance(function, ast.Attribute) else []
                operands = [*owner, *args, *(one.value for one in keywords)]
            case ast.BinOp(left=left, right=right):
                operands = [left, right]
            case _:
                continue
        for operand in operands:
            beside = next((ast.unparse(one) for one in operands if one is not operand), "")
            named = variables[operand.id] if isinstance(operand, ast.Name) else []
            is_computed = isinstance(operand, (ast.BinOp, ast.Call))
            for found in (*named, *([operand] if is_computed else [])):
                yield from ((p, Formula(tree=found, beside=beside)) for p in _positions(node))


def _given(tree: ast.AST) -> Iterator[tuple[_Position, tuple[tuple[str, ...], ...]]]:
    nodes = list(ast.walk(tree))
    variables: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables[node.targets[0].id] += _attributes_in(node.value, {})
    for node in nodes:
        match node:
            case ast.Call(args=args, keywords=keywords):
                values = [*args, *(one.value for one in keywords)]
            case ast.BinOp(left=left, right=right):
                values = [left, right]
            case _:
                continue
        given = tuple(_attributes_in(value, variables) for value in values)
        if any(given):
            yield from ((where, given) for where in _positions(node))


def _attributes_in(value: ast.expr, variables: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return (*_attributes_in(body, variables), *_attributes_in(orelse, variables))
        case ast.Name(id=name):
            return variables.get(name, ())
        case ast.Attribute():
            first, _, rest = ast.unparse(value).partition(".")
            return (rest,) if first == "self" else ()
    return ()


def _named(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.AugAssign, tuple[str, ...]]]:
    """Yield expressions with the names of their results; better names come later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not _is_of_torch(node.func):
            yield from ((one.value, _names(ast.Name(one.arg or ""))) for one in node.keywords)
    unpacks = unpacked(tree)
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign():
                yield node, _names(node.target)
            case ast.Assign(targets=[*_, target], value=value):
                yield from _assigned(target, value, unpacks)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(target, value, unpacks)
            case ast.NamedExpr(target=target, value=value):
                yield from _assigned(target, value, unpacks)


def _assigned(
    target: ast.expr, value: ast.expr, unpacks: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[ast.expr, tuple[str, ...]]]:
    """Yield the expressions whose results an assignment names, with these names."""
    match target, value:
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for one, other in zip(targets, values, strict=True):
                yield from _assigned(one, other, unpacks)
        case _, ast.IfExp(body=body, orelse=orelse):
            yield from _assigned(target, body, unpacks)
            yield from _assigned(target, orelse, unpacks)
        case _, ast.Subscript(value=ast.Call() as whole, slice=ast.Constant(value=int(place))):
            yield value, _names(target)
            yield whole, (*[""] * place, *_names(target))
        case _, ast.Attribute(value=whole, attr=attr) if attr in _FIELDS:
            yield whole, (*[""] * _FIELDS.index(attr), *_names(target))
        case ast.Tuple(), _:
            yield target, _names(target)  # unpacking a tensor runs ops at the target's position
            yield value, _names(target)
        case ast.Name(id=name), _:
            yield value, unpacks.get(name, _names(target))
        case _:
            yield value, _names(target)


def _is_of_torch(function: ast.expr) -> bool:
    return re.match(r"(torch|F|nn)\.", ast.unparse(function)) is not None


def _names(target: ast.expr) -> tuple[str, ...]:
    """Return the assigned names; "" for names that a script cannot use."""
    parts = target.elts if isinstance(target, ast.Tuple) else (target,)
    return tuple(name if _USABLE.fullmatch(name) else "" for name in map(_name, parts))


def _name(target: ast.expr) -> str:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return ""


def _positions(node: ast.expr | ast.AugAssign) -> tuple[_Position, ...]:
    """Return the positions that Python may report for an expression while it runs.

    A method call on several lines begins at the name of the method.
    """
    end = node.end_lineno or node.lineno, node.end_col_offset or 0
    places = [(node.lineno, node.col_offset, *end)]
    named = node.func if isinstance(node, ast.Call) else node
    if isinstance(named, ast.Attribute) and named.lineno != named.end_lineno:
        start = (named.end_col_offset or 0) - len(named.attr)
        places.append((named.end_lineno or 0, start, *end))
    return tuple(places)
