"""Counts the FLOPs of one op on one rank, forward and backward: two for each multiply and add."""

from __future__ import annotations

from autopar.planner.costs.ops.products import factors_of, products_of
from autopar.planner.costs.ops.shapes import LocalShapes
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.computation import Computation
from autopar.planner.rules.rule import Rule


def forward_flops(rule: Rule, shapes: LocalShapes) -> int:
    """Return 2·∏ of the letters for each group of the rule, or what the op computes otherwise."""
    computation = computation_of(rule, shapes)
    if computation is not None:
        return computation.forward_flops
    return sum(2 * shapes.letters(group.split()) for group in rule.contracts)


def backward_flops(rule: Rule, shapes: LocalShapes) -> int:
    """Return one product for each factor that needs a gradient; flash attention computes 5 for 2.

    What has no gradient, the results being whole numbers or frozen, has none.
    """
    op, graph = shapes.op, shapes.graph
    if not graph.learns(op):
        return 0
    computation = computation_of(rule, shapes)
    if computation is not None:
        return computation.backward_flops + sum(
            product.flops * _with_gradient((product.left, product.right), op, graph)
            for product in computation.products
        )
    if len(rule.contracts) > 1:
        return int(forward_flops(rule, shapes) * 2.5)
    return forward_flops(rule, shapes) * _with_gradient(factors_of(op), op, graph)


def computation_of(rule: Rule, shapes: LocalShapes) -> Computation | None:
    """Return what an op computes where letters do not tell, None where they do.

    A contraction whose tensors have other dims than its line is known by their shapes alone.
    """
    if rule.contracts and not shapes.signature.is_opaque:
        return None
    if rule.computes is not None:
        return rule.computes(shapes)
    return Computation(products=tuple(products_of(shapes.op, shapes))) if rule.contracts else None


def _with_gradient(names: tuple[str, ...], op: Op, graph: Graph) -> int:
    """Count the factors that need a gradient; what the op made itself does as its result does."""
    return sum(graph.tensors[name or op.outputs[0]].requires_grad for name in names)
