"""Tests of cluster files."""

import re
from pathlib import Path

import pytest

from autopar.planner.cluster.cluster import Topology, content_hash
from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.errors import ExitCode, InputError

TWO_NODES = '[[nodes]]\ncount = 2\ndevice = "a100-80gb-sxm"\ndevices = 8\n'
NETWORK = (
    '[network]\nbandwidth = "200 Gb/s"\ncards_per_node = 4\nlatency = "5 us"\nefficiency = 0.95\n'
)
DOCS = Path(__file__).parents[3] / "docs" / "cluster-file.md"


def test_the_example_of_the_docs_is_a_cluster() -> None:
    example = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    cluster = parse_cluster(example[1], where="docs")
    assert cluster.size == 20
    assert [level.name for level in cluster.levels] == ["node", "network", "rack"]
    assert cluster.nodes[2].device.memory_bytes == 20 * 2**30
    assert cluster.nodes[2].device.architecture == "Ampere"
    assert cluster.nodes[2].link.topology is Topology.DOUBLE_RING


def test_a_file_may_say_what_the_options_say() -> None:
    text = TWO_NODES + '[network]\nlike = "infiniband-hdr"\n'
    assert content_hash(parse_cluster(text, where="x")) == content_hash(
        choose_cluster(16, "a100", 2)
    )


def test_cards_of_a_node_are_shared_by_its_devices() -> None:
    cluster = parse_cluster(TWO_NODES + NETWORK, where="x")
    assert cluster.levels[-1].units[0].link.ports_per_device == 0.5


def test_bridges_join_pairs() -> None:
    cluster = parse_cluster(
        '[[nodes]]\ndevice = "rtx-3090"\ndevices = 4\nbridged = true', where="x"
    )
    assert [(level.name, len(level.units)) for level in cluster.levels] == [
        ("pair", 2),
        ("node", 1),
    ]


BAD = {
    "an unknown key": (TWO_NODES + "colour = 1", "unknown key 'colour'", "line 5"),
    "a slip of the pen": (
        TWO_NODES.replace("devices", "devcies"),
        "did you mean 'devices'",
        "line 4",
    ),
    "an unknown section": (TWO_NODES + "[netwrok]", "did you mean 'network'", "line 5"),
    "a duplicate key": (TWO_NODES + "count = 3", "not a valid TOML file", "x"),
    "nodes without a network": (TWO_NODES, "no network", "x"),
    "no nodes": (NETWORK, "no nodes", "x"),
    "an empty file": ("", "no nodes", "x"),
    "zero nodes": (TWO_NODES.replace("count = 2", "count = 0"), "0 is not a count", "line 2"),
    "a negative number": (TWO_NODES.replace("= 8", "= -8"), "-8 is not a count", "line 4"),
    "half a device": (TWO_NODES.replace("= 8", "= 8.5"), "8.5 is not a count", "line 4"),
    "too many devices": (TWO_NODES.replace("= 8", "= 1000000000"), "devices", "nodes 1"),
    "an unknown device": (TWO_NODES.replace("a100", "a1000"), "not known", "line 3"),
    "no unit": (TWO_NODES + NETWORK.replace('"200 Gb/s"', "200"), "no unit", "line 6"),
    "no rate": (TWO_NODES + NETWORK.replace("200 Gb", "0 Gb"), "not a positive", "line 6"),
    "infinite rate": (TWO_NODES + NETWORK.replace("200 Gb", "inf Gb"), "not a positive", "line 6"),
    "a share above 1": (TWO_NODES + NETWORK.replace("0.95", "1.5"), "more than 1", "line 9"),
    "no latency": (
        TWO_NODES + NETWORK.replace('latency = "5 us"\n', ""),
        "'latency' is missing",
        "line 5",
    ),
    "an unknown topology": (
        TWO_NODES + NETWORK + 'topology = "star"',
        "'star' is not known",
        "line 10",
    ),
    "a backend of the network's own": (
        TWO_NODES + NETWORK + 'backend = "gloo"',
        "unknown key 'backend'",
        "line 10",
    ),
    "a section of the wrong kind": ("nodes = 3", "no nodes", "x"),
    "no bridge": (TWO_NODES + "bridged = true", "bridge", "line 5"),
    "an incomplete device": (
        '[[nodes]]\ndevice = "own"\n[devices.own]\nmemory = "1 GiB"',
        "'architecture' is missing",
        "line 3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_clear_message_with_its_place(name: str) -> None:
    text, found, place = BAD[name]
    with pytest.raises(InputError, match=re.escape(found)) as caught:
        parse_cluster(text, where="x")
    assert caught.value.exit_code is ExitCode.USAGE
    assert place in caught.value.where
