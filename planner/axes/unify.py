"""Unification of dims: says that two dims are the same one, and refines both until they agree."""

from __future__ import annotations

from autopar.planner.axes.terms import (
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
from autopar.planner.extent import ONE, Extent, constant


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
        if isinstance(top_a, Product) and isinstance(top_b, Product):
            return self._unify_products(list(top_a.factors), list(top_b.factors))
        if isinstance(top_a, Concat) and isinstance(top_b, Concat):
            return self._unify_concats(list(top_a.parts), list(top_b.parts))
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

    def _unify_products(self, a: list[Dim], b: list[Dim]) -> bool:
        """Walk both factor lists outermost first; a longer free factor is split at the shorter."""
        a, b = self._flat_factors(a), self._flat_factors(b)
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if size_of(x) == size_of(y):
                if not self.unify(x, y):
                    return False
                continue
            longer, shorter, rest = (x, y, a) if size_of(y) < size_of(x) else (y, x, b)
            other = b if rest is a else a
            halves = self._split_product(longer, shorter)
            if halves is None:
                return False
            rest[:0] = self._flat_factors([halves[1]])
            other.insert(0, shorter)
            rest.insert(0, halves[0])
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

    def _unify_concats(self, a: list[Dim], b: list[Dim]) -> bool:
        """Walk both part lists; a longer free part is cut at the end of the shorter."""
        a, b = self._flat_parts(a), self._flat_parts(b)
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if size_of(x) == size_of(y):
                if not self.unify(x, y):
                    return False
                continue
            longer, shorter, rest = (x, y, a) if size_of(y) < size_of(x) else (y, x, b)
            other = b if rest is a else a
            top = self.structure(longer)
            if not isinstance(top, Leaf):
                return False
            halves = (
                self.fresh(size_of(shorter)),
                self.fresh(size_of(longer) - size_of(shorter)),
            )
            self._bound[top.name] = concat(halves)
            rest[:0] = halves
            other.insert(0, shorter)
        return not a and not b

    def _unify_product_with_concat(self, whole: Product, parts: Concat) -> bool:
        """k·x and [x | x | … k times] are the same dim."""
        factors = self._flat_factors(list(whole.factors))
        count = constant(len(parts.parts))
        lead: list[Dim] = []
        while factors and size_of(product(lead)) < count:
            lead.append(factors.pop(0))
        if size_of(product(lead)) != count:
            return False
        return all(self.unify(part, product(factors)) for part in parts.parts)

    def _all_equal(self, dims: list[Dim]) -> bool:
        return all(self.unify(dims[0], other) for other in dims[1:])

    def _flat_factors(self, dims: list[Dim]) -> list[Dim]:
        flat: list[Dim] = []
        for dim in dims:
            top = self.structure(dim)
            if isinstance(top, Product):
                flat.extend(self._flat_factors(list(top.factors)))
            else:
                flat.append(self.representative(dim))
        return flat

    def _flat_parts(self, dims: list[Dim]) -> list[Dim]:
        flat: list[Dim] = []
        for dim in dims:
            top = self.structure(dim)
            if isinstance(top, Concat):
                flat.extend(self._flat_parts(list(top.parts)))
            else:
                flat.append(self.representative(dim))
        return flat
