"""Turns the conversion of a tensor from one layout to another into seconds."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.cluster.link import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.kernels.elementwise import memory_seconds
from autopar.planner.layouts import Conversion, Local


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What happens to a tensor, and the bytes that one rank has of it before and after.

    `is_contiguous` where a rank's part is one piece of memory, so that a collective needs no copy.
    """

    step: Conversion
    produced_bytes: int
    needed_bytes: int
    is_contiguous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionCost:
    """What one conversion takes; the collectives' share stands apart."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_communication_seconds: float = 0.0
    backward_communication_seconds: float = 0.0
    backward_dispatches: int = 0


FREE = ConversionCost()
DISPATCHES = 2  # an autograd function, and the collective or copy in it


def conversion_cost(
    tensor: Converted, *, degree: int, shape: GroupShape, rates: Throughput, has_gradient: bool
) -> ConversionCost:
    """Return what turns one layout into another; no gradient flows where none is needed."""
    forward, forward_wire = _seconds(tensor.step.forward, tensor, degree, shape, rates)
    if not has_gradient:
        return ConversionCost(forward_seconds=forward, forward_communication_seconds=forward_wire)
    backward, backward_wire = _seconds(tensor.step.backward, tensor, degree, shape, rates)
    return ConversionCost(
        forward_seconds=forward,
        backward_seconds=backward,
        forward_communication_seconds=forward_wire,
        backward_communication_seconds=backward_wire,
        backward_dispatches=DISPATCHES,
    )


def _seconds(
    step: Collective | Local, tensor: Converted, degree: int, shape: GroupShape, rates: Throughput
) -> tuple[float, float]:
    """Return the seconds of one direction, and those of its collective."""
    part = min(tensor.produced_bytes, tensor.needed_bytes)
    whole = max(tensor.produced_bytes, tensor.needed_bytes)
    if isinstance(step, Local):
        return _local_seconds(step, part, whole, rates), 0.0
    if step is Collective.ALL_REDUCE:
        payload = whole
    elif step is Collective.ALL_TO_ALL:
        payload = part
    else:
        payload = part * degree  # what does not divide is padded
    wire = collective_seconds(step, payload, shape)
    if tensor.is_contiguous or step is Collective.ALL_REDUCE:
        return wire, wire
    return wire + memory_seconds(2 * payload, rates=rates), wire


def _local_seconds(step: Local, part: int, whole: int, rates: Throughput) -> float:
    """A slice is copied; padding and masking write the whole, and read what is not zero."""
    moved = {
        Local.NOTHING: 0,
        Local.SLICE: 2 * part,
        Local.PAD: whole + part,
        Local.MASK: 2 * whole,
    }[step]
    return memory_seconds(moved, rates=rates) if moved else 0.0
