"""The time that bytes of a collective take on the links: one function per algorithm.

Words: `payload_bytes` is the size as nccl-tests counts it: of the tensor for all-reduce
and broadcast, of the gathered result for all-gather, of the whole input of one rank for
reduce-scatter and all-to-all, of the message for point to point. `rate` is bytes per second, one
direction, of one rank (or of the narrowest cut of a ring). Formulas call these S and β, and the
number of ranks n. There are at least two ranks. The latencies are added in choice.py.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from autopar.planner.cluster.cluster import Backend, Collective
from autopar.planner.cluster.toml_reading import in_plain_units, shipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A transport protocol, which trades latency for bandwidth."""

    name: str
    base_seconds: float  # of one call
    hop_factor: float  # multiplies the link's latency per hop
    fraction: float  # fraction of the link's rate for long transfers
    crosses_networks: bool
    hop_seconds: float = 0.0  # added per hop
    scatters_whole: bool = False  # a reduce-scatter sends as much as an all-reduce
    rings_only: bool = False  # no trees
    # in a gather or an all-to-all, a rank sends its message to a peer before it asks for the peer's
    # message, on the same connection
    asks_last: bool = False

    @property
    def hands_on_chunks(self) -> bool:
        """Whether receivers wait for whole chunks; only then is the link's full rate reached."""
        return self.fraction == 1

    def hop(self, alpha_seconds: float) -> float:
        """Return the latency of one hop over a link."""
        return self.hop_factor * alpha_seconds + self.hop_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConstants:
    """The constants of protocols.toml."""

    nccl: tuple[Protocol, ...]
    gloo: tuple[Protocol, ...]
    tree_fraction: float
    tree_hop_factor: float
    tree_chunk_seconds: float
    chunk_ramp_seconds: float
    in_switch_seconds: float
    point_to_point_fraction: float
    all_to_all_fraction: float

    def tree_hop(self, protocol: Protocol, alpha_seconds: float) -> float:
        """Return the latency of one hop of a tree between nodes."""
        chunk_seconds = self.tree_chunk_seconds if protocol.hands_on_chunks else 0.0
        return self.tree_hop_factor * protocol.hop(alpha_seconds) + chunk_seconds

    def all_to_all_share(self, protocol: Protocol) -> float:
        """Return the share of a link's rate that an all-to-all reaches.

        If ranks send before they ask (`asks_last`), the later rank of a pair sends at once, because
        the earlier one has asked already. Its own request waits behind its data. So the messages of
        a pair follow each other, and the last rank of all sends everything before it receives
        anything: 1 ÷ 2. Leaves out ranks that come at the same time, and pairs that share a link,
        which may use both of its directions.
        """
        return protocol.fraction * (0.5 if protocol.asks_last else self.all_to_all_fraction)

    def ring_share(self, protocol: Protocol, collective: Collective, ranks: int) -> float:
        """Return the share of a link's rate that a ring reaches.

        If ranks send before they ask, an all-gather of two ranks waits as an all-to-all does. But
        each sends two halves, and the first half of the earlier rank is sent at the same time as
        the second half of the later one. So they take the time of 3 halves, not of 2: 2 ÷ 3. More
        than two ranks do not wait: each sends to one neighbour, and asks the other one.
        """
        waits = protocol.asks_last and collective is Collective.ALL_GATHER and ranks == 2
        return protocol.fraction * (2 / 3 if waits else 1)

    def protocols(self, backend: Backend) -> tuple[Protocol, ...]:
        """Return the protocols that a library chooses from."""
        return self.gloo if backend.is_on_cpu else self.nccl


@cache
def read_collective_constants() -> CollectiveConstants:
    """Return the constants that autopar ships."""
    table = shipped("costs.collectives", "protocols.toml")
    return CollectiveConstants(
        nccl=_protocols(table["nccl"]),
        gloo=_protocols(table["gloo"]),
        **in_plain_units(table["algorithm"]),
    )


def _protocols(tables: dict[str, dict[str, Any]]) -> tuple[Protocol, ...]:
    return tuple(Protocol(name=name, **in_plain_units(row)) for name, row in tables.items())


def ring_all_reduce_seconds(payload_bytes: float, ranks: int, *, rate: float) -> float:
    """Return the time of a ring all-reduce: a reduce-scatter round, then an all-gather round.

    W = 2·(n−1)/n · S/β. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    Two rings that run against each other have half of the payload each. Leaves out the time to add,
    and ranks that arrive late.
    """
    return 2 * (ranks - 1) / ranks * payload_bytes / rate


def ring_all_gather_seconds(payload_bytes: float, ranks: int, *, rate: float) -> float:
    """Return the time of a ring all-gather, and of a ring reduce-scatter, its reverse.

    W = (n−1)/n · S/β. Source as for the all-reduce. Leaves out the sums of a reduce-scatter.
    """
    return (ranks - 1) / ranks * payload_bytes / rate


def tree_depth(units: int) -> int:
    """Return the number of hops from leaf to root of a balanced binary tree: ⌈log2 units⌉."""
    return math.ceil(math.log2(units)) if units > 1 else 0


def tree_all_reduce_seconds(payload_bytes: float, *, rate: float, units: int) -> float:
    """Return the time of an all-reduce on two binary trees: sums go up, results come down.

    Each tree takes half of the payload.

    W = c·S/β: every rank is an inner node of one tree and a leaf of the other, so it sends 2·S in
    all: c = 2, and c = 1 for two units, which swap their halves. `units` is the number of groups
    (such as nodes) that the trees join at this rate. Source: Sanders, Speck, Träff, Two-tree
    algorithms (2009). Leaves out filling the pipeline of chunks.
    """
    return (1 if units == 2 else 2) * payload_bytes / rate


def in_switch_all_reduce_seconds(payload_bytes: float, ranks: int, *, rate: float) -> float:
    """Return the time of an all-reduce in a switch that sums and multicasts.

    W = (1 + 1/n)·S/β. The switch sums: each rank sends it all of its S, and fetches the sum of one
    n-th part. Then each rank sends this sum, S/n, to the switch, which multicasts it. On 5 to 8
    H200 the implied rate is constant within 2 %, on 6 to 8 B200 within 1 %. Leaves out the
    registration of buffers.
    """
    return (1 + 1 / ranks) * payload_bytes / rate


def all_to_all_seconds(
    payload_bytes: float, ranks: int, *, peers_outside: int, rate: float
) -> float:
    """Return the time of an all-to-all if each pair has its own path, and one cut is the limit.

    W = k/n · S/β: a rank sends k of its n pieces across the cut at rate β per rank. Leaves out
    congestion inside the switch.
    """
    return peers_outside / ranks * payload_bytes / rate


def ring_all_to_all_seconds(payload_bytes: float, ranks: int, *, rate: float) -> float:
    """Return the time of an all-to-all on a one-way ring: a piece crosses d links to go d ranks on.

    W = Σ_{d<n} d·S/n ÷ β = (n−1)/2 · S/β. Leaves out idle links at the start.
    """
    return (ranks - 1) / 2 * payload_bytes / rate


def double_ring_all_to_all_seconds(payload_bytes: float, ranks: int, *, rate: float) -> float:
    """Return the time of an all-to-all on a two-way ring: each piece takes the shorter way.

    W = S/n · Σ_{d<n} min(d, n−d) ÷ (2β), where the sum is ⌊n²/4⌋. Leaves out idle links at the
    start.
    """
    return (ranks * ranks // 4) * payload_bytes / ranks / (2 * rate)
