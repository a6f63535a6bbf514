"""Seconds and bytes that frameworks, gradient sums and the optimizer add to a step."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from autopar.planner.cluster.cluster import Device, HostShare
from autopar.planner.cluster.toml_reading import in_plain_units, shipped
from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.kernels.rates import Throughput
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.precision import GRADIENT_BYTES, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConstants:
    """The constants of framework.toml.

    If the hosts of all devices were measured, their times replace those of the file, and the
    optimizer has a measured time per element.
    """

    step_seconds: float
    action_seconds: float
    overlap_slowdown: float
    cpu_overlap_slowdown: float
    context_bytes: int
    communicator_bytes: int
    pair_bytes: int
    process_bytes: int
    margin: float
    host_memory_share: float  # the optimizer reaches this share of the memory's raw rate
    host_link_share: float  # copies to and from a device reach this share of the link's raw rate
    optimizer_element_seconds: float | None = None  # of AdamW on fp32 states, measured
    optimizer_tensor_seconds: float = 0.0  # per parameter tensor, measured
    # ZeRO-1 gathers beside the next forward; printed scripts finish gathering before it
    gathers_ahead: bool = False
    # products add gradients to fp32 sums and the optimizer's kernel casts, as Megatron's do
    fuses_gradients: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the times were measured on these devices."""
        return self.optimizer_element_seconds is not None


@cache
def read_framework_constants() -> FrameworkConstants:
    """Return the constants that autopar ships."""
    sections = map(in_plain_units, shipped("costs.steps", "framework.toml").values())
    return FrameworkConstants(**dict(ChainMap(*sections)))


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
    return replace(
        constants,
        step_seconds=max(one.step_seconds for one in times),
        action_seconds=max(one.action_seconds for one in times),
        optimizer_tensor_seconds=max(one.optimizer_tensor_seconds for one in times),
        optimizer_element_seconds=max(one.optimizer_element_seconds for one in times),
    )


# Bytes that one kernel moves for one element of a gradient.
_CAST_BYTES = 6  # reads 16 bits, writes fp32
_ADDED_BYTES = 12  # reads the gradient and the sum of earlier microbatches, writes the sum
_COPIED_BYTES = 8  # reads the gradient, writes it into its bucket


def gradient_seconds(
    gradient_bytes: float,
    tensors: int,
    arrangement: Arrangement,
    constants: FrameworkConstants,
    rates: Throughput,
) -> float:
    """Return the seconds in which one microbatch adds its weights' gradients to fp32 sums.

    Autograd makes the gradient of a weight in the type of the weight. If a step has m microbatches,
    each of them moves on average, in bytes per element:

        6 ÷ cast share       to cast a 16-bit gradient to fp32, at that share of the bandwidth
        12 · (m − 1) ÷ m     to add it to the sum: the first microbatch has nothing to add to
        8 ÷ m                to copy the gradient into its bucket, once in a step

    On their way to the host, gradients are copied in every microbatch, and added up there.

    Casts and sums launch a kernel for each of the `tensors`; with 0 of them the result is a lower
    bound. fully_shard (ZeRO-2 and 3) casts as well, and keeps no whole sums; its copies are part of
    `data_seconds`. Fused gradients take nothing: products add to fp32 sums themselves.
    """
    if constants.fuses_gradients:
        return 0.0
    casts = float(arrangement.precision.is_half)
    leaves = arrangement.offload.has_states
    keeps_whole = not (arrangement.divided.shards_modules or leaves)
    sums = keeps_whole * (1 - 1 / arrangement.microbatches)
    copies = arrangement.has_buckets / (1 if leaves else arrangement.microbatches)
    casting = _CAST_BYTES * casts / rates.access.casting
    moved = casting + _ADDED_BYTES * sums + _COPIED_BYTES * copies
    elements = gradient_bytes / GRADIENT_BYTES
    return (
        elements * moved / rates.stream_bytes_per_second
        + tensors * (casts + sums) * rates.launch_seconds
    )


# Bytes that the optimizer's step moves for one parameter.
STEP_BYTES = 28  # fused AdamW reads and writes weight and two moments, and reads the gradient
_CLIPPING_BYTES = 12  # reads the gradient for the norm, then reads and writes it to scale it
_UNSCALING_BYTES = 2 * GRADIENT_BYTES  # fp16: divides by the loss scale and looks for overflow
_MASTER_BYTES, _WEIGHT_BYTES = 4, 2  # reads the new weight in fp32, writes it in 16 bits


