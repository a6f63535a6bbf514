"""Turns the matrix products of an op, and what else it computes, into seconds."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.costs.kernels import elementwise as kernels
from autopar.planner.costs.kernels.gemm import gemm_seconds
from autopar.planner.costs.ops.case import OpCase, Seconds
from autopar.planner.costs.ops.flops import computation_of
from autopar.planner.costs.ops.products import products_of
from autopar.planner.costs.ops.traffic import traffic_seconds
from autopar.planner.ops import refs
from autopar.planner.precision import GRADIENT_BYTES
from autopar.planner.rules.computation import Computation, Product

_BACKWARD_KERNELS = 2  # elementwise kernels of a step's backward for each of its forward


def contraction_seconds(case: OpCase) -> Seconds:
    """Matrix products; the bias is added by the same kernel, its gradient is a sum of its own."""
    products = tuple(products_of(case.op, case.shapes))
    if not products:
        return traffic_seconds(case)
    return sum((_product(case, product) for product in products), bias_seconds(case))


def computed_seconds(case: OpCase) -> Seconds:
    """Products one after the other, what is computed beside them, and the kernels between steps.

    Leaves out that a library keeps the weights of a recurrent layer on chip from step to step.
    """
    computation = computation_of(case.rule, case.shapes)
    if computation is None:
        return traffic_seconds(case)
    steps_apart = case.rates.is_cpu and computation.unfused > 1
    price = _product_of_steps if steps_apart else _product
    done = sum((price(case, one) for one in computation.products), _beside(case, computation))
    moved = traffic_seconds(case)
    return moved if done.forward < moved.forward else done


def bias_seconds(case: OpCase) -> Seconds:
    """The sum of the result's gradient over all rows."""
    name = next(refs(case.argument(case.rule.added)), None)
    if name is None or not case.needs_gradient(name):
        return Seconds(forward=0.0)
    moved = case.bytes(case.result) + case.bytes(name)
    return Seconds(forward=0.0, weight_gradient=kernels.memory_seconds(moved, rates=case.memory))


def _product(case: OpCase, product: Product) -> Seconds:
    """A product of m × k by k × n, and m × n by n × k, k × m by m × n backward.

    A weight's gradient is added to an fp32 sum of all microbatches: 8 bytes per element. That of a
    weight that several steps multiply by is one product over the rows of all of them.
    """
    size = case.element_bytes(case.result)
    m, n, k, times = product.m, product.n, product.k, product.times
    if not times:
        return Seconds(forward=0.0)

    def seconds(rows: int, columns: int, depth: int, stored_bytes: int) -> float:
        return gemm_seconds(
            rows, columns, depth, rates=case.rates.of(size), batch=product.batch,
            element_bytes=size, stored_bytes=stored_bytes, contiguous=n | k,
        )  # fmt: skip

    own = weight = 0.0
    for name, extents in ((product.left, (m, k, n)), (product.right, (k, n, m * times))):
        if name and case.is_weight(name):
            weight += case.needs_gradient(name) and seconds(*extents, 2 * GRADIENT_BYTES)
        elif case.needs_gradient(name or case.result):
            own += times * seconds(*extents, size)
    forward = times * seconds(m, n, k, size)
    return Seconds(forward=forward, input_gradient=own, weight_gradient=weight)


def _product_of_steps(case: OpCase, product: Product) -> Seconds:
    """A product whose steps are ops of their own: each adds to the sum of the weight's gradient."""
    if product.times < 2:
        return _product(case, product)
    one = _product(case, replace(product, times=1))
    size = case.element_bytes(product.right)
    added = kernels.memory_seconds(3 * case.shapes.numel(product.right) * size, rates=case.memory)
    each = one + Seconds(forward=0.0, weight_gradient=added if one.weight_gradient else 0.0)
    return Seconds(
        forward=product.times * each.forward,
        input_gradient=product.times * each.input_gradient,
        weight_gradient=product.times * each.weight_gradient,
    )


def _beside(case: OpCase, computation: Computation) -> Seconds:
    """FLOPs of no product at the rate of products, and each step's kernels with their launches."""
    rates = case.rates.of(case.element_bytes(case.result))
    moved = computation.kept * case.element_bytes(case.op.inputs[0])
    each = computation.unfused if case.rates.is_cpu else 1
    launches = max(0, computation.steps * each - 1) * case.memory.launch_seconds
    forward = computation.flops / rates.sustained_flops_per_second + launches
    forward += kernels.memory_seconds(2 * moved, rates=case.memory)
    if not case.needs_gradient(case.result):
        return Seconds(forward=forward)
    backward = computation.backward_flops / rates.sustained_flops_per_second
    backward += _BACKWARD_KERNELS * (
        launches + kernels.memory_seconds(2 * moved, rates=case.memory)
    )
    return Seconds(forward=forward, input_gradient=backward)
