"""Measures probes in rounds: each op once forward in order, then each backward in reverse order.

A round looks like a step of training to the caches and to the allocator: what an op reads was
written just before (its inputs) or a round ago (weights), results stay until their backward. Other
programs that run meanwhile disturb single samples of all ops alike, and medians leave them out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from autopar.planner.cluster.units import bytes_text
from autopar.planner.costs.measurements import OpKey, Timing
from autopar.planner.profile.calls import Call, CannotCallError
from autopar.planner.profile.clock import Clock
from autopar.planner.profile.probes import Probe

FEWEST_SAMPLES = 5
MOST_SAMPLES = 60
EVICTED_BYTES = 64 * 2**20  # as much as the last cache of a CPU or GPU holds
_FAULTS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, CannotCallError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What measuring may take."""

    total_seconds: float
    op_seconds: float
    group_bytes: int
    most_bytes: int  # that one op with its gradients may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was measured of one op."""

    key: OpKey
    timing: Timing
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An op that was not measured, and why; the formulas serve for it."""

    probe: Probe
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a call that computes nothing takes by the same clock; dispatch is priced apart."""

    forward_seconds: float
    backward_seconds: float


@dataclass(slots=True)
class _Running:
    """One probe while its group is measured."""

    call: Call
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    spent_seconds: float = 0.0


def measure(
    probes: Sequence[Probe],
    *,
    device: str,
    clock: Clock,
    limits: Limits,
    baseline: Baseline,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Sampled, ...], tuple[LeftOut, ...]]:
    """Return the medians of all ops that ran within the limits, and what was left out."""
    deadline = time.perf_counter() + limits.total_seconds
    sampled: list[Sampled] = []
    left_out: list[LeftOut] = []
    fitting = [probe for probe in probes if probe.size_bytes <= limits.most_bytes]
    left_out += [_too_large(one) for one in probes if one.size_bytes > limits.most_bytes]
    waiting = sum(probe.expected_seconds for probe in fitting)
    for group in _groups(fitting, limits.group_bytes):
        began = time.perf_counter()
        gc.collect()  # as long as it takes in a process that holds much
        deadline += time.perf_counter() - began
        left = deadline - time.perf_counter()
        expected = sum(probe.expected_seconds for probe in group)
        report(f"measuring {group[0].op.target} and {len(group) - 1} more")
        share = max(0.0, left) * expected / (waiting or 1.0)
        done, faulty, warming = _measure_group(group, device, clock, share, limits.op_seconds)
        deadline += warming  # what is loaded when an op is first called
        sampled += [_summed(one, baseline) for one in done]
        left_out += faulty
        waiting -= expected
    return tuple(sampled), tuple(left_out)


def _groups(probes: Sequence[Probe], most_bytes: int) -> Iterator[list[Probe]]:
    """Yield neighbours of one batch that fit into memory together.

    With all batches together a round has several times the memory of a step: the allocator gives
    back to the system what a step would keep, and forwards take half as long again.
    """
    group: list[Probe] = []
    size = 0
    for probe in probes:
        if group and (probe.batch != group[0].batch or size + probe.size_bytes > most_bytes):
            yield group
            group, size = [], 0
        group.append(probe)
        size += probe.size_bytes
    if group:
        yield group


def _too_large(probe: Probe) -> LeftOut:
    return LeftOut(probe=probe, reason=f"needs {bytes_text(probe.size_bytes)}, more than is free")


def _measure_group(
    group: Sequence[Probe], device: str, clock: Clock, share_seconds: float, op_seconds: float
) -> tuple[list[_Running], list[LeftOut], float]:
    began = time.perf_counter()
    running, left_out, warming = _started(group, device, share_seconds)
    deadline = began + share_seconds + warming
    step_bytes = sum(probe.uses * probe.size_bytes for probe in group)
    scratch = torch.zeros(min(EVICTED_BYTES, step_bytes) // 4, device=device)
    with _undisturbed():
        for number in range(1, MOST_SAMPLES + 1):
            is_needed = number <= FEWEST_SAMPLES
            turn = [one for one in running if is_needed or one.spent_seconds < op_seconds]
            if not turn or (not is_needed and time.perf_counter() > deadline):
                break
            _round(turn, clock, scratch)
    return running, left_out, warming


def _started(
    group: Sequence[Probe], device: str, share_seconds: float
) -> tuple[list[_Running], list[LeftOut], float]:
    """Call every probe twice, which warms it up; return also what the first calls took longer.

    Left out are those that cannot be called at these sizes, and those for whose fewest samples the
    time does not suffice: the first ones come first.
    """
    running: list[_Running] = []
    left_out: list[LeftOut] = []
    needed_seconds = warming_seconds = 0.0
    for probe in group:
        if needed_seconds >= share_seconds:
            left_out.append(LeftOut(probe=probe, reason="the time was up"))
            continue
        try:
            call = Call(probe=probe, device=device)
            first = _run_seconds(call)
            again = _run_seconds(call)
        except _FAULTS as fault:
            reason = str(fault).strip().split("\n")[0] or type(fault).__name__
            left_out.append(LeftOut(probe=probe, reason=reason))
            continue
        needed_seconds += (2 + FEWEST_SAMPLES) * again
        warming_seconds += max(0.0, first - again)
        running.append(_Running(call=call))
    return running, left_out, warming_seconds


def _run_seconds(call: Call) -> float:
    began = time.perf_counter()
    call.prepare()
    call.keep(call.forward())
    if call.prepare_backward():
        call.backward()
    call.forget()
    return time.perf_counter() - began


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep Python's collector from running inside a measured call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _round(turn: Sequence[_Running], clock: Clock, scratch: torch.Tensor) -> None:
    scratch.add_(1.0)  # what the model does between two uses of a tensor: caches hold the latest
    for one in turn:
        one.call.prepare()
        seconds, result = clock.timed(one.call.forward)
        one.call.keep(result)
        del result
        one.forward.append(seconds)
        one.spent_seconds += seconds
    for one in reversed(turn):
        if one.call.prepare_backward():
            seconds, _ = clock.timed(one.call.backward)
            one.backward.append(seconds)
            one.spent_seconds += seconds
        one.call.forget()


def _summed(one: _Running, baseline: Baseline) -> Sampled:
    backward = median(one.backward) - baseline.backward_seconds if one.backward else 0.0
    return Sampled(
        key=one.call.probe.key,
        timing=Timing(
            forward_seconds=max(0.0, median(one.forward) - baseline.forward_seconds),
            backward_seconds=max(0.0, backward),
        ),
        samples=len(one.forward),
    )
