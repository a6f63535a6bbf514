"""Tests of the orders in which unlike nodes are tried."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, permutations
from math import factorial

import pytest

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.cluster.shape import MOST_ORDERS, node_orders

NAMES = ("h100-sxm", "a100-80gb-sxm", "v100-32gb-sxm", "a10", "t4")
NETWORK = '[network]\nlike = "infiniband-hdr"\n'
RACKS = '[racks]\nnodes_per_rack = 2\nbandwidth = "10 GB/s"\nlatency = "9 us"\n'


def unlike(*names: str, racks: str = "") -> Cluster:
    """A cluster of nodes with two devices each."""
    nodes = "".join(f'[[nodes]]\ndevice = "{name}"\ndevices = 2\n' for name in names)
    return parse_cluster(nodes + NETWORK + racks, where="test")


def names_of(cluster: Cluster) -> tuple[str, ...]:
    return tuple(node.device.name for node in cluster.nodes)


def test_equal_nodes_stay_as_they_are() -> None:
    cluster = choose_cluster(16, "h100-sxm")
    assert node_orders(cluster) == (cluster,)


@pytest.mark.parametrize("racks", ["", RACKS])
def test_few_nodes_are_put_in_every_order(racks: str) -> None:
    few = unlike("a100-80gb-sxm", "h100-sxm", "h100-sxm", racks=racks)
    orders = node_orders(few)
    assert {names_of(one) for one in orders} == set(permutations(names_of(few)))
    assert len(orders) == 3
    written = {names: unlike(*names, racks=racks) for names in (names_of(one) for one in orders)}
    assert all(written[names_of(one)] == one for one in orders)  # as if the file had said so


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_a_file_changes_nothing(seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.sample(NAMES, chance.choice((2, 3)))
    nodes = [chance.choice(kinds) for _ in range(chance.choice((3, 4, 7)))]
    shuffled = chance.sample(nodes, len(nodes))
    assert node_orders(unlike(*nodes)) == node_orders(unlike(*shuffled))


@pytest.mark.parametrize(("kinds", "orders"), [(2, 2), (3, 6), (4, 24), (5, 2)])
def test_many_nodes_stay_beside_their_like(kinds: int, orders: int) -> None:
    many = [name for name in NAMES[:kinds] for _ in range(5)]
    assert factorial(len(many)) > MOST_ORDERS
    found = node_orders(unlike(*many))
    assert len(set(found)) == len(found) == orders
    for one in found:
        names = names_of(one)
        assert Counter(names) == Counter(many)
        assert sum(a != b for a, b in pairwise(names)) == kinds - 1
