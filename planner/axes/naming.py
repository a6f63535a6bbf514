"""Unifies the dims of a graph, and names the axes that result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import ONE, Extent, Op, TensorOrigin, constant
from autopar.planner.rules.rule import Rule
from autopar.planner.rules.signature import (
    UNIT,
    Concat,
    Dim,
    FlattenedDims,
    Leaf,
    Signature,
    concat,
    leaves,
    product,
    size_of,
    substituted,
)


class Unifier:
    """A growing set of equations between dims.

    A leaf is free, or equal to another leaf, or equal to a product or a concatenation of dims.
    """

    def __init__(self) -> None:
        self._bound: dict[str, Dim] = {}
        self._count = 0

    def fresh(self, size: Extent) -> Dim:
        """Return a new free dim."""
        if size == ONE:
            return UNIT
        self._count += 1
        return Leaf(f"d{self._count}", size)

    def representative(self, dim: Dim) -> Dim:
        """Return the leaf that represents all leaves equal to this one; other dims do not change.

        Leaves on the way are bound directly to the result (path compression). Otherwise, every
        layer of a deep model would walk through all layers before it.
        """
        passed: list[str] = []
        while isinstance(dim, Leaf):
            bound = self._bound.get(dim.name)
            if not isinstance(bound, Leaf):
                break
            passed.append(dim.name)
            dim = bound
        for name in passed[:-1]:
            self._bound[name] = dim
        return dim

    def structure(self, dim: Dim) -> Dim:
        """Return what a dim is at its top: a free leaf, a product or a concatenation."""
        dim = self.representative(dim)
        return self._bound.get(dim.name, dim) if isinstance(dim, Leaf) else dim

    def resolved(self, dim: Dim) -> Dim:
        """Return a dim with only free leaves: each bound leaf is replaced by the dim it equals."""

        def replace(leaf: Leaf) -> Dim:
            top = self.structure(leaf)
            return top if isinstance(top, Leaf) else self.resolved(top)

        return substituted(dim, replace)

    def unify(self, a: Dim, b: Dim) -> bool:
        """Make two dims equal; return whether they can be.

        If they cannot, parts of them that were made equal on the way stay equal.
        """
        a, b = self.representative(a), self.representative(b)
        if a == b:
            return True
        if size_of(a) != size_of(b):
            return False
        top_a, top_b = self.structure(a), self.structure(b)
        if isinstance(top_a, Leaf):
            return self._bind(top_a, b)
        if isinstance(top_b, Leaf):
            return self._bind(top_b, a)
        if type(top_a) is type(top_b):
            return self._unify_lists(top_a, top_b)
        if isinstance(top_a, Concat):
            top_a, top_b = top_b, top_a
        assert isinstance(top_a, FlattenedDims)
        assert isinstance(top_b, Concat)
        return self._unify_product_with_concat(top_a, top_b)

    def _bind(self, leaf: Leaf, dim: Dim) -> bool:
        if leaf in leaves(self.resolved(dim)):
            return False  # a dim cannot be a part of itself
        self._bound[leaf.name] = dim
        return True

    def _unify_lists(self, top_a: FlattenedDims | Concat, top_b: FlattenedDims | Concat) -> bool:
        """Make the factors of two products, or the parts of two concatenations, equal in order.

        If one of a pair is longer, it is split to match the other, unless it has a structure that
        does not fit.
        """
        kind = type(top_a)
        split = self._split_product if kind is FlattenedDims else self._cut_part
        a, b = self._flat([top_a], kind), self._flat([top_b], kind)
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if size_of(x) == size_of(y):
                if not self.unify(x, y):
                    return False
                continue
            longer, shorter, rest = (x, y, a) if size_of(y) < size_of(x) else (y, x, b)
            other = b if rest is a else a
            halves = split(longer, shorter)
            if halves is None:
                return False
            rest[:0] = (halves[0], *self._flat([halves[1]], kind))
            other.insert(0, shorter)
        return not a and not b

    def _split_product(self, dim: Dim, outer: Dim) -> tuple[Dim, Dim] | None:
        """Split a factor into an outer one of the size of `outer`, and the rest; None if it fails.

        A concatenation of n equal parts counts as the product of n and one part.
        """
        top, size = self.structure(dim), size_of(outer)
        inner_size = size_of(dim).divided_by(size)
        if inner_size is None:
            return None
        if isinstance(top, Concat):
            parts = [self.representative(part) for part in top.parts]
            is_even = constant(len(parts)) == size
            if not (is_even and all(self.unify(parts[0], other) for other in parts[1:])):
                return None
            return outer, parts[0]
        if not isinstance(top, Leaf):
            return None
        halves = self.fresh(size), self.fresh(inner_size)
        self._bound[top.name] = product(halves)
        return halves

    def _cut_part(self, dim: Dim, first: Dim) -> tuple[Dim, Dim] | None:
        """Split a free part of a concatenation after as many elements as `first` has; else None."""
        top, size = self.structure(dim), size_of(first)
        if not isinstance(top, Leaf):
            return None
        halves = self.fresh(size), self.fresh(size_of(dim) - size)
        self._bound[top.name] = concat(halves)
        return halves

    def _unify_product_with_concat(self, whole: FlattenedDims, parts: Concat) -> bool:
        """Make a product k·x and a concatenation [x | x | …] of k parts equal."""
        factors = self._flat(whole.factors, FlattenedDims)
        count = constant(len(parts.parts))
        lead: list[Dim] = []
        while factors and size_of(product(lead)) < count:
            lead.append(factors.pop(0))
        if size_of(product(lead)) != count:
            return False
        return all(self.unify(part, product(factors)) for part in parts.parts)

    def _flat(self, dims: Iterable[Dim], kind: type[FlattenedDims | Concat]) -> list[Dim]:
        """Return dims in which those of one kind (products, or concatenations) are flattened."""
        flat: list[Dim] = []
        for dim in dims:
            top = self.structure(dim)
            if isinstance(top, kind):
                flat += self._flat(
                    top.factors if isinstance(top, FlattenedDims) else top.parts, kind
                )
            else:
                flat.append(self.representative(dim))
        return flat


# Priorities of names. An axis of the batch, of attention or of the vocabulary has the name of this
# role, even if it is also the channels of a convolution or the width of a norm.
_RANKS = {
    "batch": 100,
    "seq": 90,
    "height": 88,
    "width": 88,
    "heads": 80,
    "kv_heads": 80,
    "group": 80,
    "head_dim": 80,
    "vocab": 70,
    "embed": 65,
    "channels": 60,
    "experts": 55,
    "classes": 62,
    "positions": 35,
    "ffn": 10,
}
# If such a dim is a concatenation, its parts get the name, too: a part of the features is still
# features, but half a head_dim is not a head_dim.
_SHARED_WITH_PARTS = ("channels", "embed")
_WEAK = 30  # subtracted from the priority of an uncertain name


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A proposed name of a dim, and its priority."""

    dim: Dim
    name: str
    rank: int


