"""Keys and timings of measured ops, and the host's times, measured or by default."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol

from autopar.planner.cluster.toml_reading import in_plain_units, shipped
from autopar.planner.costs.ops.case import LocalShapes
from autopar.planner.files import Elements, Seconds, SomeSeconds
from autopar.planner.graph.ops import DType, Extent, Op, Ref, Value, refs
from autopar.planner.precision import Precision


class Provenance(StrEnum):
    """The source of a figure."""

    FORMULA = "formula"
    MEASURED = "measured"
    MIXED = "measured and formula"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """The time of an op on the device; the backward includes the weights' gradients."""

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an op reads: local shape, dtype, whether it gets a gradient."""

    shape: tuple[Elements, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKey:
    """An op on one rank; two ops with equal keys take the same time."""

    device: str
    target: str
    operands: tuple[Operand, ...]  # in the order of op.inputs
    arguments: tuple[tuple[str, str], ...]  # other arguments, as text; sizes are local
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The measured seconds of an op on the device; the backward includes all gradients."""

    forward_seconds: Seconds
    backward_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Times that the host adds to the ops, as measured."""

    forward_seconds: SomeSeconds  # to dispatch one op
    backward_seconds: SomeSeconds  # to dispatch one op of the backward
    action_seconds: SomeSeconds  # for a forward or a backward of one microbatch
    step_seconds: SomeSeconds  # for a step: the optimizer's call, setting gradients to None
    optimizer_tensor_seconds: Seconds  # of fused AdamW, per parameter, however small
    # of fused AdamW on fp32 states, per element, in addition
    optimizer_element_seconds: SomeSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host's time to dispatch an op; `runs_ahead` if the device works meanwhile."""

    forward_seconds: float
    backward_seconds: float
    runs_ahead: bool
    is_measured: bool = False

    def forward_region_seconds(self, device_seconds: float, ops: int) -> float:
        """Return the seconds of the forward of `ops` ops, with their dispatch."""
        return self._region_seconds(device_seconds, ops, self.forward_seconds)

    def backward_region_seconds(self, device_seconds: float, ops: int) -> float:
        """Return the seconds of the backward of `ops` ops, with their dispatch."""
        return self._region_seconds(device_seconds, ops, self.backward_seconds)

    def _region_seconds(self, device_seconds: float, ops: int, each: float) -> float:
        """Return the seconds of many kernels that one CPU thread dispatches.

        If the host runs ahead, kernels queue up; if it is slower, the device waits for every op:
        max(Σ device, ops · dispatch). Eager PyTorch takes 5 to 10 µs per op forward, and about the
        same again for its backward; a captured graph takes under 1 µs. Leaves out the dispatch of
        the first op, for which the device waits. An op that makes the host wait ends a region.
        """
        dispatch_seconds = ops * each
        if self.runs_ahead:
            return max(device_seconds, dispatch_seconds)
        return device_seconds + dispatch_seconds


@cache
def read_host(architecture: str) -> Host:
    """Return the host constants for devices of an architecture."""
    kind = "cpu" if architecture.casefold() == "cpu" else "gpu"
    times = in_plain_units(shipped("costs.ops", "host.toml")[kind])
    return Host(runs_ahead=kind == "gpu", **times)


class Measurements(Protocol):
    """Measured times: a profile, or a table in a test."""

    def seconds(self, key: OpKey) -> Timing | None:
        """Return the timing of an op, or None if it was not measured."""
        ...

    def host(self, device: str) -> HostTimes | None:
        """Return the host's times, or None if they were not measured."""
        ...


def op_key(op: Op, shapes: LocalShapes, *, device: str, precision: Precision) -> OpKey:
    """Return the key of an op with the sizes that it has on one rank."""
    tensors = shapes.graph.tensors
    operands = tuple(
        Operand(
            shape=shapes.shape(name),
            dtype=tensors[name].dtype,
            requires_grad=tensors[name].requires_grad,
        )
        for name in op.inputs
    )
    arguments = tuple(
        (name, _local_groups(shapes) if name == "groups" else _text(value, shapes.batch))
        for name, value in op.arguments
        if not any(True for _ in refs(value))
    )
    return OpKey(
        device=device,
        target=op.target,
        operands=operands,
        arguments=arguments,
        precision=precision,
    )


def _local_groups(shapes: LocalShapes) -> str:
    """Return the groups of a convolution on one rank; splitting them leaves fewer."""
    return str(shapes.letters(("g",)))


def _text(value: Value, batch: int) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(item, batch) for item in value)})"
    if isinstance(value, Extent):
        return str(value.at(batch))
    if isinstance(value, DType):
        return value.name
    assert not isinstance(value, Ref)
    return repr(value)
