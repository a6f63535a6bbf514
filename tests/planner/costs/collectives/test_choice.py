"""Tests of pricing collectives on clusters: the choice of algorithm and protocol."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.cluster import Backend, Collective, Topology
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import CrossedLevel, GroupShape, group_shape
from autopar.planner.costs.collectives.choice import cheapest, collective_seconds, ring_hops, ways

MEGABYTE = 1e6
GIGABYTE = 1e9


def crossing(**changes: object) -> CrossedLevel:
    plain = CrossedLevel(
        level="node",
        parts=4,
        members=1,
        bytes_per_second=100e9,
        port_bytes_per_second=100e9,
        alpha_seconds=1e-6,
        topology=Topology.SWITCH,
        reduction_bytes_per_second=0.0,
        backend=Backend.NCCL,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def shape(*crossings: CrossedLevel) -> GroupShape:
    ranks = 1
    for one in crossings:
        ranks *= one.parts
    return GroupShape(ranks=ranks, crossings=crossings)


@pytest.mark.parametrize("collective", Collective)
def test_a_group_of_one_rank_costs_nothing(collective: Collective) -> None:
    assert collective_seconds(collective, GIGABYTE, shape()) == 0.0


def test_an_empty_message_costs_nothing() -> None:
    assert collective_seconds(Collective.ALL_REDUCE, 0, shape(crossing())) == 0.0


payloads = st.floats(1.0, 1e12)
topologies = st.sampled_from(list(Topology))
crossings = st.builds(
    crossing,
    parts=st.integers(2, 16),
    bytes_per_second=st.floats(1e8, 1e12),
    port_bytes_per_second=st.floats(1e8, 1e12),
    alpha_seconds=st.floats(1e-7, 1e-3),
    topology=topologies,
    reduction_bytes_per_second=st.sampled_from([0.0, 1e10, 1e11]),
    backend=st.sampled_from(list(Backend)),
)


@st.composite
def shapes(draw: st.DrawFn) -> GroupShape:
    node = draw(crossings)
    network = replace(draw(crossings), level="network", members=node.parts)
    return draw(st.sampled_from([shape(node), shape(node, network)]))


@given(shapes(), st.sampled_from(list(Collective)), payloads, st.floats(1.0, 100.0))
def test_more_bytes_are_never_faster(
    group: GroupShape, collective: Collective, payload: float, factor: float
) -> None:
    more = collective_seconds(collective, payload * factor, group)
    assert more >= collective_seconds(collective, payload, group) * (1 - 1e-9) > 0


def test_the_hops_of_a_ring_are_counted_by_level() -> None:
    # 4 nodes of 8: 28 hops stay in nodes, 3 leave them
    group = group_shape(choose_cluster(32, "h100", 4), 32, 1)
    assert ring_hops(group) == (28, 3)


def algorithms(group: GroupShape) -> set[str]:
    return {way.algorithm for way in ways(Collective.ALL_REDUCE, GIGABYTE, group)}


@pytest.mark.parametrize(
    ("topology", "allowed"),
    [
        (Topology.RING, {"ring"}),
        (Topology.DOUBLE_RING, {"double ring"}),
        (Topology.TREE, {"ring", "tree"}),
        (Topology.MESH, {"ring", "tree"}),
        (Topology.SWITCH, {"ring", "tree"}),
    ],
)
def test_the_topology_says_which_algorithms_there_are(
    topology: Topology, allowed: set[str]
) -> None:
    assert algorithms(shape(crossing(topology=topology))) == allowed


def test_a_switch_that_sums_is_used_where_it_pays() -> None:
    one_node = group_shape(choose_cluster(8, "h100"), 8, 1)
    assert cheapest(Collective.ALL_REDUCE, GIGABYTE, one_node).algorithm == "in-switch"
    assert cheapest(Collective.ALL_REDUCE, 1024, one_node).protocol == "ll"
    assert "in-switch" not in algorithms(group_shape(choose_cluster(8, "a100"), 8, 1))
    two_nodes = group_shape(choose_cluster(16, "h100", 2), 16, 1)
    assert cheapest(Collective.ALL_REDUCE, GIGABYTE, two_nodes).algorithm == "in-switch and tree"


def test_long_all_reduces_reach_the_published_bus_bandwidth() -> None:
    # nccl-tests, 16 GiB on 8 H100: 62.2 ms, so 483 GB/s of bus bandwidth; 2 nodes with EFA: 66.1 ms
    size = 16 * 2**30
    one = collective_seconds(
        Collective.ALL_REDUCE, size, group_shape(choose_cluster(8, "h100"), 8, 1)
    )
    assert one == pytest.approx(62.2e-3, rel=0.05)
    two = collective_seconds(
        Collective.ALL_REDUCE, size, group_shape(choose_cluster(16, "h100", 2), 16, 1)
    )
    assert two == pytest.approx(66.1e-3, rel=0.1)


def test_gloo_uses_its_own_protocol() -> None:
    group = group_shape(choose_cluster(2, "cpu"), 2, 1)
    assert cheapest(Collective.ALL_REDUCE, MEGABYTE, group).protocol == "tcp"


def test_gloo_scatters_by_an_all_reduce() -> None:
    gloo, nccl = (group_shape(choose_cluster(2, device), 2, 1) for device in ("cpu", "h100-sxm"))
    for group, times in ((gloo, 1.0), (nccl, 0.5)):
        whole, part = (
            cheapest(one, 2**30, group).seconds
            for one in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        )
        assert part == pytest.approx(times * whole, rel=0.1)


@pytest.mark.parametrize(
    ("collective", "ranks", "backend", "seconds"),
    [
        # two ranks with 1 GB over 1 GB/s: each sends half
        (Collective.ALL_GATHER, 2, Backend.GLOO, 0.75),  # in halves, one of 3 beside another
        (Collective.ALL_TO_ALL, 2, Backend.GLOO, 1.0),  # one half after the other
        (Collective.ALL_REDUCE, 2, Backend.GLOO, 1.0),  # asks first: two halves both ways
        (Collective.REDUCE_SCATTER, 2, Backend.GLOO, 1.0),
        (Collective.ALL_GATHER, 4, Backend.GLOO, 0.75),  # 3 of 4 parts, each to the next rank
        (Collective.ALL_TO_ALL, 4, Backend.GLOO, 1.5),  # 3 of 4 parts each way, one way at a time
        (Collective.ALL_GATHER, 2, Backend.NCCL, 0.5),
        (Collective.ALL_TO_ALL, 2, Backend.NCCL, 0.5 / 0.85),
    ],
)
def test_gloo_sends_before_it_asks(
    collective: Collective, ranks: int, backend: Backend, seconds: float
) -> None:
    link = crossing(parts=ranks, bytes_per_second=1e9, alpha_seconds=0.0, backend=backend)
    found = cheapest(collective, 10**9, shape(link)).seconds
    assert found == pytest.approx(seconds, rel=0.005)


def test_gloo_has_no_trees() -> None:
    many = crossing(parts=64, topology=Topology.SWITCH, level="network", backend=Backend.GLOO)
    assert algorithms(shape(many)) == {"ring"}


def test_a_price_by_hand() -> None:
    # gloo, a ring of two: base 60 µs + 2 · 60 µs + 2·1/2 · 15 MB ÷ 1.5 GB/s = 180 µs + 10 ms,
    # and √(4.9 µs · 10 ms) = 221.4 µs for the chunks
    group = shape(
        crossing(
            parts=2,
            bytes_per_second=1.5e9,
            alpha_seconds=60e-6,
            backend=Backend.GLOO,
            topology=Topology.RING,
        )
    )
    priced = cheapest(Collective.ALL_REDUCE, 15 * MEGABYTE, group)
    assert priced.seconds == pytest.approx(180e-6 + 10e-3 + 221.4e-6, rel=1e-4)


# 100 MB on four ranks, so 3 hops of 1 ms in a round, over 1 GB/s; gloo's base of 60 µs, and
# √(4.9 µs · W) for the chunks.
@pytest.mark.parametrize(
    ("collective", "topology", "hops", "wire_seconds"),
    [
        (Collective.ALL_REDUCE, Topology.RING, 6, 0.15),  # two rounds; 2·3/4 · S/β
        (Collective.ALL_REDUCE, Topology.DOUBLE_RING, 6, 0.075),  # half of the payload each way
        (Collective.ALL_GATHER, Topology.RING, 3, 0.075),
        (Collective.ALL_GATHER, Topology.DOUBLE_RING, 3, 0.0375),
        (Collective.BROADCAST, Topology.RING, 3, 0.1),  # down a chain
        (Collective.BROADCAST, Topology.DOUBLE_RING, 3, 0.1),
        (Collective.POINT_TO_POINT, Topology.RING, 1, 0.1 / 0.73),
    ],
)
def test_latencies_by_hand(
    collective: Collective, topology: Topology, hops: int, wire_seconds: float
) -> None:
    link = crossing(
        bytes_per_second=1e9,
        port_bytes_per_second=1e9,
        alpha_seconds=1e-3,
        topology=topology,
        backend=Backend.GLOO,
    )
    found = cheapest(collective, 100 * MEGABYTE, shape(link)).seconds
    chunks = (4.9e-6 * wire_seconds) ** 0.5
    assert found == pytest.approx(60e-6 + hops * 1e-3 + wire_seconds + chunks)


def test_the_latency_of_trees_by_hand() -> None:
    # 8 nodes of one rank with nccl's 8-byte words, which hand on no chunks: a broadcast goes 3 hops
    # down, of 2.05 · 1 ms, and an all-reduce also up; 7.5 µs for the call
    link = crossing(level="network", parts=8, alpha_seconds=1e-3)
    found = {
        one: next(
            way.seconds
            for way in ways(one, 1e-3, shape(link))
            if (way.algorithm, way.protocol) == ("tree", "ll")
        )
        for one in (Collective.BROADCAST, Collective.ALL_REDUCE)
    }
    assert found[Collective.BROADCAST] == pytest.approx(7.5e-6 + 3 * 2.05e-3)
    assert found[Collective.ALL_REDUCE] == pytest.approx(7.5e-6 + 6 * 2.05e-3)