def hints_of(
    op: Op, rule: Rule, signature: Signature, letters: Mapping[str, Dim], graph: Graph
) -> Iterator[Hint]:
    """Yield the names that one op proposes for its letters."""
    if not rule.names:
        return
    has_parameter = any(
        graph.tensors[root].origin is TensorOrigin.PARAMETER
        for root in graph.index.storages(op.inputs)
    )
    activations_only = "heads" in rule.names.values() and "h" not in rule.names
    if activations_only and has_parameter:
        return
    for letter, dim in signature.letters.items():
        name = rule.names.get("…" if letter.startswith("…") else letter)
        if name is None or not isinstance(dim, Leaf) or dim.name not in letters:
            continue
        if name == "entries":
            name = "vocab" if _is_input(op.inputs[1], graph) else "positions"
        weak = _WEAK if activations_only or letter in ("q", "t") else 0
        yield Hint(dim=letters[dim.name], name=name, rank=_RANKS[name] - weak)


def _is_input(tensor: str, graph: Graph) -> bool:
    return graph.tensors[graph.tensors[tensor].storage].origin is TensorOrigin.INPUT


def named(
    graph: Graph, dims: Mapping[str, tuple[Dim, ...]], unifier: Unifier, hints: list[Hint]
) -> tuple[dict[str, str], dict[Dim, str]]:
    """Return the names of all axes, and the names of concatenations whose parts have no names."""
    naming = _Naming(graph, dims, unifier)
    naming.choose([*naming.input_hints(), *hints])
    wholes = {
        dim: name
        for dim, name in naming.wholes.items()
        # otherwise the names of the parts say more
        if not all(leaf.name in naming.chosen for leaf in leaves(dim))
    }
    naming.name_inner_axes({leaf.name for dim in wholes for leaf in leaves(dim)})
    return naming.numbered(), wholes


