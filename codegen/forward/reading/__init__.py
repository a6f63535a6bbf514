"""Reads the user's modules; finds which sizes of which tensors the code of a forward reads."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from autopar.codegen.forward.reading.author_names import parsed
from autopar.planner.model.functions import nested_code, plain_function

_READING = frozenset({"shape", "size", "numel", "nelement", "len"})
_Place = tuple[int, int]  # line, column


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesRead:
    """Sizes that a forward reads: those of a tensor's dims `first` to `last`, as in a slice.

    `argument` is the name of the forward's argument that is this tensor. It is "" where the source
    does not prove which tensor this is.
    """

    argument: str = ""
    first: int | None = None
    last: int | None = None


def reads_sizes(function: Callable[..., Any], owner: type) -> bool:
    """Whether a forward or function, or a user's function that it names, reads a size."""
    return any(_readers(function, owner))


def sizes_read(forward: Callable[..., Any], owner: type, source: str) -> Iterator[SizesRead]:
    """Yield the sizes that a forward reads, itself or in the user's functions that it names.

    `source` is the forward's own. The sizes that other functions read are of unknown tensors, and
    so are all sizes where a decorator runs the forward, because it may change the arguments.
    """
    own = getattr(forward, "__func__", forward)
    statements = parsed(source).body
    for reader in _readers(forward, owner):
        if reader is own and len(statements) == 1 and isinstance(statements[0], ast.FunctionDef):
            yield from _ForwardReader(statements[0]).found()
        else:
            yield SizesRead()


def _readers(function: Callable[..., Any], owner: type) -> Iterator[FunctionType]:
    """Yield the functions that read sizes: the given one, and users' functions that it names."""
    waiting, met = [plain_function(function)], set[CodeType]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, FunctionType) or one.__code__ in met:
            continue
        met.add(one.__code__)
        names = {name for code in nested_code(one.__code__) for name in code.co_names}
        if names & _READING:
            yield one
        waiting += _meant(names, one, owner)


def _meant(names: Set[str], function: FunctionType, owner: type) -> Iterator[Any]:
    """Yield what names in a function may refer to, outside of torch: methods, globals.

    A method may be called by `super()`, so the methods of all classes are meant. A module that is
    named may be followed by a name of its own (`layers.scaled`). What a decorator has wrapped is in
    the closure of the wrapper.
    """
    named = [function.__globals__.get(name) for name in names]
    modules = [one for one in named if isinstance(one, ModuleType) and not _is_library(one)]
    places = [*(vars(kind) for kind in owner.__mro__), *map(vars, modules)]
    found = [place.get(name) for place in places for name in names]
    empty = CellType()
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell != empty]
    for one in (getattr(one, "__func__", one) for one in (*found, *named, *closed)):
        if not str(getattr(one, "__module__", "torch")).startswith("torch"):
            yield inspect.unwrap(one) if isinstance(one, FunctionType) else one


def _is_library(module: ModuleType) -> bool:
    package = module.__name__.partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


class _ForwardReader:
    """Finds the sizes that the source of a forward reads."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.nodes = list(ast.walk(function))
        self.around = {inner: node for node in self.nodes for inner in ast.iter_child_nodes(node)}
        self.function, given = function, function.args
        self.arguments = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        self.changes = self._changes()
        self.loaded = {
            node.id
            for node in self.nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }

    def found(self) -> Iterator[SizesRead]:
        """Yield the sizes that are read."""
        for node in self.nodes:
            around = self.around.get(node)
            is_called = isinstance(around, ast.Call) and around.func is node and not around.keywords
            given = around.args if is_called and isinstance(around, ast.Call) else []
            match node, given:
                case ast.Attribute(attr="shape", value=tensor), _:
                    yield from self._picked(tensor, node)
                case ast.Attribute(attr="size", value=tensor), [] if is_called:
                    yield from self._picked(tensor, around)
                case ast.Attribute(attr="size", value=tensor), [index]:
                    yield self._at(tensor, index)
                case ast.Attribute(attr="numel" | "nelement", value=tensor), _:
                    yield SizesRead(argument=self._argument(tensor))
                case ast.Name(id="len"), [tensor]:
                    yield SizesRead(argument=self._argument(tensor), first=0, last=1)
                case ((ast.Attribute(attr=name) | ast.Name(id=name)), _) if name in _READING:
                    yield SizesRead()

    def _picked(self, tensor: ast.expr, sizes: ast.AST | None) -> Iterator[SizesRead]:
        """Yield those of a tensor's sizes that are used."""
        around = self.around[sizes] if sizes is not None else None
        match around:
            case ast.Subscript(value=value, slice=index) if value is sizes:
                yield self._at(tensor, index)
            case ast.Assign(targets=[ast.Tuple(elts=targets)]) if all(
                isinstance(one, ast.Name) for one in targets
            ):
                for place, target in enumerate(targets):
                    if isinstance(target, ast.Name) and target.id in self.loaded:
                        yield self._at(tensor, ast.Constant(place))
            case _:
                yield SizesRead(argument=self._argument(tensor))

    def _at(self, tensor: ast.expr, index: ast.expr) -> SizesRead:
        argument = self._argument(tensor)
        match index:
            case ast.Slice(lower=lower, upper=upper, step=None):
                first, last = _number(lower), _number(upper)
                if (first is None) == (lower is None) and (last is None) == (upper is None):
                    return SizesRead(argument=argument, first=first, last=last)
            case _ if (place := _number(index)) is not None:
                return SizesRead(argument=argument, first=place, last=place + 1 or None)
        return SizesRead(argument=argument)

    def _argument(self, tensor: ast.expr) -> str:
        """Return the argument that an expression is, or "" if it may be another tensor.

        The name of an argument must not have been assigned before. Lines run in their order, except
        in loops and nested functions.
        """
        if not isinstance(tensor, ast.Name) or tensor.id not in self.arguments:
            return ""
        around = list(self._all_around(tensor))
        changes = self.changes.get(tensor.id, ())
        repeats = any(isinstance(one, (*_LOOPS, *_COMPREHENSIONS)) for one in around)
        is_later = not repeats and all(_place(tensor) < change for change in changes)
        is_nested = any(isinstance(one, _FUNCTIONS) for one in around)
        return tensor.id if not is_nested and (is_later or not changes) else ""

    def _all_around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (node := self.around[node]) is not self.function:
            yield node

    def _changes(self) -> Mapping[str, Sequence[_Place]]:
        """Return where names may get another meaning, or their objects other attributes."""
        found: dict[str, list[_Place]] = defaultdict(list)
        for node in self.nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                    around = next(
                        (one for one in self._all_around(node) if isinstance(one, _ASSIGNMENTS)),
                        None,
                    )
                    # the assigned value is computed before
                    found[name].append(_place(node) if around is None else _end(around))
                case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    found[name].append((0, 0))
                case _:  # imports, exceptions, patterns of `match`, nested functions
                    names = (getattr(node, field, None) for field in ("name", "asname", "rest"))
                    for other in filter(None, names):
                        found[other].append((0, 0))
        return found


def _place(node: ast.expr) -> _Place:
    return node.lineno, node.col_offset


def _end(node: ast.stmt | ast.expr) -> _Place:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _number(node: ast.expr | None) -> int | None:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
    return None
