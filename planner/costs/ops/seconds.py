"""Turns an op on one rank into seconds: one table row per kind of op.

An op without a row is priced by its rule: as matrix products if it contracts, as a computation if
it computes, else as a kernel that moves its inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType

from autopar.planner.costs.kernels import kernels, norms
from autopar.planner.costs.ops.case import OpCase, OpSeconds, computation_of, products_of
from autopar.planner.costs.ops.traffic import cast_seconds, traffic_seconds
from autopar.planner.graph.ops import refs
from autopar.planner.precision import GRADIENT_BYTES, Precision
from autopar.planner.rules.rule import Computation, MatrixProducts, OpKind

_BACKWARD_KERNELS = 2  # in the backward, for each element-wise kernel of a recurrent step's forward


def contraction_seconds(case: OpCase) -> OpSeconds:
    """Price matrix products; the kernel also adds the bias, whose gradient is a separate sum.

    For float8, separate kernels cast the factors.
    """
    products = tuple(products_of(case.op, case.shapes))
    if not products:
        return traffic_seconds(case)
    beside = bias_seconds(case) + cast_seconds(case)
    return sum((_product(case, product) for product in products), beside)


def computed_seconds(case: OpCase) -> OpSeconds:
    """Price a computation: its products in sequence, its other FLOPs, and launches between steps.

    Leaves out that a library keeps the weights of a recurrent layer on chip from step to step.
    """
    computation = computation_of(case.shapes)
    if computation is None:
        return traffic_seconds(case)
    steps_apart = case.rates.is_cpu and computation.unfused > 1
    price = _product_of_steps if steps_apart else _product
    done = sum((price(case, one) for one in computation.products), _beside(case, computation))
    moved = traffic_seconds(case)
    return moved if done.forward < moved.forward else done


def bias_seconds(case: OpCase) -> OpSeconds:
    """Price the gradient of a bias: the sum of the result's gradient over all rows."""
    name = next(refs(case.argument(case.rule.added)), None)
    if name is None or not case.needs_gradient(name):
        return OpSeconds(forward=0.0)
    moved = case.bytes(case.result) + case.bytes(name)
    access = case.memory.access.row_sum
    summed = kernels.memory_seconds(moved, rates=case.memory, access=access)
    return OpSeconds(forward=0.0, weight_gradient=summed)


def _product(case: OpCase, product: MatrixProducts) -> OpSeconds:
    """Price m × k by k × n; in the backward m × n by n × k, and k × m by m × n.

    A weight's gradient is written in the weight's dtype. With fused gradients the product adds it
    to an fp32 sum over microbatches: 8 bytes per element. If several steps multiply by a weight,
    its gradient is one product over all their rows.
    """
    size = case.element_bytes(case.result)
    stored = 2 * GRADIENT_BYTES if case.fuses_gradients else size
    rates, width = case.factors(size)
    m, n, k, times = product.m, product.n, product.k, product.times
    if not times:
        return OpSeconds(forward=0.0)

    def seconds(rows: int, columns: int, depth: int, stored_bytes: int) -> float:
        shape = rows, columns, depth
        as_it_is = kernels.gemm_seconds(
            *shape, rates=rates, batch=product.batch,
            element_bytes=width, stored_bytes=stored_bytes, contiguous=n | k,
        )  # fmt: skip
        if not case.pads or not (n | k) * width % 16:
            return as_it_is / case.float8.rate
        return min(as_it_is, _padded_seconds(case, shape, {n, k}, product.batch, size))

    own = weight = 0.0
    for name, extents in ((product.left, (m, k, n)), (product.right, (k, n, m * times))):
        if name and case.is_weight(name):
            weight += case.needs_gradient(name) and seconds(*extents, stored)
        elif case.needs_gradient(name or case.result):
            own += times * seconds(*extents, size)
    forward = times * seconds(m, n, k, size)
    return OpSeconds(forward=forward, input_gradient=own, weight_gradient=weight)


