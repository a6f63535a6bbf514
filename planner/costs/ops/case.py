"""One op on one rank, as the formulas see it: local sizes, bytes, rates, what needs a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.kernels.rates import Rates
from autopar.planner.costs.ops.shapes import LocalShapes
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin, Value
from autopar.planner.precision import Precision, item_bytes
from autopar.planner.rules.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """What one op takes on the device; the weights' gradients may be computed later."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            forward=self.forward + other.forward,
            input_gradient=self.input_gradient + other.input_gradient,
            weight_gradient=self.weight_gradient + other.weight_gradient,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One op with everything that its formula needs."""

    op: Op
    graph: Graph
    rule: Rule
    shapes: LocalShapes
    rates: Rates
    precision: Precision

    @property
    def result(self) -> str:
        """The first result."""
        return self.op.outputs[0]

    @property
    def memory(self) -> Throughput:
        """The rates of kernels that move bytes."""
        return self.rates.own

    def argument(self, name: str, default: Value = None) -> Value:
        """Return an argument by its schema name, or the default."""
        return dict(self.op.arguments).get(name, default)

    def element_bytes(self, tensor: str) -> int:
        """Return the bytes of one element of a tensor."""
        return item_bytes(self.graph.tensors[tensor].dtype, self.precision)

    def bytes(self, tensor: str) -> int:
        """Return the local bytes of a tensor."""
        return self.shapes.numel(tensor) * self.element_bytes(tensor)

    def needs_gradient(self, tensor: str) -> bool:
        """Whether a gradient is computed for a tensor."""
        return self.graph.tensors[tensor].requires_grad

    def is_weight(self, tensor: str) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        root = self.graph.tensors[tensor].storage
        return self.graph.tensors[root].origin is Origin.PARAMETER
