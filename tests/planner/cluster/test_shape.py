"""Tests of what groups of ranks cross."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.cluster.shape import ends_shape, group_shape, neighbour_shape, worst_shape
from autopar.planner.errors import InputError

SHARED_CARDS = """
[[nodes]]
count = 2
device = "a100"
devices = 8
[network]
bandwidth = "100 Gb/s"
cards_per_node = 4
latency = "10 us"
efficiency = 0.8
"""
UNEQUAL = """
[[nodes]]
device = "a100"
devices = 8
[[nodes]]
device = "h100"
devices = 4
[network]
like = "infiniband-hdr"
"""


def file(text: str) -> Cluster:
    return parse_cluster(text, where="test")


def test_one_rank_crosses_nothing() -> None:
    assert group_shape(choose_cluster(8, "h100"), 1, 1).crossings == ()


@pytest.mark.parametrize(
    ("ranks", "stride", "members", "nodes"),
    [(8, 1, 8, 1), (32, 1, 8, 4), (4, 8, 1, 4), (8, 4, 2, 4), (2, 4, 2, 1), (2, 16, 1, 2)],
)
def test_a_group_knows_its_members_per_node(
    ranks: int, stride: int, members: int, nodes: int
) -> None:
    shape = group_shape(choose_cluster(32, "h100", 4), ranks, stride)
    assert (shape.members_per_node, shape.nodes) == (members, nodes)


def test_groups_that_run_at_once_share_the_cards_of_a_node() -> None:
    # 4 cards × 12.5 GB/s × 0.8 = 40 GB/s leave a node: 5 GB/s for each of 8 groups
    cluster = file(SHARED_CARDS)
    assert group_shape(cluster, 16, 1).crossings[-1].bytes_per_second == pytest.approx(40e9)
    assert group_shape(cluster, 2, 8).crossings[-1].bytes_per_second == pytest.approx(5e9)


def test_a_card_of_its_own_is_not_shared() -> None:
    # HDR: 25 GB/s × 0.95 per device
    crossing = group_shape(choose_cluster(16, "a100", 2), 2, 8).crossings[-1]
    assert crossing.bytes_per_second == pytest.approx(23.75e9)


def test_the_worst_group_counts_where_nodes_differ() -> None:
    # ranks 0–7 in one node, 8–11 in the other: groups of 6 are 0–5 (inside) and 6–11 (across)
    shape = group_shape(file(UNEQUAL), 6, 1)
    assert shape.nodes == 2
    assert [crossing.level for crossing in shape.crossings] == ["node", "network"]


def test_an_nvlink_rack_is_one_scale_up_domain() -> None:
    # 144 GB200 in nodes of 4: two domains of 72
    cluster = choose_cluster(144, "gb200")
    assert len(cluster.nodes) == 36
    assert [unit.ranks for unit in cluster.levels[0].units] == [72, 72]
    assert group_shape(cluster, 72, 1).nodes == 1


def test_devices_of_two_sockets_meet_on_the_slow_link() -> None:
    cluster = choose_cluster(8, "a100-pcie")
    within = group_shape(cluster, 4, 1).crossings
    across = group_shape(cluster, 8, 1).crossings
    assert [crossing.level for crossing in within] == ["socket"]
    assert across[-1].bytes_per_second < within[-1].bytes_per_second


def test_a_part_of_a_full_mesh_has_a_part_of_its_links() -> None:
    # MI300X: 448 GB/s over 7 links; a pair shares one of them, 64 GB/s × 0.7
    shape = group_shape(choose_cluster(8, "mi300x"), 2, 1)
    assert shape.crossings[0].bytes_per_second == pytest.approx(44.8e9)


def test_neighbours_in_a_pipeline_meet_where_it_crosses_nodes() -> None:
    cluster = choose_cluster(16, "h100", 2)
    assert neighbour_shape(cluster, 2, 8).crossings[0].level == "network"
    assert neighbour_shape(cluster, 4, 4).ranks == 2
    assert neighbour_shape(cluster, 2, 4).crossings[0].level == "node"


@pytest.mark.parametrize(("ranks", "stride"), [(0, 1), (3, 1), (16, 2), (8, 0)])
def test_groups_that_do_not_tile_the_cluster_are_refused(ranks: int, stride: int) -> None:
    with pytest.raises(InputError, match="do not tile"):
        group_shape(choose_cluster(16, "h100"), ranks, stride)


@given(
    nodes=st.integers(1, 6),
    exponents=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda it: sum(it) <= 3),
)
def test_a_group_has_as_many_ranks_as_its_crossings_multiply_to(
    nodes: int, exponents: tuple[int, int]
) -> None:
    ranks, stride = 2 ** exponents[0], 2 ** exponents[1]
    shape = group_shape(choose_cluster(8 * nodes, "h100", nodes), ranks, stride)
    product = 1
    for crossing in shape.crossings:
        assert crossing.members == product
        product *= crossing.parts
    assert product == ranks


@given(
    nodes=st.integers(1, 5),
    exponents=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda it: sum(it) <= 3),
    device=st.sampled_from(["h100", "a100", "mi300x", "l40s"]),
    last_is_smaller=st.booleans(),
)
def test_the_worst_group_is_the_worst_of_all(
    nodes: int, exponents: tuple[int, int], device: str, last_is_smaller: bool
) -> None:
    cluster = choose_cluster(8 * nodes, device, nodes)
    if last_is_smaller:
        cluster = file(UNEQUAL)
    ranks, stride = 2 ** exponents[0], 2 ** exponents[1]
    span = ranks * stride
    if cluster.size % span:
        return
    firsts = [first for first in range(cluster.size) if first % span < stride]
    groups = [range(first, first + span, stride) for first in firsts]
    assert group_shape(cluster, ranks, stride) == worst_shape(cluster, groups)
    pairs = [pair for group in groups for pair in pairwise(group)]
    assert neighbour_shape(cluster, ranks, stride) == worst_shape(cluster, pairs)
    far = [(rank, rank + span) for rank in range(cluster.size - span)]
    assert ends_shape(cluster, span) == worst_shape(cluster, far)


@pytest.mark.parametrize("names", [("a100", "v100-32gb-sxm"), ("v100-32gb-sxm", "a100")])
def test_a_group_over_unlike_nodes_has_the_narrowest_link_of_all_its_ranks(
    names: tuple[str, str],
) -> None:
    """NVLink of 300 GB/s in one node, of 150 GB/s in the other, whichever comes first."""
    nodes = "".join(f'[[nodes]]\ndevice = "{name}"\ndevices = 4\n' for name in names)
    unlike = file(f'{nodes}[network]\nlike = "infiniband-hdr"\n')
    slow = choose_cluster(4, "v100-32gb-sxm")
    inside = group_shape(unlike, 8, 1).crossings[0]
    assert inside.bytes_per_second == group_shape(slow, 4, 1).crossings[0].bytes_per_second