class _Naming:
    """The names chosen so far: of axes, and of whole concatenations."""

    def __init__(self, graph: Graph, dims: Mapping[str, tuple[Dim, ...]], unifier: Unifier) -> None:
        self.graph, self.unifier = graph, unifier
        self.dims = {name: tuple(map(unifier.resolved, own)) for name, own in dims.items()}
        self.every = [leaf for own in self.dims.values() for dim in own for leaf in leaves(dim)]
        self.chosen: dict[str, str] = {}
        self.wholes: dict[Dim, str] = {}

    def input_hints(self) -> Iterator[Hint]:
        """Yield the names that follow from the dtypes and shapes of the inputs."""
        for name in self.graph.inputs:
            tensor, own = self.graph.tensors[name], self.dims[name]
            if own:
                yield Hint(dim=own[0], name="batch", rank=_RANKS["batch"])
            if tensor.dtype.startswith("int") and len(own) > 1:
                yield Hint(dim=own[1], name="seq", rank=_RANKS["seq"])
            if not tensor.dtype.startswith("int") and len(own) == 4:
                for dim, word in zip(own[1:], ("channels", "height", "width"), strict=True):
                    yield Hint(dim=dim, name=word, rank=_RANKS[word])

    def choose(self, hints: Iterable[Hint]) -> None:
        """Choose names by hints, those of the highest rank first."""
        seen: dict[str, set[str]] = {}
        for hint in sorted(hints, key=lambda hint: -hint.rank):
            self._propose(hint.dim, hint.name)
            for leaf in self._free(hint.dim):
                seen.setdefault(leaf.name, set()).add(hint.name)
        self._name_vocabularies(seen)

    def _propose(self, dim: Dim, name: str) -> None:
        """Name an axis, or the only axis in a product that has no name, or a concatenation."""
        top, chosen = self.unifier.structure(dim), self.chosen
        if isinstance(top, Leaf):
            chosen.setdefault(top.name, name)
        elif isinstance(top, FlattenedDims):
            factors = [self.unifier.structure(factor) for factor in top.factors]
            unnamed = [leaf for leaf in self._free(top) if leaf.name not in chosen]
            if len(unnamed) == 1:
                chosen[unnamed[0].name] = name
            elif (
                len(unnamed) == 2 and name == "heads" and all(isinstance(f, Leaf) for f in factors)
            ):
                chosen[unnamed[0].name], chosen[unnamed[1].name] = "kv_heads", "group"
            joined = [f for f in factors if isinstance(f, Concat)]
            if not unnamed and len(joined) == 1:  # heads of ALiBi: its slopes are concatenated
                self.wholes.setdefault(self.unifier.resolved(joined[0]), name)
        elif name in _SHARED_WITH_PARTS:
            for part in top.parts:
                self._propose(part, name)
        else:
            self.wholes.setdefault(self.unifier.resolved(top), name)

    def _free(self, dim: Dim) -> list[Leaf]:
        """Return the free leaves in a product, or a dim that is a free leaf itself."""
        top = self.unifier.structure(dim)
        if isinstance(top, Leaf):
            return [top]
        factors = top.factors if isinstance(top, FlattenedDims) else ()
        return [leaf for factor in factors for leaf in self._free(factor)]

    def _name_vocabularies(self, seen: Mapping[str, set[str]]) -> None:
        """Rename an axis `classes` to `vocab` if it indexes a table, or has a vocab's size."""
        chosen, sizes = self.chosen, {leaf.name: leaf.size for leaf in self.every}
        for leaf, names in seen.items():
            if {"positions", "classes"} <= names and chosen[leaf] in ("positions", "classes"):
                chosen[leaf] = "vocab"
        vocabularies = {sizes[leaf] for leaf, name in chosen.items() if name == "vocab"}
        for leaf, name in chosen.items():
            if name == "classes" and sizes[leaf] in vocabularies:
                chosen[leaf] = "vocab"

    def name_inner_axes(self, excluded: set[str]) -> None:
        """Name an axis ffn if two weights share it, and each also has the model's width."""
        shared = Counter[str]()
        for parameter in self.graph.parameters:
            own = self.dims[parameter.name]
            found = {leaf.name for dim in own for leaf in leaves(dim)}
            is_wide = any(self.chosen.get(one) in ("embed", "channels", "ffn") for one in found)
            if is_wide and len(own) > 1:
                shared.update(found - self.chosen.keys() - excluded)
        self.chosen.update({name: "ffn" for name, count in shared.items() if count > 1})

    def numbered(self) -> dict[str, str]:
        """Name every axis; if axes of different sizes have one name, later ones get numbers.

        An axis without a name is called by its size.
        """
        numbers: dict[str, list[str]] = {}
        names: dict[str, str] = {}
        for leaf in dict.fromkeys(self.every):
            name = self.chosen.get(leaf.name)
            if name is None:
                names[leaf.name] = str(leaf.size)
                continue
            sizes = numbers.setdefault(name, [])
            if str(leaf.size) not in sizes:
                sizes.append(str(leaf.size))
            index = sizes.index(str(leaf.size))
            names[leaf.name] = f"{name}_{index + 1}" if index else name
        return names
