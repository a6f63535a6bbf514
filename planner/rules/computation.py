"""What an op computes where no letters of its tensors tell: matrix products, and other FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autopar.planner.ops import Op, Value, refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`batch` products of m × k by k × n, made `times` times one after the other.

    `left` and `right` name the factors among the op's inputs, "" is what the op itself has made.
    """

    left: str
    right: str
    batch: int
    m: int
    n: int
    k: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Two for each multiply and add."""
        return 2 * self.batch * self.m * self.n * self.k * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What one op computes on one rank.

    `flops` and `backward_flops` are those beside the products, whose backward is one product for
    each factor that needs a gradient. `steps` follow each other, each with an elementwise kernel
    beside its products, or so many as `unfused` where no library has one for all; `kept` elements
    are made for the backward alone.
    """

    products: tuple[Product, ...] = ()
    flops: int = 0
    backward_flops: int = 0
    steps: int = 0
    unfused: int = 1
    kept: int = 0

    @property
    def forward_flops(self) -> int:
        """All FLOPs of the forward."""
        return self.flops + sum(product.flops for product in self.products)


class Sizes(Protocol):
    """The sizes of an op's tensors on one rank."""

    op: Op

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of an operand or result."""


Computing = Callable[[Sizes], Computation]


def given(sizes: Sizes, name: str) -> Value:
    """Return an argument of the op, None where it has none of this name."""
    return dict(sizes.op.arguments).get(name)


def number(sizes: Sizes, name: str, default: int = 0) -> int:
    """Return an argument that is a whole number."""
    value = given(sizes, name)
    return value if isinstance(value, int) else default


def tensors(sizes: Sizes, name: str) -> tuple[str, ...]:
    """Return the tensors that are an argument, or stand in it."""
    return tuple(refs(given(sizes, name)))


def tensor(sizes: Sizes, *names: str) -> str:
    """Return the tensor that is the first of these arguments that the op has."""
    return next(found for name in names for found in tensors(sizes, name))
