"""Unification of dims: says that two dims are the same one, and refines both until they agree."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.planner.extent import ONE, Extent, constant
from autopar.planner.rules.terms import (
    UNIT,
    Concat,
    Dim,
    Leaf,
    Product,
    concat,
    leaves,
    product,
    size_of,
    substituted,
)


class Unifier:
    """A growing set of equations: a leaf is free, equal to another, or structured."""

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
        """Return the leaf that stands for all leaves equal to this one; the way there is cut short.

        Without that, every layer of a deep model would walk through all the layers before it.
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
        """Return a dim in terms of free leaves alone."""

        def replace(leaf: Leaf) -> Dim:
            top = self.structure(leaf)
            return top if isinstance(top, Leaf) else self.resolved(top)

        return substituted(dim, replace)

    def unify(self, a: Dim, b: Dim) -> bool:
        """Make two dims equal; False where they cannot be, with what did agree kept."""
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
        assert isinstance(top_a, Product)
        assert isinstance(top_b, Concat)
        return self._unify_product_with_concat(top_a, top_b)

    def _bind(self, leaf: Leaf, dim: Dim) -> bool:
        if leaf in leaves(self.resolved(dim)):
            return False  # a dim cannot be a part of itself
        self._bound[leaf.name] = dim
        return True

    def _unify_lists(self, top_a: Product | Concat, top_b: Product | Concat) -> bool:
        """Walk factors or parts, the first ones first; a longer free one is cut at the shorter."""
        kind = type(top_a)
        split = self._split_product if kind is Product else self._cut_part
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
        """Split a factor into an outer part of the given size and the rest."""
        top, size = self.structure(dim), size_of(outer)
        inner_size = size_of(dim).divided_by(size)
        if inner_size is None:
            return None
        if isinstance(top, Concat):
            parts = [self.representative(part) for part in top.parts]
            if constant(len(parts)) != size or not self._all_equal(parts):
                return None
            return outer, parts[0]
        if not isinstance(top, Leaf):
            return None
        halves = self.fresh(size), self.fresh(inner_size)
        self._bound[top.name] = product(halves)
        return halves

    def _cut_part(self, dim: Dim, first: Dim) -> tuple[Dim, Dim] | None:
        """Cut a part behind its first elements, of the given size."""
        top, size = self.structure(dim), size_of(first)
        if not isinstance(top, Leaf):
            return None
        halves = self.fresh(size), self.fresh(size_of(dim) - size)
        self._bound[top.name] = concat(halves)
        return halves

    def _unify_product_with_concat(self, whole: Product, parts: Concat) -> bool:
        """k·x and [x | x | … k times] are the same dim."""
        factors = self._flat(whole.factors, Product)
        count = constant(len(parts.parts))
        lead: list[Dim] = []
        while factors and size_of(product(lead)) < count:
            lead.append(factors.pop(0))
        if size_of(product(lead)) != count:
            return False
        return all(self.unify(part, product(factors)) for part in parts.parts)

    def _all_equal(self, dims: list[Dim]) -> bool:
        return all(self.unify(dims[0], other) for other in dims[1:])

    def _flat(self, dims: Iterable[Dim], kind: type[Product | Concat]) -> list[Dim]:
        """Return dims with those of one kind taken apart."""
        flat: list[Dim] = []
        for dim in dims:
            top = self.structure(dim)
            if isinstance(top, kind):
                flat += self._flat(top.factors if isinstance(top, Product) else top.parts, kind)
            else:
                flat.append(self.representative(dim))
        return flat
