"""The dim algebra: a dim is a leaf, a product of dims (outermost first) or a concatenation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autopar.planner.extent import ONE, Extent


@dataclass(frozen=True, slots=True)
class Leaf:
    """A dim without structure: a letter of a rule, or a logical axis of the model."""

    name: str
    size: Extent


@dataclass(frozen=True, slots=True)
class Product:
    """Dims flattened into one, the outermost first; the empty product is a dim of size one."""

    factors: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """Dims laid end to end; `name` where people have one name for the whole."""

    parts: tuple[Dim, ...]
    name: str = ""


Dim = Leaf | Product | Concat
UNIT = Product(())


def size_of(dim: Dim) -> Extent:
    """Return the number of positions of a dim."""
    if isinstance(dim, Leaf):
        return dim.size
    if isinstance(dim, Product):
        total = ONE
        for factor in dim.factors:
            total = total * size_of(factor)
        return total
    total = Extent(())
    for part in dim.parts:
        total = total + size_of(part)
    return total


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of dims: nested products flattened, a single factor by itself."""
    factors: list[Dim] = []
    for dim in dims:
        factors.extend(dim.factors if isinstance(dim, Product) else (dim,))
    return factors[0] if len(factors) == 1 else Product(tuple(factors))


def concat(dims: Iterable[Dim]) -> Dim:
    """Return the concatenation of dims: nested ones flattened, a single part by itself."""
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
        for inner in dim.factors if isinstance(dim, Product) else dim.parts:
            yield from leaves(inner)


def substituted(dim: Dim, replace: Callable[[Leaf], Dim]) -> Dim:
    """Return a dim with its leaves replaced."""
    if isinstance(dim, Leaf):
        return replace(dim)
    if isinstance(dim, Product):
        return product(substituted(factor, replace) for factor in dim.factors)
    made = concat(substituted(part, replace) for part in dim.parts)
    return Concat(made.parts, dim.name) if isinstance(made, Concat) and dim.name else made


def text_of(dim: Dim) -> str:
    """Return a dim as people read it: `heads·head_dim`, `[ffn | ffn]`, `1`."""
    if isinstance(dim, Leaf):
        return dim.name
    if isinstance(dim, Product):
        return "·".join(map(text_of, dim.factors)) or "1"
    return dim.name or f"[{' | '.join(map(text_of, dim.parts))}]"
