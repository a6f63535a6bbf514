"""The language of the rules: letters stand for the dims of an op's tensors.

A pattern such as `input … i, weight o i, bias? o -> … o` names each tensor argument and its dims.
Dims with the same letter are the same axis. `…` stands for any number of dims, aligned on the right
and broadcast; `[d]` and `[…]` may not be split; `1` has no letter; `g·c` is one dim that flattens
two, of which the first has the size of the argument `groups`; `?` marks an optional tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import ONE, Extent, Op, Ref, Tensor, numel, refs

Tiles = tuple[tuple[Extent, ...], int]  # the sizes of slices that cover a dim, the index of one
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_Fixed = ParamSpec("_Fixed")


def tiles_of(graph: Graph) -> Mapping[str, Tiles]:
    """Find slices that together cover a dim of a tensor.

    Return for each slicing op, by name, the sizes of all these slices and the index of its own.
    """
    cuts: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    source: dict[str, str] = {}  # x[:] → x
    for op in graph.ops:
        cut = _cut(op, graph)
        if cut is not None:
            dim, start, end = cut
            first = op.inputs[0]
            cuts[source.get(first, first), dim][op.name] = (start, end)
        if op.target == "aten.slice.Tensor":
            taken, out = op.inputs[0], op.outputs[0]
            if graph.tensors[taken].shape == graph.tensors[out].shape:
                source[out] = source.get(taken, taken)
    found: dict[str, Tiles] = {}
    for (tensor, dim), pieces in cuts.items():
        ends = graph.tensors[tensor].shape[dim].at(0)
        borders = sorted(set(pieces.values()))
        meets = [start for start, _ in borders] == [0, *(end for _, end in borders[:-1])]
        if meets and borders[-1][1] == ends and len(borders) > 1:
            sizes = tuple(Extent.of(end - start) for start, end in borders)
            for name, piece in pieces.items():
                found[name] = (sizes, borders.index(piece))
    return found


def _cut(op: Op, graph: Graph) -> tuple[int, int, int] | None:
    """Return the dim, start and end that a slice of step one, or a constant index, takes."""
    if op.target == "aten.slice.Tensor":
        shape = graph.tensors[op.inputs[0]].shape
        dim, step = op.argument("dim"), op.argument("step")
        start, end = op.argument("start"), op.argument("end")
        if not isinstance(dim, int) or step != 1 or not shape[dim].is_constant:
            return None
        size = shape[dim].at(0)
        if not isinstance(start, int | None) or not isinstance(end, int | None):
            return None
        first, last, _ = slice(start, end).indices(size)
        return (dim % len(shape), first, last) if last > first else None
    if op.target == "aten.index.Tensor":
        return _constant_index(op, graph)
    return None


def _constant_index(op: Op, graph: Graph) -> tuple[int, int, int] | None:
    indices = op.argument("indices")
    assert isinstance(indices, tuple)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not isinstance(given[0][1], Ref):
        return None
    dim, name = given[0][0], next(refs(given[0][1]))
    values = graph.constants[name].values if name in graph.constants else None
    size = graph.tensors[op.inputs[0]].shape[dim]
    if not isinstance(values, tuple) or len(values) != 1 or not size.is_constant:
        return None
    if not isinstance(values[0], int):
        return None
    position = values[0] % size.at(0)
    return dim, position, position + 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A dim without structure: a letter of a rule, or a logical axis of the model."""

    name: str
    size: Extent


@dataclass(frozen=True, slots=True)
class FlattenedDims:
    """Dims flattened into one, the outermost first; the empty product has size one."""

    factors: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenated dims; `name` is the name of the concatenation, if it has one."""

    parts: tuple[Dim, ...]
    name: str = ""


Dim = Leaf | FlattenedDims | Concat
UNIT = FlattenedDims(())


def size_of(dim: Dim) -> Extent:
    """Return the number of positions of a dim."""
    if isinstance(dim, Leaf):
        return dim.size
    if isinstance(dim, FlattenedDims):
        return numel(tuple(map(size_of, dim.factors)))
    return sum(map(size_of, dim.parts), Extent(()))


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of dims: nested products are flattened; a single dim stays as it is."""
    factors: list[Dim] = []
    for dim in dims:
        factors.extend(dim.factors if isinstance(dim, FlattenedDims) else (dim,))
    return factors[0] if len(factors) == 1 else FlattenedDims(tuple(factors))


