"""Turns one op on one rank into seconds: one line of the table for each kind of op.

What has no line is a kernel that moves its inputs and results (traffic.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.planner.costs.kernels import attention, conv
from autopar.planner.costs.kernels import elementwise as kernels
from autopar.planner.costs.ops.case import OpCase, Seconds
from autopar.planner.costs.ops.product_seconds import (
    bias_seconds,
    computed_seconds,
    contraction_seconds,
)
from autopar.planner.costs.ops.traffic import traffic_seconds
from autopar.planner.ops import refs
from autopar.planner.rules.rule import OpKind

Formula = Callable[[OpCase], Seconds]
KernelSeconds = Callable[..., float]


def op_seconds(case: OpCase) -> Seconds:
    """Return the device seconds of one op."""
    formula = _FORMULAS.get(case.rule.kind)
    if formula is not None:
        return formula(case)
    if case.rule.contracts:
        return contraction_seconds(case)
    return computed_seconds(case) if case.rule.computes is not None else traffic_seconds(case)


def _attention(case: OpCase) -> Seconds:
    """Fused attention; with a mask the kernel reads it, and computes all scores.

    Leaves out that kernels with a mask are slower than flash, and dropout of scores.
    """
    mask = next(refs(case.argument("attn_mask")), None)
    shape = _attention_shape(case)
    rates = case.rates.of(case.element_bytes(case.result))
    forward = attention.fused_attention_forward_seconds(shape, rates=rates)
    backward = attention.fused_attention_backward_seconds(shape, rates=rates)
    if mask is not None:
        read = case.bytes(mask) / rates.stream_bytes_per_second
        forward += read
        backward += read * (2 if case.needs_gradient(mask) else 1)
    needed = case.needs_gradient(case.result)
    return Seconds(forward=forward, input_gradient=backward if needed else 0.0)


def _attention_shape(case: OpCase) -> attention.AttentionShape:
    shapes = case.shapes
    query, key = shapes.letters("q"), shapes.letters("t")
    is_causal = bool(case.argument("is_causal", default=False)) and query == key
    block = case.rates.own.architecture.query_block
    grouped = "k" in shapes.signature.letters
    return attention.AttentionShape(
        batch=shapes.letters("…"),
        heads=shapes.letters("h"),
        kv_heads=shapes.letters("k" if grouped else "h"),
        query_length=query,
        key_length=key,
        head_dim=shapes.letters("e"),
        value_dim=shapes.letters("f"),
        visible=attention.causal_visible(query, block) if is_causal else 1.0,
        element_bytes=case.element_bytes(case.result),
    )


def _convolution(case: OpCase) -> Seconds:
    """An implicit product; 16-bit kernels of GPUs read channels last, PyTorch keeps them first.

    A transposed one is the backward of the convolution from its results to its input.
    """
    if not case.shapes.signature.letters:
        return computed_seconds(case)
    source, weight = next(refs(case.argument("input"))), next(refs(case.argument("weight")))
    shape = _convolution_shape(case, source, weight)
    rates = case.rates.of_convolution(case.element_bytes(case.result))
    transposes = shape.element_bytes < 4 and not case.rates.is_cpu
    extra = conv.layout_change_seconds(shape, rates=rates) if transposes else 0.0
    own = learned = 0.0
    forward, backward = conv.convolution_forward_seconds, conv.convolution_input_gradient_seconds
    if "transpose" in case.op.target:
        forward, backward = backward, forward
    if case.needs_gradient(source):
        own = extra + backward(shape, rates=rates)
    if case.needs_gradient(weight):
        learned = conv.convolution_weight_gradient_seconds(shape, rates=rates)
        learned += 0.0 if own else extra
    taken = extra + forward(shape, rates=rates)
    return bias_seconds(case) + Seconds(forward=taken, input_gradient=own, weight_gradient=learned)


def _convolution_shape(case: OpCase, source: str, weight: str) -> conv.ConvolutionShape:
    shapes, result = case.shapes, case.result
    channels = shapes.letters("gc"), shapes.letters("go")
    if "transpose" in case.op.target:
        source, result, channels = result, source, channels[::-1]
    return conv.ConvolutionShape(
        batch=shapes.letters("n"),
        in_channels=channels[0],
        out_channels=channels[1],
        input_size=shapes.shape(source)[2:],
        output_size=shapes.shape(result)[2:],
        kernel_size=shapes.shape(weight)[2:],
        groups=shapes.letters("g"),
        element_bytes=case.element_bytes(case.result),
    )


def _per_element(forward: KernelSeconds, backward: KernelSeconds) -> Formula:
    """One kernel in each pass, of which the result's elements tell how long it takes."""

    def formula(case: OpCase) -> Seconds:
        elements, size = case.shapes.numel(case.result), case.element_bytes(case.result)
        gradient = backward(elements, element_bytes=size, rates=case.memory)
        return Seconds(
            forward=forward(elements, element_bytes=size, rates=case.memory),
            input_gradient=gradient if case.needs_gradient(case.result) else 0.0,
        )

    return formula


