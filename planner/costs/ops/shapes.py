"""Turns an op's signature into the sizes that it has on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from autopar.planner.axes.infer import OpAxes
from autopar.planner.extent import Extent
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.signature import Dims, Signature
from autopar.planner.rules.terms import Concat, Dim, Leaf, Product, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSplit:
    """A split of an op: this letter's leaf `axis` has ⌈size ÷ degree⌉ positions on the rank."""

    letter: str
    axis: str
    degree: int


def local_size(dim: Dim, batch: int, *, axis: str = "", degree: int = 1) -> int:
    """Return the positions of a dim on one rank, an axis in it being split by the degree."""
    if isinstance(dim, Leaf):
        size = dim.size.at(batch)
        return -(-size // degree) if dim.name == axis else size
    if isinstance(dim, Product):
        return prod(local_size(factor, batch, axis=axis, degree=degree) for factor in dim.factors)
    return sum(local_size(part, batch, axis=axis, degree=degree) for part in dim.parts)


class LocalShapes:
    """The sizes of one op's letters and tensors on one rank."""

    def __init__(
        self, op: Op, graph: Graph, axes: OpAxes, *, batch: int, split: OpSplit | None = None
    ) -> None:
        self.op = op
        self.graph = graph
        self.signature = axes.signature
        self.batch = batch
        self.split = split
        self._axes = axes
        self._divided = _fellows(axes, split) if split else frozenset[str]()
        self._expected = _expected_letters(op, graph, axes.signature)
        self._dims = dict((*axes.signature.results[::-1], *axes.signature.operands[::-1]))

    def size(self, dim: Dim) -> int:
        """Return the local size of a dim of the signature."""
        if isinstance(dim, Leaf):
            return self._letter(dim)
        if isinstance(dim, Product):
            return prod(map(self.size, dim.factors))
        return sum(map(self.size, dim.parts))

    def _letter(self, letter: Leaf) -> int:
        whole = self._all_of(letter)
        share = self._expected.get(letter.name)
        return whole if share is None else max(1, round(whole * share))

    def _all_of(self, letter: Leaf) -> int:
        meaning = self._axes.letters.get(letter.name, letter)
        if self.split and letter.name in self._divided:
            axis, degree = self.split.axis, self.split.degree
            return local_size(meaning, self.batch, axis=axis, degree=degree)
        return letter.size.at(self.batch)

    def letters(self, names: Iterable[str]) -> int:
        """Return the product of some letters' sizes, by the names that the rule gives them.

        "*" is every letter, "…" those of the leading dims; h is k·g where key heads are fewer.
        """
        wanted = set(names)
        if "h" in wanted and "k" in self.signature.letters:
            wanted |= {"k", "g"}
        if wanted == {"*"}:
            found = {x for _, dims in self.signature.operands for d in dims for x in leaves(d)}
            return prod(self.size(leaf) for leaf in found)
        return prod(
            self.size(dim)
            for name, dim in self.signature.letters.items()
            if name in wanted or (name.startswith("…") and "…" in wanted)
        )

    def dims(self, tensor: str) -> Dims | None:
        """Return the dims of an operand or result in letters, None where the rule ignores it."""
        return self._dims.get(tensor)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the local shape of an operand or result."""
        dims = self._dims.get(tensor)
        if dims is None:
            return _sizes(self.graph.tensors[tensor].shape, self.batch)
        return tuple(map(self.size, dims))

    def numel(self, tensor: str) -> int:
        """Return the local number of elements of an operand or result."""
        return prod(self.shape(tensor))


def _expected_letters(op: Op, graph: Graph, signature: Signature) -> dict[str, float]:
    """Return the letters of dims that count what a mask picks, with the share that is expected.

    Only those of tensors that are all so counted: where picked rows meet others, all are there.
    """
    tensors = graph.tensors
    if all(tensors[name].expected == 1.0 for name in (*op.inputs, *op.outputs)):
        return {}
    found: dict[str, float] = {}
    others: set[str] = set()
    for name, dims in (*signature.operands, *signature.results):
        tensor = tensors[name]
        mask = tensors.get(tensor.counted_by)
        for dim, size in zip(dims, tensor.shape, strict=True):
            letters = {leaf.name for leaf in leaves(dim)}
            if mask is not None and tensor.expected != 1.0 and size == mask.numel:
                found.update(dict.fromkeys(letters, tensor.expected))
            else:
                others |= letters
    return {letter: share for letter, share in found.items() if letter not in others}


def _sizes(shape: tuple[Extent, ...], batch: int) -> tuple[int, ...]:
    return tuple(size.at(batch) for size in shape)


def _fellows(axes: OpAxes, split: OpSplit) -> frozenset[str]:
    """Return the letter that is split, and those laid end to end with it that hold the axis too.

    The shard of a concatenation is the concatenation of the shards: q, k and v of one fused matrix
    are split alike.
    """
    named = {split.letter}
    for _, dims in (*axes.signature.operands, *axes.signature.results):
        for part in _concatenations(dims):
            names = {leaf.name for leaf in leaves(part)}
            if split.letter in names:
                named |= {
                    name
                    for name in names
                    if any(x.name == split.axis for x in leaves(axes.letters[name]))
                }
    return frozenset(named)


def _concatenations(dims: Iterable[Dim]) -> Iterator[Concat]:
    for dim in dims:
        if isinstance(dim, Concat):
            yield dim
        elif isinstance(dim, Product):
            yield from _concatenations(dim.factors)