def _padded_seconds(
    case: OpCase, shape: tuple[int, int, int], unaligned: set[int], batch: int, size: int
) -> float:
    """Return the seconds of a product whose unaligned extents are padded to multiples of 16 bytes.

    A tensor with an unaligned extent is copied: an operand to pad it, the result to cut it.
    """
    whole = [-(-one * size // 16) * 16 // size if one in unaligned else one for one in shape]
    rows, columns, depth = whole
    is_padded = [a != b for a, b in zip(whole, shape, strict=True)]
    sides = ((0, 2), (2, 1), (0, 1))
    moved = sum(
        2 * batch * whole[a] * whole[b] * size for a, b in sides if is_padded[a] or is_padded[b]
    )
    product = kernels.gemm_seconds(
        rows, columns, depth, rates=case.rates.of(size), batch=batch, element_bytes=size,
        stored_bytes=size,
    )  # fmt: skip
    return product + kernels.memory_seconds(moved, rates=case.memory)


def _product_of_steps(case: OpCase, product: MatrixProducts) -> OpSeconds:
    """Price a product whose steps are separate ops; each adds to the weight's gradient."""
    if product.times < 2:
        return _product(case, product)
    one = _product(case, replace(product, times=1))
    size = case.element_bytes(product.right)
    added = kernels.memory_seconds(3 * case.shapes.numel(product.right) * size, rates=case.memory)
    each = one + OpSeconds(forward=0.0, weight_gradient=added if one.weight_gradient else 0.0)
    return OpSeconds(
        forward=product.times * each.forward,
        input_gradient=product.times * each.input_gradient,
        weight_gradient=product.times * each.weight_gradient,
    )


def _beside(case: OpCase, computation: Computation) -> OpSeconds:
    """Price FLOPs outside of products, at the rate of products, and the steps' kernel launches."""
    rates = case.rates.of(case.element_bytes(case.result))
    moved = computation.kept * case.element_bytes(case.op.inputs[0])
    each = computation.unfused if case.rates.is_cpu else 1
    launches = max(0, computation.steps * each - 1) * case.memory.launch_seconds
    forward = computation.flops / rates.sustained_flops_per_second + launches
    forward += kernels.memory_seconds(2 * moved, rates=case.memory)
    if not case.needs_gradient(case.result):
        return OpSeconds(forward=forward)
    backward = computation.backward_flops / rates.sustained_flops_per_second
    backward += _BACKWARD_KERNELS * (
        launches + kernels.memory_seconds(2 * moved, rates=case.memory)
    )
    return OpSeconds(forward=forward, input_gradient=backward)


Formula = Callable[[OpCase], OpSeconds]


def op_seconds(case: OpCase) -> OpSeconds:
    """Return the device seconds of one op."""
    formula = _FORMULAS.get(case.rule.kind)
    if formula is not None:
        return formula(case)
    if case.rule.contracts:
        return contraction_seconds(case)
    return computed_seconds(case) if case.rule.computes is not None else traffic_seconds(case)


def _attention(case: OpCase) -> OpSeconds:
    """Price fused attention; with a mask the kernel reads it, and computes all scores.

    Leaves out that kernels with a mask are slower than flash, and dropout of scores.
    """
    mask = next(refs(case.argument("attn_mask")), None)
    shape = _attention_shape(case)
    rates = case.rates.of(case.element_bytes(case.result))
    forward = kernels.fused_attention_forward_seconds(shape, rates=rates)
    backward = kernels.fused_attention_backward_seconds(shape, rates=rates)
    if mask is not None:
        read = case.bytes(mask) / rates.stream_bytes_per_second
        forward += read
        backward += read * (2 if case.needs_gradient(mask) else 1)
    needed = case.needs_gradient(case.result)
    return OpSeconds(forward=forward, input_gradient=backward if needed else 0.0)


def _attention_shape(case: OpCase) -> kernels.AttentionShape:
    shapes = case.shapes
    query, key = shapes.letters("q"), shapes.letters("t")
    is_causal = bool(case.argument("is_causal", default=False)) and query == key
    block = case.rates.own.architecture.query_block
    grouped = "k" in shapes.signature.letters
    grain = 1 if case.rates.is_cpu else block
    return kernels.AttentionShape(
        batch=shapes.letters("…"),
        heads=shapes.letters("h"),
        kv_heads=shapes.letters("k" if grouped else "h"),
        query_length=kernels.whole_blocks(query, grain),
        key_length=kernels.whole_blocks(key, grain),
        head_dim=shapes.letters("e"),
        value_dim=shapes.letters("f"),
        visible=kernels.causal_visible(query, block) if is_causal else 1.0,
        element_bytes=case.element_bytes(case.result),
    )


def _convolution(case: OpCase) -> OpSeconds:
    """Price an implicit GEMM; 16-bit kernels of GPUs transpose images that are in NCHW.

    A transposed convolution is the backward of the convolution from its results to its input.
    """
    if not case.shapes.signature.letters:
        return computed_seconds(case)
    source, weight = next(refs(case.argument("input"))), next(refs(case.argument("weight")))
    shape = _convolution_shape(case, source, weight)
    rates = case.rates.of_convolution(case.element_bytes(case.result))
    is_nchw = not case.graph.images  # images are passed in channels_last
    transposes = shape.element_bytes < 4 and is_nchw and not case.rates.is_cpu
    extra = kernels.layout_change_seconds(shape, rates=rates) if transposes else 0.0
    own = learned = 0.0
    forward, backward = (
        kernels.convolution_forward_seconds,
        kernels.convolution_input_gradient_seconds,
    )
    if "transpose" in case.op.target:
        forward, backward = backward, forward
    if case.needs_gradient(source):
        own = extra + backward(shape, rates=rates)
    if case.needs_gradient(weight):
        learned = kernels.convolution_weight_gradient_seconds(shape, rates=rates)
        learned += 0.0 if own else extra
    taken = extra + forward(shape, rates=rates)
    return bias_seconds(case) + OpSeconds(
        forward=taken, input_gradient=own, weight_gradient=learned
    )


def _convolution_shape(case: OpCase, source: str, weight: str) -> kernels.ConvolutionShape:
    shapes, result = case.shapes, case.result
    channels = shapes.letters("gc"), shapes.letters("go")
    if "transpose" in case.op.target:
        source, result, channels = result, source, channels[::-1]
    return kernels.ConvolutionShape(
        batch=shapes.letters("n"),
        in_channels=channels[0],
        out_channels=channels[1],
        input_size=shapes.shape(source)[2:],
        output_size=shapes.shape(result)[2:],
        kernel_size=shapes.shape(weight)[2:],
        groups=shapes.letters("g"),
        element_bytes=case.element_bytes(case.result),
    )


def _dropout(case: OpCase) -> OpSeconds:
    elements, size = case.shapes.numel(case.result), case.element_bytes(case.result)
    seconds = kernels.dropout_seconds(elements, element_bytes=size, rates=case.memory)
    return OpSeconds(
        forward=seconds, input_gradient=seconds if case.needs_gradient(case.result) else 0.0
    )


def _norm(case: OpCase) -> OpSeconds:
    """Price a norm over the last dims; with a weight, the backward has a second kernel."""
    source = case.op.inputs[0]
    width = case.shapes.letters("d") if case.shapes.signature.letters else 1
    shape = norms.NormShape(
        rows=case.shapes.numel(source) // max(1, width),
        width=width,
        element_bytes=case.element_bytes(source),
    )
    needed = case.needs_gradient(case.result)
    if case.fuses_gradients or not case.shapes.signature.letters:
        forward, backward = norms.fused_norm_seconds(shape, rates=case.memory)
        return OpSeconds(forward=forward, input_gradient=backward if needed else 0.0)
    forward = norms.norm_forward_seconds(shape, rates=case.memory)
    own = norms.norm_input_gradient_seconds(shape, rates=case.memory)
    if any(case.needs_gradient(name) for name in case.op.inputs[1:]):
        own += norms.norm_weight_gradient_seconds(shape, rates=case.memory)
    return OpSeconds(forward=forward, input_gradient=own if needed else 0.0)


def _batch_norm(case: OpCase) -> OpSeconds:
    """Price a norm whose statistics need a pass of their own; cuDNN has no kernel for bf16."""
    images, channels, *plane = case.shapes.shape(case.op.inputs[0])
    shape = norms.BatchNormShape(
        images=images,
        channels=channels,
        plane=prod(plane),
        element_bytes=case.element_bytes(case.result),
        is_native=case.precision is Precision.BF16,
        by_pixels=bool(case.graph.images),
    )
    needed = case.needs_gradient(case.result)
    if case.rates.is_cpu or not plane:
        rows = norms.NormShape(
            rows=images, width=channels * prod(plane), element_bytes=shape.element_bytes
        )
        forward, backward = norms.fused_norm_seconds(rows, rates=case.memory)
        forward += kernels.memory_seconds(rows.bytes, rates=case.memory)
    else:
        forward = norms.batch_norm_forward_seconds(shape, rates=case.memory)
        backward = norms.batch_norm_backward_seconds(shape, rates=case.memory)
    return OpSeconds(forward=forward, input_gradient=backward if needed else 0.0)


def _softmax(case: OpCase) -> OpSeconds:
    """Price a softmax with rows on chip: reads x, writes y; the backward reads y, dy, writes dx."""
    elements = case.shapes.numel(case.result)
    size = (case.element_bytes(case.op.inputs[0]) + case.element_bytes(case.result)) / 2
    kernel = partial(kernels.elementwise_seconds, elements, element_bytes=size, rates=case.memory)
    return OpSeconds(
        forward=kernel(passes=2, exponentials=1),
        input_gradient=kernel(passes=3) if case.needs_gradient(case.result) else 0.0,
    )


_PASSES_OVER_IDS = 10  # to turn ids into local rows, and to count a bag's ids


def _embedding(case: OpCase) -> OpSeconds:
    """Price a look-up of rows, or of sums of rows in bags.

    If the table's rows are split, rows of other ranks are zeroed: after a look-up, or by a weight
    of 0 in a bag.
    """
    table = next(refs(case.argument("weight")))
    ids = next(refs(case.argument("indices")))
    vocabulary, width = case.shapes.shape(table)
    tokens, size = case.shapes.numel(ids), case.element_bytes(table)
    written = case.shapes.numel(case.result) // max(width, 1)
    forward = kernels.embedding_forward_seconds(
        tokens, width, written=written, element_bytes=size, rates=case.memory
    )
    if case.shapes.form is not None:
        is_bag = case.rule.kind is OpKind.BAG
        blanked = _PASSES_OVER_IDS * case.bytes(ids) if is_bag else 2 * case.bytes(case.result)
        forward += kernels.memory_seconds(blanked, rates=case.memory)
    backward = kernels.embedding_backward_seconds(
        tokens, width, vocabulary=vocabulary, element_bytes=size, rates=case.memory
    )
    return OpSeconds(
        forward=forward, weight_gradient=backward if case.needs_gradient(table) else 0.0
    )


def _cross_entropy(case: OpCase) -> OpSeconds:
    """Price log_softmax and its backward.

    The forward reads the logits and writes as much. The backward writes the gradient of the
    log-probabilities, reads it and the log-probabilities, and writes the logits' gradient.
    """
    if not case.shapes.signature.letters:
        return traffic_seconds(case)
    logits = case.op.inputs[0]
    classes = case.shapes.letters("v")
    tokens = case.shapes.numel(logits) // max(1, classes)
    size = case.element_bytes(logits)
    kernel = partial(
        kernels.cross_entropy_seconds, tokens, classes, element_bytes=size, rates=case.memory
    )
    return OpSeconds(
        forward=kernel(passes=2),
        input_gradient=kernel(passes=4) if case.needs_gradient(case.result) else 0.0,
    )


_FORMULAS: Mapping[OpKind, Formula] = MappingProxyType(
    {
        OpKind.ATTENTION: _attention,
        OpKind.CONVOLUTION: _convolution,
        OpKind.NORM: _norm,
        OpKind.BATCH_NORM: _batch_norm,
        OpKind.SOFTMAX: _softmax,
        OpKind.DROPOUT: _dropout,
        OpKind.LOOKUP: _embedding,
        OpKind.BAG: _embedding,
        OpKind.CROSS_ENTROPY: _cross_entropy,
    }
)