def concat(dims: Iterable[Dim]) -> Dim:
    """Return the concatenation of dims: nested ones are flattened, unless they have a name."""
    parts: list[Dim] = []
    for dim in dims:
        flat = isinstance(dim, Concat) and not dim.name
        parts.extend(dim.parts if isinstance(dim, Concat) and flat else (dim,))
    return parts[0] if len(parts) == 1 else Concat(tuple(parts))


def leaves(dim: Dim) -> Iterator[Leaf]:
    """Yield the leaves of a dim, in order."""
    if isinstance(dim, Leaf):
        yield dim
    else:
        for inner in dim.factors if isinstance(dim, FlattenedDims) else dim.parts:
            yield from leaves(inner)


def substituted(dim: Dim, replace: Callable[[Leaf], Dim]) -> Dim:
    """Return a dim with its leaves replaced."""
    if isinstance(dim, Leaf):
        return replace(dim)
    if isinstance(dim, FlattenedDims):
        return product(substituted(factor, replace) for factor in dim.factors)
    made = concat(substituted(part, replace) for part in dim.parts)
    return Concat(made.parts, dim.name) if isinstance(made, Concat) and dim.name else made


def text_of(dim: Dim) -> str:
    """Return a dim as people read it: `heads·head_dim`, `[ffn | ffn]`, `1`."""
    if isinstance(dim, Leaf):
        return dim.name
    if isinstance(dim, FlattenedDims):
        return "·".join(map(text_of, dim.factors)) or "1"
    return dim.name or f"[{' | '.join(map(text_of, dim.parts))}]"


