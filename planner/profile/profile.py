"""Measures the ops of a traced model, and what the host adds, on this machine's device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.sheet import find_device, local_devices
from autopar.planner.costs.ops.measurements import HostTimes, Timing
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.precision import Precision
from autopar.planner.profile.calls import Clock, clock_of, host_clock, threads_of_a_rank
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost
from autopar.planner.profile.probes import Probe, find_probes
from autopar.planner.profile.rounds import EVICTED_BYTES, Limits, UnmeasuredOp, measure

_MOST_GROUP_BYTES = 4 * 2**30
_FREE_SHARE = 0.5  # the part of the free memory that probes may take


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure, and the time for it; measuring the host takes some seconds more."""

    batches: tuple[int, ...]  # rows of a microbatch
    degrees: tuple[int, ...]  # of the tensor axis
    precision: Precision
    total_seconds: float
    op_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measurements, the ops that were not measured and why, and the seconds in all."""

    measured: MeasuredFile
    left_out: tuple[UnmeasuredOp, ...]
    seconds: float


def local_device() -> Device:
    """Return the first GPU of this machine, else its CPU."""
    found = local_devices()
    return found[0] if found else find_device("cpu")


def profile(
    graph: Graph,
    axes: GraphAxes,
    layers: Layers,
    request: ProfileRequest,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> Profiled:
    """Measure the host and every distinct op of a model; slower ops get more of the time."""
    began = time.perf_counter()
    device = local_device()
    name, clock = device.torch_name, clock_of(device.torch_name)
    with as_in_training(device, request.precision):
        report("measuring dispatch and the optimizer")
        host = MeasuredHost(
            device=device.name,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            times=measure_host(graph, name),
        )
        free_share = int(_FREE_SHARE * _free_bytes(name))
        ops, left_out = measure(
            _probes(graph, axes, layers, request, device),
            device=name,
            clock=clock,
            limits=Limits(
                total_seconds=request.total_seconds,
                op_seconds=request.op_seconds,
                group_bytes=min(_MOST_GROUP_BYTES, free_share),
                most_bytes=free_share,
            ),
            baseline=measure_baseline(clock, name),
            report=report,
        )
    return Profiled(
        measured=MeasuredFile(ops=ops, hosts=(host,)),
        left_out=left_out,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def as_in_training(device: Device, precision: Precision) -> Iterator[None]:
    """Multiply as precisely as scripts do, with as many CPU threads as a rank under torchrun."""
    before, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision.products or products)
    if device.is_cpu:
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


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_BLOCKS = 32
_REPEATS = 30
_OPTIMIZER_REPEATS = 7
_SMALL_TENSORS, _SMALL_ELEMENTS = 64, 16
_LARGE_TENSORS = 8
_FEWEST_PARAMETERS, _MOST_PARAMETERS = 2**20, 2**25  # limits for measuring the optimizer


class _Block(nn.Module):
    """A module of two ops with almost no work: a view, and a sum with a parameter."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, to which the weight adds 0."""
        return x.view(1) + self.weight


def measure_baseline(clock: Clock, device: str) -> Timing:
    """Return the time of calling an op on one element, by the clock that times ops."""
    one, other = (torch.zeros(1, device=device, requires_grad=True) for _ in range(2))
    gradient = torch.ones(1, device=device)
    add = torch.ops.aten.add.Tensor
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(4 * _REPEATS):
        seconds, result = clock.timed(lambda: add(self=one, other=other))
        forward.append(seconds)
        seconds, _ = clock.timed(partial(torch.autograd.grad, [result], [one, other], [gradient]))
        backward.append(seconds)
    return Timing(forward_seconds=median(forward), backward_seconds=median(backward))


def measure_host(graph: Graph, device: str) -> HostTimes:
    """Return this host's times; the optimizer has as many elements as the model, within limits."""
    forward, backward = _dispatch(device)
    action, step = _empty_step(device)
    tensor, element = _optimizer(graph, device)
    return HostTimes(
        forward_seconds=forward,
        backward_seconds=backward,
        action_seconds=action,
        step_seconds=step,
        optimizer_tensor_seconds=tensor,
        optimizer_element_seconds=element,
    )


def _dispatch(device: str) -> tuple[float, float]:
    """Return the host's seconds for one op in a model of Python modules, forward and backward."""
    model = nn.Sequential(*(_Block(device) for _ in range(_BLOCKS)))
    x = torch.zeros(1, device=device)
    forward: list[float] = []
    backward: list[float] = []
    now = host_clock(device)
    for _ in range(_REPEATS):
        _wait(device)
        began = now()
        loss = model(x)
        called = now()
        _wait(device)
        resumed = now()
        loss.backward()
        backward.append(now() - resumed)
        forward.append(called - began)
        model.zero_grad()
    ops = 2 * _BLOCKS
    return median(forward) / ops, median(backward) / ops


def _empty_step(device: str) -> tuple[float, float]:
    """Return the seconds of an action (a forward or backward), and of a step, of almost no work."""
    model = _Block(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(1, device=device)
    both: list[float] = []
    rest: list[float] = []
    now = host_clock(device)
    for _ in range(_REPEATS):
        _wait(device)
        began = now()
        model(x).backward()
        _wait(device)
        middle = now()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        rest.append(now() - middle)
        both.append(middle - began)
    return median(both) / 2, median(rest)


def _optimizer(graph: Graph, device: str) -> tuple[float, float]:
    """Return the seconds of clipping and fused AdamW per tensor and per element, all fp32.

    An update takes a·tensors + b·elements. Many tensors of a few elements give a; then a few
    tensors, with as many elements as the model has (within limits), give b.
    """
    small = _update_seconds([_SMALL_ELEMENTS] * _SMALL_TENSORS, device)
    learned = (one for one in graph.parameters if one.trainable)
    model = sum(graph.tensors[one.name].numel.at(1) for one in learned)
    each = min(max(model, _FEWEST_PARAMETERS), _MOST_PARAMETERS) // _LARGE_TENSORS
    large = _update_seconds([each] * _LARGE_TENSORS, device)
    tensor = small / _SMALL_TENSORS
    return tensor, max(large - _LARGE_TENSORS * tensor, 0.5 * large) / (_LARGE_TENSORS * each)


def _update_seconds(sizes: Sequence[int], device: str) -> float:
    """Return the seconds of one update of parameters of these sizes, with cold caches."""
    parameters = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    scratch = torch.zeros(EVICTED_BYTES // 4, device=device)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    update()
    return median(_timed(update, scratch, device) for _ in range(_OPTIMIZER_REPEATS))


def _timed(work: Callable[[], object], scratch: Tensor, device: str) -> float:
    scratch.add_(1.0)
    _wait(device)
    now = host_clock(device)
    began = now()
    work()
    _wait(device)
    return now() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