_norm = _per_element(kernels.norm_forward_seconds, kernels.norm_backward_seconds)
_dropout = _per_element(kernels.dropout_forward_seconds, kernels.dropout_backward_seconds)


def _batch_norm(case: OpCase) -> Seconds:
    """As a norm over rows, but its statistics need a pass before the values are changed."""
    norm, source = _norm(case), case.bytes(case.op.inputs[0])
    statistics = kernels.memory_seconds(source, rates=case.memory)
    return norm + Seconds(forward=statistics)


def _softmax(case: OpCase) -> Seconds:
    elements = case.shapes.numel(case.result)
    size = (case.element_bytes(case.op.inputs[0]) + case.element_bytes(case.result)) / 2
    backward = kernels.softmax_backward_seconds(elements, element_bytes=size, rates=case.memory)
    return Seconds(
        forward=kernels.softmax_forward_seconds(elements, element_bytes=size, rates=case.memory),
        input_gradient=backward if case.needs_gradient(case.result) else 0.0,
    )


_PASSES_OVER_IDS = 10  # which turn them into rows of this rank, and count those of a bag


def _embedding(case: OpCase) -> Seconds:
    """A look-up of rows, or of sums of rows in bags.

    Where the table's rows are split, rows of other ranks are blanked: after a look-up, or by a
    weight of 0 in a bag.
    """
    table = next(refs(case.argument("weight")))
    ids = next(refs(case.argument("indices")))
    vocabulary, width = case.shapes.shape(table)
    tokens, size = case.shapes.numel(ids), case.element_bytes(table)
    written = case.shapes.numel(case.result) // max(width, 1)
    forward = kernels.embedding_forward_seconds(
        tokens, width, written=written, element_bytes=size, rates=case.memory
    )
    if vocabulary < case.graph.tensors[table].shape[0].at(case.shapes.batch):
        is_bag = case.rule.kind is OpKind.BAG
        blanked = _PASSES_OVER_IDS * case.bytes(ids) if is_bag else 2 * case.bytes(case.result)
        forward += kernels.memory_seconds(blanked, rates=case.memory)
    backward = kernels.embedding_backward_seconds(
        tokens, width, vocabulary=vocabulary, element_bytes=size, rates=case.memory
    )
    return Seconds(forward=forward, weight_gradient=backward if case.needs_gradient(table) else 0.0)


def _cross_entropy(case: OpCase) -> Seconds:
    """log_softmax reads and writes the logits; backward fills the loss' gradient, then reads it
    and the probabilities and writes the logits' gradient."""
    if not case.shapes.signature.letters:
        return traffic_seconds(case)
    logits = case.op.inputs[0]
    classes = case.shapes.letters("v")
    tokens = case.shapes.numel(logits) // max(1, classes)
    size = case.element_bytes(logits)
    forward = kernels.cross_entropy_forward_seconds(
        tokens, classes, element_bytes=size, passes=2, rates=case.memory
    )
    backward = kernels.cross_entropy_backward_seconds(
        tokens, classes, element_bytes=size, passes=4, rates=case.memory
    )
    return Seconds(
        forward=forward, input_gradient=backward if case.needs_gradient(case.result) else 0.0
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