def optimizer_seconds(
    parameters: float,
    *,
    precision: Precision,
    is_fused: bool,
    rates: Throughput,
    element_seconds: float | None = None,
) -> float:
    """Return the seconds of AdamW on fp32 state, with clipping and the copies between precisions.

        seconds  =  parameters · (28 + 12 to clip + copies) ÷ bandwidth

    The copies of 16-bit training: the new weight is read in fp32 and written in 16 bits (6 bytes),
    and fp16 unscales the gradient (8 bytes).

    If `is_fused`, as in the frameworks of published runs, the step writes the 16-bit weight itself
    (2 bytes), and clipping is not counted: with it these runs are predicted worse (median error 6.1
    % instead of 5.3 %; 5.5 % with the constants of framework.toml fitted anew, on rows held out).

    Leaves out the launches of many small parameters. A profile measures the time per element on
    fp32 state, clipping included. Copies are added in proportion to their bytes:

        seconds  =  parameters · element_seconds · (1 + copies ÷ 40)
    """
    if not parameters:
        return 0.0
    copies = 0
    if precision.is_half:
        copies = _WEIGHT_BYTES if is_fused else _MASTER_BYTES + _WEIGHT_BYTES
        copies += _UNSCALING_BYTES * precision.scales_loss
    if element_seconds is not None:
        return parameters * element_seconds * (1 + copies / (STEP_BYTES + _CLIPPING_BYTES))
    clipping = 0 if is_fused else _CLIPPING_BYTES
    access = 1.0 if is_fused else rates.access.many_tensors
    moved = parameters * (STEP_BYTES + clipping + copies)
    return memory_seconds(moved, rates=rates, access=access)


def update_seconds(
    trainable: float,
    arrangement: Arrangement,
    constants: FrameworkConstants,
    *,
    rates: Throughput,
    host: HostShare,
) -> float:
    """Return the optimizer's seconds for a rank's part, on the device or on the host."""
    parameters = trainable / arrangement.optimizer_ranks
    if arrangement.offload.has_states:
        return host_optimizer_seconds(parameters, arrangement, constants, host)
    return optimizer_seconds(
        parameters,
        precision=arrangement.precision,
        is_fused=constants.fuses_gradients,
        rates=rates,
        element_seconds=constants.optimizer_element_seconds,
    )


def host_optimizer_seconds(
    parameters: float, arrangement: Arrangement, constants: FrameworkConstants, host: HostShare
) -> float:
    """Return the seconds of AdamW in the host's memory, and of sending the new weights back.

        seconds  =  parameters · ((28 + 12 to clip) ÷ memory + max(cast ÷ memory, weight ÷ link))

    A cast to 16 bits reads and writes 6 bytes; fp16 also unscales (8 bytes). fully_shard sends
    nothing here: it fetches its parts when it gathers them. Leaves out the CPU's arithmetic, which
    is faster than its memory on the machines of devices.toml.
    """
    memory = host.memory_bytes_per_second * constants.host_memory_share
    link = host.bytes_per_second * constants.host_link_share
    precision = arrangement.precision
    unscaling = _UNSCALING_BYTES if precision.scales_loss else 0
    stepping = (STEP_BYTES + _CLIPPING_BYTES + unscaling) / memory
    casting = (_MASTER_BYTES + _WEIGHT_BYTES) / memory if precision.is_half else 0.0
    sending = 0.0 if arrangement.shards_on_host else max(casting, precision.item_bytes / link)
    return parameters * (stepping + sending)


OUTER_STEP_BYTES = 44  # SGD with Nesterov momentum reads and writes, for one parameter


def host_outer_seconds(
    parameters: float, arrangement: Arrangement, constants: FrameworkConstants, host: HostShare
) -> float:
    """Return the seconds of an outer step in the host's memory, and of the copies around it.

        seconds  =  parameters · (44 ÷ memory + 12 ÷ link)

    The last common parameters are fetched for the change, the mean change is copied to the host,
    and the new common parameters are fetched: 4 bytes each. If parts of the model are sent while
    replicas train on, a part as it was before is also copied to the host and back: 20 ÷ link.
    """
    memory = host.memory_bytes_per_second * constants.host_memory_share
    link = host.bytes_per_second * constants.host_link_share
    copies = 5 if arrangement.outer_parts > 1 else 3
    return parameters * (OUTER_STEP_BYTES / memory + copies * GRADIENT_BYTES / link)


def to_host_byte_seconds(
    arrangement: Arrangement, constants: FrameworkConstants, host: HostShare
) -> float:
    """Return the seconds to copy a byte of an fp32 gradient to the host, on average.

    All but the first microbatch are added there: two reads and a write.
    """
    if not arrangement.offload.has_states:
        return 0.0
    added = 3 * (1 - 1 / arrangement.microbatches)
    memory = host.memory_bytes_per_second * constants.host_memory_share
    return 1 / (host.bytes_per_second * constants.host_link_share) + added / memory


def from_host_byte_seconds(
    arrangement: Arrangement, constants: FrameworkConstants, host: HostShare
) -> float:
    """Return the seconds to fetch a byte of gathered parameters; the host has them in fp32."""
    if not arrangement.shards_on_host:
        return 0.0
    wide = 2 if arrangement.precision.is_half else 1
    return wide / (host.bytes_per_second * constants.host_link_share)
