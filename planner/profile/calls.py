"""Calls a probe on a device, and times it by the device's clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from autopar.planner.profile.probes import (
    OperandForm,
    Probe,
    arguments_of,
    callable_of,
    results_of,
    torch_dtype,
)
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of

Result = TypeVar("Result")
_HEAD_START_CYCLES = 2_000_000  # about a millisecond, in which the host runs ahead of the device


class Clock(Protocol):
    """Runs work and measures its time."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and its result."""
        ...


class CpuClock:
    """The host's clock."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and its result."""
        now = host_clock("cpu")
        began = now()
        result = work()
        return now() - began, result


class CudaClock:
    """Events of a GPU. A wait on the GPU comes first, so that the work never waits for the host."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and its result."""
        cuda: Any = torch.cuda  # torch has no types for these
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        cuda._sleep(_HEAD_START_CYCLES)
        first.record()
        result = work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3, result


def clock_of(device: str) -> Clock:
    """Return the clock of "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else CpuClock()


def host_clock(device: str) -> Callable[[], float]:
    """Return the host's clock for work on a device.

    For a lone thread it is the thread's CPU time, which excludes other programs. With more threads
    or a GPU it is wall time.
    """
    lone = device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if lone else time.perf_counter


def threads_of_a_rank() -> int:
    """Return torch's number of threads in a CPU rank: OMP_NUM_THREADS, or 1 as under torchrun."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) > 0 else 1


class CannotCallError(Exception):
    """An op cannot run alone at a rank's sizes; the text says why."""


@dataclass(slots=True)
class ProbeCall:
    """A probe on a device. Only `forward` and `backward` are timed.

    Before them, `prepare` brings inputs into the state that they have in training, and
    `prepare_backward` makes the results' gradients; `forget` frees the results.
    """

    probe: Probe
    device: str
    operands: dict[str, Tensor] = field(init=False)
    arguments: dict[str, Any] = field(init=False)
    function: Any = field(init=False)
    results: list[Tensor] = field(init=False, default_factory=list)
    gradients: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.function = callable_of(self.probe.op)
        self.operands = {form.name: self._tensor(form) for form in self.probe.operands}
        self._set_arguments(self.operands)

    def prepare(self) -> None:
        """Write the inputs that the previous op would have written, so that caches hold them."""
        for form in self.probe.operands:
            tensor = self.operands[form.name]
            if not form.is_weight and tensor.is_floating_point():
                _touch(tensor)
        if self.probe.op.writes:
            self._set_arguments(self._copies())

    def forward(self) -> Any:
        """Call the op."""
        return self.function(**self.arguments)

    def keep(self, result: Any) -> None:
        """Keep the results for the backward; raise if the first one has a wrong shape."""
        self.results = results_of(result)[: len(self.probe.results)]
        found, needed = tuple(self.results[0].shape), self.probe.results[0]
        if found != needed:  # other results may be the kernel's own, in any shape
            raise CannotCallError(f"returns the shape {found} instead of {needed}")

    def prepare_backward(self) -> bool:
        """Write the gradients of the results; return whether the probe has a backward."""
        learned = [one for one in self.results if one.requires_grad]
        if not self.probe.is_differentiable or not learned or not self._sources():
            return False
        self.results = learned
        if not self.gradients:
            self.gradients = [torch.rand_like(one) for one in learned]
        for gradient in self.gradients:
            _touch(gradient)
        return True

    def backward(self) -> Any:
        """Compute the gradients of all inputs that need one."""
        return torch.autograd.grad(self.results, self._sources(), self.gradients, allow_unused=True)

    def forget(self) -> None:
        """Free the results and the tensors saved for the backward."""
        self.results = []

    def _sources(self) -> list[Tensor]:
        return [one for one in self.operands.values() if one.requires_grad]

    def _tensor(self, form: OperandForm) -> Tensor:
        dtype = torch_dtype(form.dtype, self.probe.key.precision)
        made = torch.empty_strided(form.shape, form.strides, dtype=dtype, device=self.device)
        reached = sum((n - 1) * s for n, s in zip(form.shape, form.strides, strict=True)) + 1
        flat = made.as_strided((max(0, reached if made.numel() else 0),), (1,))
        if dtype.is_floating_point:
            flat.uniform_(0.05, 1.0)
        elif dtype is torch.bool:
            flat.fill_(True)
        elif form.spacing:
            torch.arange(0, form.spacing * flat.numel(), form.spacing, out=flat)
        else:
            flat.random_(0, max(1, form.below))
        return made.requires_grad_(form.requires_grad)

    def _copies(self) -> dict[str, Tensor]:
        """Return the operands, with copies of leaves that need a gradient if the op writes to them.

        torch does not let an op write to such a leaf.
        """
        written = set(self.probe.op.writes)
        return {
            name: tensor.clone() if name in written and tensor.requires_grad else tensor
            for name, tensor in self.operands.items()
        }

    def _set_arguments(self, tensors: dict[str, Tensor]) -> None:
        probe = self.probe
        self.arguments = arguments_of(
            probe.op,
            tensors,
            batch=probe.batch,
            precision=probe.key.precision,
            device=self.device,
        )
        if probe.split is not None:
            self.arguments.update(_local_sizes(probe, self.arguments))


def _local_sizes(probe: Probe, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are sizes, with a rank's values."""
    rule = rule_of(probe.op.target)
    if rule.sizes:
        return {rule.sizes: list(probe.results[0])}
    if rule.kind is OpKind.PARTS and rule.cuts:
        parts, (key,) = [shape[arguments["dim"]] for shape in probe.results], rule.cuts
        return {key: parts[0] if isinstance(arguments[key], int) else parts}
    return {} if probe.groups is None else {"groups": probe.groups}


def _touch(tensor: Tensor) -> None:
    """Read and write a tensor; not an expanded one, whose elements share memory."""
    if 0 not in tensor.stride():
        with torch.no_grad():
            tensor.mul_(1.0)
