import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import TypeVar

import pytest

from autopar.planner.costs.ops.measurements import OpKey, Timing
from autopar.planner.precision import Precision
from autopar.planner.profile.calls import ProbeCall, clock_of, threads_of_a_rank
from autopar.planner.profile.probes import Probe, find_probes
from autopar.planner.profile.profile import (
    as_in_training,
    local_device,
    measure_baseline,
    measure_host,
)
from autopar.planner.profile.rounds import (
    MOST_SAMPLES,
    VISITS,
    Limits,
    UnmeasuredOp,
    measure,
)
from tests.planner.costs.ops.op_factories import known, pricer

Result = TypeVar("Result")
NOTHING = Timing(forward_seconds=0.0, backward_seconds=0.0)
LIMITS = Limits(total_seconds=1.0, op_seconds=1.0, group_bytes=2**30, most_bytes=2**30)


class Steady:
    """A clock on which every call takes as long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = count()

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        next(self.calls)
        return self.seconds, work()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with as_in_training(local_device(), Precision.FP32):
        yield


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets time pass, which stands still otherwise."""
    waits = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: sum(waits))
    return waits.append


def probes(rows: int = 4) -> tuple[Probe, ...]:
    """Return the probes of a small perceptron."""
    prices = pricer("mnist.py", batch=rows, precision=Precision.FP32, device_name="cpu")
    return find_probes(prices, degrees=(1,))


def test_a_sample_is_the_median_without_what_an_empty_call_takes() -> None:
    baseline = Timing(forward_seconds=0.25, backward_seconds=0.5)
    found, left_out = measure(
        probes(), device="cpu", clock=Steady(1.0), limits=LIMITS, baseline=baseline
    )
    assert not left_out
    linear = next(one for one in found if "linear" in one.key.target)
    assert (linear.timing.forward_seconds, linear.timing.backward_seconds) == (0.75, 0.5)


def test_an_empty_call_that_takes_longer_leaves_nothing_not_less() -> None:
    baseline = Timing(forward_seconds=2.0, backward_seconds=2.0)
    found, _ = measure(probes(), device="cpu", clock=Steady(1.0), limits=LIMITS, baseline=baseline)
    assert {one.timing.forward_seconds for one in found} == {0.0}


def test_ops_that_the_time_does_not_suffice_for_are_told() -> None:
    limits = Limits(total_seconds=0.0, op_seconds=1.0, group_bytes=1, most_bytes=2**30)
    found, left_out = measure(
        probes(), device="cpu", clock=Steady(1e-3), limits=limits, baseline=NOTHING
    )
    assert not found
    assert {one.reason for one in left_out} == {"the time was up"}
    assert len(left_out) == len(probes())


def test_an_op_that_is_larger_than_the_memory_is_told() -> None:
    limits = Limits(total_seconds=1.0, op_seconds=1.0, group_bytes=1, most_bytes=1)
    found, left_out = measure(
        probes(), device="cpu", clock=Steady(1e-3), limits=limits, baseline=NOTHING
    )
    assert not found
    assert {"more than is free" in one.reason for one in left_out} == {True}


def test_a_round_has_the_ops_of_one_batch_as_a_step_has() -> None:
    told: list[str] = []
    small, large = probes(rows=4), probes(rows=8)
    measure(
        (*small, *large),
        device="cpu",
        clock=Steady(1e-6),
        limits=LIMITS,
        baseline=NOTHING,
        report=told.append,
    )
    assert [text.rpartition(" and ")[2] for text in told] == [
        f"{len(one) - 1} more" for one in (small, large)
    ]


@pytest.mark.usefixtures("wait")
def test_batches_take_turns_so_that_a_slow_minute_meets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    forward = ProbeCall.forward

    def noting(call: ProbeCall) -> object:
        if seen[-1:] != [call.probe.batch]:
            seen.append(call.probe.batch)
        return forward(call)

    monkeypatch.setattr(ProbeCall, "forward", noting)
    both = (*probes(rows=4), *probes(rows=8))
    found, _ = measure(both, device="cpu", clock=Steady(1e-6), limits=LIMITS, baseline=NOTHING)
    assert seen == [4, 8] * VISITS
    assert {one.samples for one in found} == {MOST_SAMPLES}


def left_out_of_two_batches(*, total_seconds: float) -> tuple[UnmeasuredOp, ...]:
    """Return the ops of two groups for which a budget does not suffice."""
    _, left_out = measure(
        (*probes(rows=4), *probes(rows=8)),
        device="cpu",
        clock=Steady(1e-6),
        limits=replace(LIMITS, total_seconds=total_seconds),
        baseline=NOTHING,
    )
    return left_out


def test_what_collecting_garbage_takes_is_not_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: wait(1.2))
    assert not left_out_of_two_batches(total_seconds=1.0)


def test_what_is_loaded_when_an_op_is_first_called_is_not_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]
) -> None:
    loaded = set[OpKey]()
    forward = ProbeCall.forward

    def loading(call: ProbeCall) -> object:
        if call.probe.key not in loaded:
            loaded.add(call.probe.key)
            wait(0.25)
        return forward(call)

    monkeypatch.setattr(ProbeCall, "forward", loading)
    assert not left_out_of_two_batches(total_seconds=1.0)


def test_an_op_that_took_its_time_is_not_called_again() -> None:
    clock = Steady(10.0)
    found, _ = measure(probes(), device="cpu", clock=clock, limits=LIMITS, baseline=NOTHING)
    assert {one.samples for one in found} == {5}


def test_real_clocks_find_longer_ops_longer() -> None:
    clock = clock_of("cpu")
    baseline = measure_baseline(clock, "cpu")
    found, _ = measure(
        probes(rows=256), device="cpu", clock=clock, limits=LIMITS, baseline=baseline
    )
    seconds = {
        one.key.operands[1].shape: one.timing.forward_seconds
        for one in found
        if "linear" in one.key.target
    }
    widest = max(seconds, key=lambda shape: shape[0] * shape[1])
    assert seconds[widest] == max(seconds.values())


def test_the_host_of_this_machine_takes_microseconds() -> None:
    graph, _, _ = known("mnist.py")
    times = measure_host(graph, "cpu")
    assert 1e-7 < times.forward_seconds < 1e-3
    assert 1e-7 < times.backward_seconds < 1e-3
    assert 1e-11 < times.optimizer_element_seconds < 1e-6


def test_a_rank_has_the_threads_that_torchrun_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_a_rank() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_a_rank() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_of_a_rank() == 1
