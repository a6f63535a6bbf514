"""Reads framework.toml: what training frameworks and drivers add to a step and to memory."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from autopar.planner.cluster.device import Device
from autopar.planner.cluster.reading import figure, number
from autopar.planner.cluster.units import parse_bytes, parse_seconds
from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.ops.measurements import ActionTimes, HostTimes, Measurements, UnitTimes
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.simulation import Transfer
from autopar.planner.costs.schedules.table import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What the frameworks of published runs cost their host for each layer."""

    op_seconds: float
    collective_seconds: float
    checkpoint_forward_seconds: float
    checkpoint_backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """Everything that framework.toml holds; it says what each one means.

    Where the hosts of all devices were measured, the seconds are theirs, and the optimizer has a
    measured time per element.
    """

    step_seconds: float
    action_seconds: float
    overlap_slowdown: float
    cpu_overlap_slowdown: float
    optimizer_passes: float
    context_bytes: int
    communicator_bytes: int
    process_bytes: int
    margin: float
    host: HostWork
    optimizer_element_seconds: float | None = None  # of AdamW on fp32 state, as measured
    optimizer_tensor_seconds: float = 0.0  # of each parameter however small, as measured
    unit: UnitTimes | None = None  # as measured; see unit_on where None
    pipeline: ActionTimes | None = None  # as measured, besides action_seconds
    gathers_ahead: bool = False  # ZeRO-1, beside the next forward; emitted scripts wait before it

    @property
    def is_measured(self) -> bool:
        """Whether the seconds were measured on the devices at hand."""
        return self.optimizer_element_seconds is not None

    def action_on(self, arrangement: Arrangement) -> float:
        """Return what is around a forward or a backward of one microbatch on one stage."""
        added = self.pipeline
        if arrangement.pipeline == 1 or added is None:
            return self.action_seconds
        if SCHEDULES[arrangement.schedule].transfer is Transfer.ON_DEMAND:
            more = added.plain_seconds
        elif arrangement.stages_per_rank == 1:
            more = added.one_stage_seconds
        else:
            more = added.several_stages_seconds
        return self.action_seconds + more

    def unit_on(self, rates: Throughput) -> UnitTimes:
        """Return what fully_shard takes for a unit: as measured, or a read and a write of it."""
        return self.unit or UnitTimes(
            gather_seconds=0.0,
            scatter_seconds=0.0,
            gather_byte_seconds=2 / rates.stream_bytes_per_second,
            scatter_byte_seconds=2 / rates.stream_bytes_per_second,
        )


@cache
def read_framework_constants() -> FrameworkConstants:
    """Return the constants that are shipped with autopar."""
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
    """Return the constants for these devices: as measured where the hosts of all were.

    Ranks wait for each other at every step, so the slowest host counts. A process on a CPU has its
    libraries alone, no context of a device, and its collectives take the cores that compute.
    """
    kinds = dict.fromkeys(devices)
    constants = read_framework_constants()
    if all(device.architecture.casefold() == "cpu" for device in kinds):
        constants = replace(
            constants,
            context_bytes=constants.process_bytes,
            communicator_bytes=0,
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
        unit=max(
            (one.unit for one in times if one.unit),
            key=lambda unit: unit.gather_byte_seconds + unit.scatter_byte_seconds,
            default=None,
        ),
        pipeline=max(
            (one.pipeline for one in times if one.pipeline),
            key=lambda one: one.several_stages_seconds,
            default=None,
        ),
    )
