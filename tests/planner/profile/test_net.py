from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes

from autopar.planner.cluster.cluster import Backend, Collective
from autopar.planner.costs.collectives.choice import hops, sent_share
from autopar.planner.errors import InputError
from autopar.planner.profile.net import NetSample, fit, link_cases, measure_net, net_of, rising


def made(alpha: float, rate: float, ranks: int) -> list[NetSample]:
    """Return samples that lie on a line exactly."""
    return [
        NetSample(
            collective=one,
            payload_bytes=size,
            seconds=hops(one, ranks) * alpha + sent_share(one, ranks) * size / rate,
        )
        for one, size in link_cases()
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_fit_finds_the_line_that_samples_lie_on(ranks: int) -> None:
    found = fit(made(50e-6, 2e9, ranks), ranks)
    assert found.alpha_seconds == pytest.approx(50e-6)
    assert found.bytes_per_second == pytest.approx(2e9)


def test_neither_latency_nor_rate_is_ever_negative() -> None:
    falling = [
        NetSample(collective=Collective.BROADCAST, payload_bytes=size, seconds=seconds)
        for size, seconds in ((1_000, 2e-3), (1_000_000, 1e-3))
    ]
    found = fit(falling, 2)
    assert found.alpha_seconds > 0
    assert found.bytes_per_second > 0


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_smoothed_seconds_never_fall_and_rising_ones_stay(seconds: list[float]) -> None:
    found = rising([(4**i, one) for i, one in enumerate(seconds)])
    level = [one for _, one in found]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(level))
    plain = rising([(4**i, one) for i, one in enumerate(sorted(seconds))])
    assert [one for _, one in plain] == pytest.approx(sorted(seconds))


def test_neighbours_that_fall_meet_in_their_geometric_mean() -> None:
    assert [one for _, one in rising([(1, 4.0), (2, 1.0)])] == pytest.approx([2.0, 2.0])


def test_a_link_has_every_collective_by_itself() -> None:
    net = net_of(made(1e-4, 1e9, 2), device_name="cpu", backend=Backend.GLOO, ranks=2)
    assert {one.collective for one in net.collectives} == {one.value for one in Collective}
    assert net.alpha_seconds == pytest.approx(1e-4)


def test_one_process_has_no_link() -> None:
    with pytest.raises(InputError, match="--procs"):
        measure_net(device_name="cpu", device="cpu", ranks=1)


def test_two_processes_of_this_machine_have_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = partial(start_processes, start_method="forkserver")  # which need not import torch
    monkeypatch.setattr("autopar.planner.profile.net.spawn", forked)
    net = measure_net(
        device_name="cpu",
        device="cpu",
        ranks=2,
        sizes_bytes=(4096, 4194304),
    )
    assert 1e-7 <= net.alpha_seconds < 0.1
    assert 1e5 < net.bytes_per_second < 1e12
    assert all(one.points[0][1] <= one.points[-1][1] for one in net.collectives)
    assert all(1e-6 < one.points[0][1] < 0.1 for one in net.collectives)
