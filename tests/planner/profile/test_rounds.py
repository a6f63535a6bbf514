import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeVar

import pytest

from autopar.planner.costs.ops.measurements import Timing
from autopar.planner.precision import Precision
from autopar.planner.profile.calls import clock_of, threads_of_a_rank
from autopar.planner.profile.probes import Probe, find_probes
from autopar.planner.profile.profile import (
    as_in_training,
    local_device,
    measure_baseline,
    measure_host,
)
from autopar.planner.profile.rounds import (
    Limits,
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
