"""Finds ops without a price, sizes with slow products, and numbers that fp16 cannot represent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

from autopar.planner.annotate import annotate
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.costs.ops.case import products_of
from autopar.planner.costs.ops.measurements import OpCost
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, MODEL_EXTREMES, Op, TensorOrigin
from autopar.planner.precision import Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import has_row, kind_of, rule_of

LARGE = 0.05  # the share of a step's bytes from which a missing formula matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """Ops of one kind without a formula, with their share of all moved bytes."""

    target: str
    count: int
    location: str
    share: float


def unpriced(graph: Graph, axes: GraphAxes) -> Iterator[Unpriced]:
    """Yield the kinds of ops without a formula that read a parameter, or move many bytes."""
    kinds: dict[str, list[Op]] = {}
    for op in graph.ops:
        if not has_row(op.target):
            kinds.setdefault(op.target, []).append(op)
    if not kinds:
        return
    done = annotate(graph, axes, batch=graph.fixed_batch or 1, precision=Precision.FP32)
    moved = {name: work.moved_bytes for name, work in done.items()}
    total = max(1, sum(moved.values()))
    for target, ops in kinds.items():
        share = sum(moved[op.name] for op in ops) / total
        if share >= LARGE or any(_reads_parameter(op, graph) for op in ops):
            yield Unpriced(target=target, count=len(ops), location=ops[0].location, share=share)


def _reads_parameter(op: Op, graph: Graph) -> bool:
    roots = graph.index.storages(op.inputs)
    return any(graph.tensors[root].origin is TensorOrigin.PARAMETER for root in roots)


SLOW = 0.02  # the share of a microbatch's seconds from which lost time matters
LEAST_LOSS_SECONDS = 1e-3  # less lost time per microbatch does not matter: the model is small
_ALIGNED = 8  # elements of 16 bits, which take 16 bytes
_PADDED = 64  # elements: a multiple of it fills whole tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaligned:
    """A size in matrix products that is no multiple of 16 bytes; all seconds are per microbatch."""

    size: int
    location: str
    seconds: float  # of the products
    aligned_seconds: float  # of the same products, if the size were a multiple
    total_seconds: float  # of all ops, on one device

    @property
    def padded(self) -> int:
        """The next size with fast products."""
        return -(-self.size // _PADDED) * _PADDED


def unaligned(
    graph: Graph, axes: GraphAxes, *, batch: int, precision: Precision, device: Device
) -> Unaligned | None:
    """Return the size that slows down 16-bit products most on a GPU, if that matters."""
    if not precision.is_half or device.is_cpu:
        return None
    prices, aligned = (
        OpPricer(graph, axes, batch=batch, precision=precision, device=device) for _ in range(2)
    )
    rates = aligned.rates
    aligned.rates = replace(rates, own=replace(rates.own, alignment=((1, 1.0),)))
    total, found = 0.0, dict[int, Unaligned]()
    for op in graph.ops:
        seconds = _seconds(prices.cost(op))
        total += seconds
        size = _unaligned_size(op, prices)
        if size and (could := _seconds(aligned.cost(op))) < seconds:
            one = found.get(size) or Unaligned(
                size=size, location=op.location, seconds=0.0, aligned_seconds=0.0, total_seconds=0.0
            )
            found[size] = replace(
                one, seconds=one.seconds + seconds, aligned_seconds=one.aligned_seconds + could
            )
    worst = max(found.values(), key=lambda one: one.seconds - one.aligned_seconds, default=None)
    lost = 0.0 if worst is None else worst.seconds - worst.aligned_seconds
    if worst is None or lost < max(LEAST_LOSS_SECONDS, SLOW * total):
        return None
    return replace(worst, total_seconds=total)


def _seconds(cost: OpCost) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _unaligned_size(op: Op, prices: OpPricer) -> int:
    """Return the largest contiguous extent of an op's products that is not aligned, or 0."""
    rule = rule_of(op.target)
    if not rule.factors or rule.kind is not OpKind.OTHER:
        return 0
    products = products_of(op, prices.shapes(op))
    extents = (extent for product in products for extent in (product.n, product.k))
    return max((extent for extent in extents if extent % _ALIGNED), default=0)


GREATEST = 65_504  # the largest number of fp16
_VALUES = ("value", "fill_value")


def check_constants(graph: Graph) -> None:
    """Raise if a tensor in the model's dtype is filled with a number beyond fp16."""
    for op in graph.ops:
        if kind_of(op) is OpKind.FILL and _is_narrow(op, graph):
            for key, value in op.arguments:
                if key in _VALUES and _overflows(value):
                    raise InputError(
                        f"{value:g} does not fit fp16, which ends at {GREATEST:,}",
                        where=op.location,
                        fix='write float("-inf") or torch.finfo(x.dtype).min, or plan in bf16',
                    )


def check_means(graph: Graph, *, microbatch: int) -> None:
    """Raise if a loss averages over more targets than fp16 can count: its gradient would be 0.

    torch keeps the number of targets, by which it divides, in the logits' dtype. A loss function
    gets float32 logits; a loss computed by the model may have fp16.
    """
    for op in graph.ops:
        if kind_of(op).is_class_loss and _is_narrow(op, graph):
            target = op.inputs[1]
            count = graph.tensors[target].numel.at(microbatch)
            if count > GREATEST:
                raise InputError(
                    f"the loss is a mean over {count:,} targets of a microbatch of {microbatch} "
                    f"rows, and fp16 counts to {GREATEST:,}",
                    where=op.location,
                    fix="compute the loss from logits.float(), pin a smaller microbatch, or plan "
                    "in bf16",
                )


def _is_narrow(op: Op, graph: Graph) -> bool:
    return graph.tensors[op.outputs[0]].dtype == MODEL_DTYPE


def _overflows(value: object) -> bool:
    if not isinstance(value, (int, float)) or abs(value) in MODEL_EXTREMES:
        return False
    return isfinite(value) and abs(value) > GREATEST
