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

from autopar.planner.cluster.toml_reading import bytes_text
from autopar.planner.costs.ops.measurements import OpKey, Timing
from autopar.planner.profile.calls import CannotCallError, Clock, ProbeCall
from autopar.planner.profile.probes import Probe

FEWEST_SAMPLES = 5
MOST_SAMPLES = 60
VISITS = 4  # of each group, one after another
_CALLS_OF_A_VISIT = 4  # that warm it up, and a few to sample
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
class _RunningProbe:
    """One probe while it is measured; between two visits of its group it holds no tensors."""

    probe: Probe
    call: ProbeCall | None
    again_seconds: float  # of a call that is warm
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
    """Return the medians of all ops that ran within the limits, and what was left out.

    Groups are visited in turns: a slow minute of the machine meets some samples of all of them, not
    all samples of one batch, which would look worth avoiding.
    """
    deadline = time.perf_counter() + limits.total_seconds
    fitting = [probe for probe in probes if probe.size_bytes <= limits.most_bytes]
    left_out = [_too_large(one) for one in probes if one.size_bytes > limits.most_bytes]
    groups = list(_groups(fitting, limits.group_bytes))
    visits = VISITS if len(groups) > 1 else 1
    running: list[list[_RunningProbe]] = [[] for _ in groups]
    waiting = visits * sum(probe.expected_seconds for probe in fitting)
    for visit in range(visits):
        for group, own in zip(groups, running, strict=True):
            began = time.perf_counter()
            gc.collect()  # as long as it takes in a process that holds much
            deadline += time.perf_counter() - began
            expected = sum(probe.expected_seconds for probe in group)
            share = max(0.0, deadline - time.perf_counter()) * expected / (waiting or 1.0)
            waiting -= expected
            if visit == 0:
                report(f"measuring {group[0].op.target} and {len(group) - 1} more")
                started, faulty, warming = _started(group, device, share * visits)
                own += started
                left_out += faulty
                deadline += warming  # what is loaded when an op is first called
            elif not _restarted(own, device, share):
                continue
            until = (visit + 1) / visits
            _visit(own, device, clock, share, limits.op_seconds * until, MOST_SAMPLES * until)
    sampled = (_summed(one, baseline) for own in running for one in own)
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


def _visit(
    running: Sequence[_RunningProbe],
    device: str,
    clock: Clock,
    share_seconds: float,
    op_seconds: float,
    most_samples: float,
) -> None:
    """Sample a group for its share of the time, the fewest samples that count in any case."""
    deadline = time.perf_counter() + share_seconds
    step_bytes = sum(one.probe.uses * one.probe.size_bytes for one in running)
    scratch = torch.zeros(min(EVICTED_BYTES, step_bytes) // 4, device=device)
    with _undisturbed():
        while True:
            turn = [one for one in running if _is_wanted(one, op_seconds, most_samples)]
            is_needed = any(len(one.forward) < FEWEST_SAMPLES for one in turn)
            if not turn or (not is_needed and time.perf_counter() > deadline):
                break
            _round(turn, clock, scratch)
    for one in running:
        one.call = None


def _is_wanted(one: _RunningProbe, op_seconds: float, most_samples: float) -> bool:
    count = len(one.forward)
    return count < FEWEST_SAMPLES or (one.spent_seconds < op_seconds and count < most_samples)


def _started(
    group: Sequence[Probe], device: str, share_seconds: float
) -> tuple[list[_RunningProbe], list[LeftOut], float]:
    """Call every probe twice, which warms it up; return also what the first calls took longer.

    Left out are those that cannot be called at these sizes, and those for whose fewest samples the
    time does not suffice: the first ones come first.
    """
    running: list[_RunningProbe] = []
    left_out: list[LeftOut] = []
    needed_seconds = warming_seconds = 0.0
    for probe in group:
        if needed_seconds >= share_seconds:
            left_out.append(LeftOut(probe=probe, reason="the time was up"))
            continue
        try:
            call = ProbeCall(probe=probe, device=device)
            first = _run_seconds(call)
            again = _run_seconds(call)
        except _FAULTS as fault:
            reason = str(fault).strip().split("\n")[0] or type(fault).__name__
            left_out.append(LeftOut(probe=probe, reason=reason))
            continue
        needed_seconds += (2 + FEWEST_SAMPLES) * again
        warming_seconds += max(0.0, first - again)
        running.append(_RunningProbe(probe=probe, call=call, again_seconds=again))
    return running, left_out, warming_seconds


def _restarted(running: Sequence[_RunningProbe], device: str, share_seconds: float) -> bool:
    """Make the tensors of a group again and warm it up, if its share is enough to sample it too."""
    if share_seconds < _CALLS_OF_A_VISIT * sum(one.again_seconds for one in running):
        return False
    for one in running:
        one.call = ProbeCall(probe=one.probe, device=device)
        _run_seconds(one.call)
    return True


def _run_seconds(call: ProbeCall) -> float:
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


def _round(turn: Sequence[_RunningProbe], clock: Clock, scratch: torch.Tensor) -> None:
    scratch.add_(1.0)  # what the model does between two uses of a tensor: caches hold the latest
    calls = [(one, one.call) for one in turn if one.call is not None]
    for one, call in calls:
        call.prepare()
        seconds, result = clock.timed(call.forward)
        call.keep(result)
        del result
        one.forward.append(seconds)
        one.spent_seconds += seconds
    for one, call in reversed(calls):
        if call.prepare_backward():
            seconds, _ = clock.timed(call.backward)
            one.backward.append(seconds)
            one.spent_seconds += seconds
        call.forget()


def _summed(one: _RunningProbe, baseline: Baseline) -> Sampled:
    backward = median(one.backward) - baseline.backward_seconds if one.backward else 0.0
    return Sampled(
        key=one.probe.key,
        timing=Timing(
            forward_seconds=max(0.0, median(one.forward) - baseline.forward_seconds),
            backward_seconds=max(0.0, backward),
        ),
        samples=len(one.forward),
    )
