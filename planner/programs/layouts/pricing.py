"""What the layout program asks of costs: the seconds and bytes of ops, tensors and conversions."""

from __future__ import annotations

from typing import Protocol

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.ops.shapes import OpSplit
from autopar.planner.layouts import Layout
from autopar.planner.ops import Op


class Seconds(Protocol):
    """The seconds of one op on one rank."""

    @property
    def forward_seconds(self) -> float:
        """Of the forward."""

    @property
    def backward_seconds(self) -> float:
        """Of the backward, the gradient of weights with it."""


class Kept(Protocol):
    """What an op keeps for the backward."""

    @property
    def seen(self) -> tuple[str, ...]:
        """The tensors, as the op's arguments or results."""

    def own_bytes(self, split: OpSplit | None) -> int:
        """Return the bytes of what is no tensor of the graph: masks, statistics."""


class Memory(Protocol):
    """In whose memory tensors lie."""

    def root(self, name: str) -> str:
        """Return the tensor whose memory this one lies in."""


class Pricer(Protocol):
    """Prices one graph at one batch, on one device."""

    @property
    def batch(self) -> int:
        """The rows of a microbatch."""

    @property
    def memory(self) -> Memory:
        """In whose memory the tensors lie."""

    def cost(self, op: Op, split: OpSplit | None) -> Seconds:
        """Return the seconds of an op, whole or split."""

    def kept(self, op: Op) -> Kept:
        """Return what an op keeps for the backward."""

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes of a tensor on one rank."""

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes on one rank of the memory that a tensor lies in."""

    def conversion_seconds(
        self, tensor: str, produced: Layout, needed: Layout, degree: int, shape: GroupShape
    ) -> tuple[float, float]:
        """Return the seconds of a conversion, forward and backward."""
