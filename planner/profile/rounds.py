"""Measures probes in rounds: each op's forward in order, then each backward in reverse order.

A probe is an op with tensors to run it on. For caches and the allocator, a round resembles a
training step: an op's inputs were written just before, its weights a round ago, and results stay
until their backward. If another program disturbs the machine for a while, it disturbs a few samples
of many ops, which medians ignore.
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
from autopar.planner.costs.ops.measurements import Timing
from autopar.planner.profile.calls import CannotCallError, Clock, ProbeCall
from autopar.planner.profile.measured import MeasuredOp
from autopar.planner.profile.probes import Probe

FEWEST_SAMPLES = 5
MOST_SAMPLES = 60
VISITS = 4  # how often each group of probes is measured; groups take turns
_CALLS_OF_A_VISIT = 4  # a visit needs time for this many calls: to warm up, and for a few samples
EVICTED_BYTES = 64 * 2**20  # writing so many evicts the last-level cache of a CPU or GPU
_FAULTS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, CannotCallError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of measuring, in seconds and in bytes of memory."""

    total_seconds: float  # for all ops
    op_seconds: float  # for one op
    group_bytes: int  # for the ops of one round
    most_bytes: int  # for one op with its gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredOp:
    """An op that was not measured, and why; formulas are used for it."""

    probe: Probe
    reason: str


@dataclass(slots=True)
class _RunningProbe:
    """A probe and its samples; between visits of its group it has no tensors (`call` is None)."""

    probe: Probe
    call: ProbeCall | None
    again_seconds: float  # of a warm call
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    spent_seconds: float = 0.0


def measure(
    probes: Sequence[Probe],
    *,
    device: str,
    clock: Clock,
    limits: Limits,
    baseline: Timing,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[MeasuredOp, ...], tuple[UnmeasuredOp, ...]]:
    """Return the medians of all ops that ran within the limits, and the ops that were left out.

    `baseline` is the time of calling an op on one element, by the same clock. It is subtracted from
    every op's time, because dispatch is priced separately.
    Groups take turns. A slow minute of the machine then affects some samples of all groups, not all
    samples of one group.
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
            gc.collect()  # its time does not count: it may be long in a process with many objects
            deadline += time.perf_counter() - began
            expected = sum(probe.expected_seconds for probe in group)
            share = max(0.0, deadline - time.perf_counter()) * expected / (waiting or 1.0)
            waiting -= expected
            if visit == 0:
                report(f"measuring {group[0].op.target} and {len(group) - 1} more")
                started, faulty, warming = _started(group, device, share * visits)
                own += started
                left_out += faulty
                deadline += warming  # does not count: an op's first call may load libraries
            elif not _restarted(own, device, share):
                continue
            until = (visit + 1) / visits
            _visit(own, device, clock, share, limits.op_seconds * until, MOST_SAMPLES * until)
    sampled = (_medians(one, baseline) for own in running for one in own)
    return tuple(sampled), tuple(left_out)


def _groups(probes: Sequence[Probe], most_bytes: int) -> Iterator[list[Probe]]:
    """Yield groups of consecutive probes of one batch size that fit into memory together.

    All batch sizes in one round would need several times the memory of a step. The allocator would
    then give memory back that it keeps in a step, and forwards would take 1.5 times as long.
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


def _too_large(probe: Probe) -> UnmeasuredOp:
    return UnmeasuredOp(
        probe=probe, reason=f"needs {bytes_text(probe.size_bytes)}, more than is free"
    )


def _visit(
    running: Sequence[_RunningProbe],
    device: str,
    clock: Clock,
    share_seconds: float,
    op_seconds: float,
    most_samples: float,
) -> None:
    """Take samples of a group for its share of the time, and at least FEWEST_SAMPLES of each op."""
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
) -> tuple[list[_RunningProbe], list[UnmeasuredOp], float]:
    """Call every probe twice; return the probes, those left out, and the first calls' extra time.

    A probe is left out if it cannot be called at these sizes, or if the probes before it need the
    whole share of the time for FEWEST_SAMPLES of each.
    """
    running: list[_RunningProbe] = []
    left_out: list[UnmeasuredOp] = []
    needed_seconds = warming_seconds = 0.0
    for probe in group:
        if needed_seconds >= share_seconds:
            left_out.append(UnmeasuredOp(probe=probe, reason="the time was up"))
            continue
        try:
            call = ProbeCall(probe=probe, device=device)
            first = _run_seconds(call)
            again = _run_seconds(call)
        except _FAULTS as fault:
            reason = str(fault).strip().split("\n")[0] or type(fault).__name__
            left_out.append(UnmeasuredOp(probe=probe, reason=reason))
            continue
        needed_seconds += (2 + FEWEST_SAMPLES) * again
        warming_seconds += max(0.0, first - again)
        running.append(_RunningProbe(probe=probe, call=call, again_seconds=again))
    return running, left_out, warming_seconds


def _restarted(running: Sequence[_RunningProbe], device: str, share_seconds: float) -> bool:
    """Make a group's tensors again and call each probe once; False if the time is too short.

    The share must also suffice for a few samples.
    """
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
    """Disable Python's garbage collector in the body."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _round(turn: Sequence[_RunningProbe], clock: Clock, scratch: torch.Tensor) -> None:
    scratch.add_(1.0)  # evicts the caches, as other ops do between two uses of a tensor in a model
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


def _medians(one: _RunningProbe, baseline: Timing) -> MeasuredOp:
    backward = median(one.backward) - baseline.backward_seconds if one.backward else 0.0
    return MeasuredOp(
        key=one.probe.key,
        timing=Timing(
            forward_seconds=max(0.0, median(one.forward) - baseline.forward_seconds),
            backward_seconds=max(0.0, backward),
        ),
        samples=len(one.forward),
        torch=torch.__version__,
    )
