"""What frameworks, drivers and the optimizer add to a step."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.toml_reading import figure, number, parse_bytes, parse_seconds
from autopar.planner.costs.kernels.kernels import adamw_fused_seconds
from autopar.planner.costs.kernels.rates import Throughput
from autopar.planner.costs.ops.measurements import HostTimes, Measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """Host time per layer of the frameworks in published runs."""

    op_seconds: float
    collective_seconds: float
    checkpoint_forward_seconds: float
    checkpoint_backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """The constants of framework.toml.

    If the hosts of all devices were measured, the times are theirs, and the optimizer has a
    measured time per element.
    """

    step_seconds: float
    action_seconds: float
    overlap_slowdown: float
    cpu_overlap_slowdown: float
    optimizer_passes: float
    context_bytes: int
    communicator_bytes: int
    pair_bytes: int
    process_bytes: int
    margin: float
    host: HostWork
    optimizer_element_seconds: float | None = None  # of AdamW on fp32 states, measured
    optimizer_tensor_seconds: float = 0.0  # of each parameter, however small, measured
    # ZeRO-1 gathers beside the next forward; emitted scripts wait before it
    gathers_ahead: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the times were measured on these devices."""
        return self.optimizer_element_seconds is not None


@cache
def read_framework_constants() -> FrameworkConstants:
    """Return the constants that autopar ships."""
    source = resources.files("autopar.planner.costs.steps").joinpath("framework.toml")
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    step, memory = table["step"], table["memory"]
    return FrameworkConstants(
        step_seconds=figure(step, "step_seconds", parse_seconds, where="step"),
        action_seconds=figure(step, "action_seconds", parse_seconds, where="step"),
        overlap_slowdown=number(step, "overlap_slowdown", where="step"),
        cpu_overlap_slowdown=number(step, "cpu_overlap_slowdown", where="step"),
        optimizer_passes=number(step, "optimizer_passes", where="step"),
        context_bytes=figure(memory, "context", parse_bytes, where="memory"),
        communicator_bytes=figure(memory, "communicator", parse_bytes, where="memory"),
        pair_bytes=figure(memory, "pair", parse_bytes, where="memory"),
        process_bytes=figure(memory, "process", parse_bytes, where="memory"),
        margin=number(memory, "margin", where="memory"),
        host=HostWork(
            **{
                f"{name}_seconds": figure(table["host"], name, parse_seconds, where="host")
                for name in ("op", "collective", "checkpoint_forward", "checkpoint_backward")
            }
        ),
    )


def framework_constants(
    devices: Iterable[Device], measured: Measurements | None = None
) -> FrameworkConstants:
    """Return the constants for these devices; measured ones if all hosts were measured.

    Ranks wait for each other in every step, so the slowest host counts. A process on a CPU has no
    device context, and its collectives use the cores that compute.
    """
    kinds = dict.fromkeys(devices)
    constants = read_framework_constants()
    if all(device.architecture.casefold() == "cpu" for device in kinds):
        constants = replace(
            constants,
            context_bytes=constants.process_bytes,
            communicator_bytes=0,
            pair_bytes=0,
            overlap_slowdown=constants.cpu_overlap_slowdown,
        )
    found = [measured.host(device.name) for device in kinds] if measured else []
    times = [one for one in found if one is not None]
    if not times or len(times) < len(found):
        return constants
    return _as_measured(constants, times)


def _as_measured(constants: FrameworkConstants, times: list[HostTimes]) -> FrameworkConstants:
    return replace(
        constants,
        step_seconds=max(one.step_seconds for one in times),
        action_seconds=max(one.action_seconds for one in times),
        optimizer_tensor_seconds=max(one.optimizer_tensor_seconds for one in times),
        optimizer_element_seconds=max(one.optimizer_element_seconds for one in times),
    )


# Bytes moved per fp32 parameter: 28 by fused AdamW (adamw_fused_seconds), 12 by clipping, which
# reads the gradient for the norm, and reads and writes it to scale it.
_FP32_BYTES = 40


def optimizer_seconds(
    parameters: float,
    *,
    gradient_bytes: float,
    copy_bytes: float,
    passes: float,
    rates: Throughput,
    element_seconds: float | None = None,
) -> float:
    """Return the seconds of AdamW on fp32 states, including gradient norm and clipping.

    seconds = passes · fused step. `passes` would add the norm, scaling of gradients, copies between
    precisions and unfused kernels to one fused kernel. It is 1: with the traffic of clipping, which
    scripts do, published runs are predicted worse (median error 5.3 to 6.1 %; 5.5 % with the other
    constants refitted, on rows held out). Leaves out the launches of many small parameters.
    `gradient_bytes` and `copy_bytes` are of one parameter. A measured time per element on fp32
    states, clipping included, replaces all of that, plus the traffic of copies:

        seconds  =  parameters · (element + element · copy bytes ÷ 40)
    """
    if not parameters:
        return 0.0
    if element_seconds is not None:
        return parameters * element_seconds * (1 + copy_bytes / _FP32_BYTES)
    return passes * adamw_fused_seconds(
        parameters, state_bytes=4, gradient_bytes=gradient_bytes, copy_bytes=copy_bytes, rates=rates
    )