Dims = tuple[Dim, ...]
_MANY = ("…", "[…]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The dims of an op's tensors in letters; a letter in `whole` may not be split.

    `letters` maps the letters of the rule to dims. If `is_opaque`, only the batch dim is known.
    """

    operands: tuple[tuple[str, Dims], ...]
    results: tuple[tuple[str, Dims], ...]
    whole: frozenset[str] = frozenset()
    letters: Mapping[str, Dim] = field(default_factory=dict)
    is_opaque: bool = False

    def fits(self, case: Case) -> bool:
        """Whether the dims have the tensors' sizes."""
        return all(
            tuple(map(size_of, dims)) == tuple(case.shape(name))
            for name, dims in (*self.operands, *self.results)
            if name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An op with the shapes of its tensors, for the functions of the table.

    If the op is one of several slices that together cover a dim, `tiles` has the sizes of all
    these slices and the index of its own.
    """

    op: Op
    tensors: Mapping[str, Tensor]
    tiles: Tiles | None = None

    def shape(self, tensor: str) -> tuple[Extent, ...]:
        """Return the shape of a tensor."""
        return self.tensors[tensor].shape

    @property
    def first(self) -> str:
        """The first tensor argument."""
        return self.op.inputs[0]

    @property
    def result(self) -> str:
        """The first result."""
        return self.op.outputs[0]


class Letters:
    """Creates letters with sizes; a dim of size one needs none."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, size: Extent) -> Dim:
        """Return a new letter."""
        if size == ONE:
            return UNIT
        self._count += 1
        return Leaf(f"x{self._count}", size)

    def of(self, shape: tuple[Extent, ...]) -> Dims:
        """Return new letters for all dims of a shape."""
        return tuple(map(self.new, shape))


def with_arguments(
    formula: Callable[Concatenate[_Given, _Fixed], _Made],
) -> Callable[_Fixed, Callable[[_Given], _Made]]:
    """Decorate a formula of an op so that a row of the table fixes its other arguments."""

    @wraps(formula)
    def fixed(*args: _Fixed.args, **kwargs: _Fixed.kwargs) -> Callable[[_Given], _Made]:
        return lambda given: formula(given, *args, **kwargs)

    return fixed


def names_of(*dims: Dim) -> frozenset[str]:
    """Return the names of the dims that are single letters."""
    return frozenset(dim.name for dim in dims if isinstance(dim, Leaf))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern."""

    operands: tuple[tuple[str, bool, tuple[str, ...]], ...]  # name, is optional, letters
    results: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> Pattern:
        """Parse a pattern of the table."""
        left, _, right = text.partition("->")
        operands = []
        for part in left.split(","):
            name, *tokens = part.split()
            operands.append((name.rstrip("?"), name.endswith("?"), tuple(tokens)))
        results = tuple(tuple(part.split()) for part in right.split(","))
        return Pattern(tuple(operands), results)

    def signature(self, case: Case) -> Signature:
        """Return the signature of an op; raises ValueError if the pattern does not fit."""
        reading = _Reading(case)
        operands = []
        for name, optional, tokens in self.operands:
            tensor = case.op.tensor(name)
            if tensor:
                operands.append((tensor, reading.dims(tokens, case.shape(tensor))))
            elif not optional:
                raise ValueError(f"{case.op.target} has no tensor {name}")
        results = [
            (tensor, reading.dims(tokens, case.shape(tensor)))
            for tokens, tensor in zip(self.results, case.op.outputs, strict=False)
        ]
        known = {tensor for tensor, _ in operands}
        for extra in case.op.inputs:
            if extra not in known:
                operands.append((extra, reading.letters.of(case.shape(extra))))
        return Signature(
            operands=tuple(operands),
            results=tuple(results),
            whole=frozenset(reading.whole),
            letters=reading.named,
        )


class _Reading:
    """The letters found so far while a pattern is matched with an op's shapes.

    Those in `whole` may not be split.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.letters = Letters()
        self.named: dict[str, Dim] = {}
        self.whole: set[str] = set()

    def dims(self, tokens: tuple[str, ...], shape: tuple[Extent, ...]) -> Dims:
        many = len(shape) - sum(token not in _MANY for token in tokens)
        dims: list[Dim] = []
        for token in tokens:
            if token in _MANY:
                for k in range(many, 0, -1):
                    dims.append(self._many(k, shape[len(dims)], whole=token != "…"))
            else:
                if len(dims) == len(shape):
                    raise ValueError(f"{self.case.op.target}: no dim for {token}")
                dims.append(self._token(token, shape[len(dims)]))
        if len(dims) != len(shape):
            raise ValueError(f"{self.case.op.target}: {len(shape)} dims for {' '.join(tokens)}")
        return tuple(dims)

    def _many(self, position: int, size: Extent, *, whole: bool) -> Dim:
        if size == ONE:
            return UNIT
        dim = self.named.setdefault(f"…{position}", self.letters.new(size))
        if whole:
            self.whole |= names_of(dim)
        return dim

    def _token(self, token: str, size: Extent) -> Dim:
        match = re.fullmatch(r"(\w+)·(\[?)(\w+)\]?", token)
        if match is None:
            letter = token.strip("[]")
            return self._letter(letter, size, whole=token.startswith("["))
        outer_size = Extent.of(self.case.op.number("groups", default=1))
        inner_size = size.divided_by(outer_size)
        if inner_size is None:
            raise ValueError(f"{self.case.op.target}: {size} is not divisible by {outer_size}")
        outer = self._letter(match[1], outer_size, whole=False)
        return product((outer, self._letter(match[3], inner_size, whole=bool(match[2]))))

    def _letter(self, letter: str, size: Extent, *, whole: bool) -> Dim:
        if letter == "1" or size == ONE:
            return UNIT
        dim = self.named.setdefault(letter, self.letters.new(size))
        if whole:
            self.whole |= names_of(dim)
        return dim
