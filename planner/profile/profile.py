"""Measures the ops of a traced model, and the host, on this machine's device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.sheet import find_device, local_devices
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.precision import Precision
from autopar.planner.profile.calls import clock_of, threads_of_a_rank
from autopar.planner.profile.host import measure_baseline, measure_host
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost, MeasuredOp
from autopar.planner.profile.probes import Probe, find_probes
from autopar.planner.profile.rounds import LeftOut, Limits, Sampled, measure

_MOST_GROUP_BYTES = 4 * 2**30
_FREE_SHARE = 0.5  # of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure, and the time for ops; measuring the host takes some seconds more."""

    batches: tuple[int, ...]  # rows of a microbatch
    degrees: tuple[int, ...]  # of the tensor axis
    precision: Precision
    total_seconds: float
    op_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measurements, the ops that were not measured and why, and the seconds in all."""

    measured: MeasuredFile
    left_out: tuple[LeftOut, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledDevice:
    """A device of this machine: its data sheet, and torch's name."""

    device: Device
    torch_name: str


def place_at_hand() -> ProfiledDevice:
    """Return the first GPU of this machine, else its CPU."""
    found = local_devices()
    if found:
        return ProfiledDevice(device=found[0], torch_name="cuda")
    return ProfiledDevice(device=find_device("cpu"), torch_name="cpu")


def profile(
    graph: Graph,
    axes: GraphAxes,
    layers: Layers,
    request: ProfileRequest,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> Profiled:
    """Measure the host and every distinct op of a model; batches share the time equally."""
    began = time.perf_counter()
    place = place_at_hand()
    with as_in_training(place, request.precision):
        report("measuring dispatch and the optimizer")
        times = measure_host(graph, place.torch_name)
        host = MeasuredHost(
            device=place.device.name,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            times=times,
        )
        probes = _probes(graph, axes, layers, request, place.device)
        sampled, left_out = measure(
            probes,
            device=place.torch_name,
            clock=clock_of(place.torch_name),
            limits=_limits(request, place),
            baseline=measure_baseline(clock_of(place.torch_name), place.torch_name),
            report=report,
        )
    return Profiled(
        measured=MeasuredFile(ops=tuple(map(_op, sampled)), hosts=(host,)),
        left_out=left_out,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def as_in_training(place: ProfiledDevice, precision: Precision) -> Iterator[None]:
    """Round products as scripts do, and use as many threads of a CPU as a rank under torchrun."""
    before, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.products or products)
    if place.torch_name == "cpu":
        torch.set_num_threads(threads_of_a_rank())
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(products)


def _probes(
    graph: Graph, axes: GraphAxes, layers: Layers, request: ProfileRequest, device: Device
) -> Sequence[Probe]:
    batches = (graph.fixed_batch,) if graph.fixed_batch else request.batches
    found: dict[object, Probe] = {}
    for batch in batches:
        pricer = OpPricer(
            graph, axes, batch=batch, precision=request.precision, device=device, layers=layers
        )
        for probe in find_probes(pricer, degrees=request.degrees):
            found.setdefault(probe.key, probe)
    return tuple(found.values())


def _limits(request: ProfileRequest, place: ProfiledDevice) -> Limits:
    free = _free_bytes(place)
    return Limits(
        total_seconds=request.total_seconds,
        op_seconds=request.op_seconds,
        group_bytes=min(_MOST_GROUP_BYTES, int(_FREE_SHARE * free)),
        most_bytes=int(_FREE_SHARE * free),
    )


def _free_bytes(place: ProfiledDevice) -> int:
    if place.torch_name == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _op(sampled: Sampled) -> MeasuredOp:
    return MeasuredOp(
        key=sampled.key,
        timing=sampled.timing,
        samples=sampled.samples,
        torch=torch.__version__,
    )
