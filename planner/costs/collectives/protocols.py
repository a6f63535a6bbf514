"""Reads collectives.toml: what the collectives library adds to the latency and rate of links."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from autopar.planner.cluster.link import Backend
from autopar.planner.cluster.reading import figure, flag, number
from autopar.planner.cluster.units import parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way of handing bytes over: quick or wide."""

    name: str
    base_seconds: float  # of one call
    hop_factor: float  # latencies of the link per hop
    hop_seconds: float  # added per hop
    fraction: float  # of the link's long-transfer rate
    crosses_networks: bool

    @property
    def hands_on_chunks(self) -> bool:
        """Say whether receivers wait for whole chunks, which alone reaches the link's full rate."""
        return self.fraction == 1

    def hop(self, alpha_seconds: float) -> float:
        """Return the latency of one hop over a link."""
        return self.hop_factor * alpha_seconds + self.hop_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConstants:
    """Everything that collectives.toml holds."""

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

    def protocols(self, backend: Backend) -> tuple[Protocol, ...]:
        """Return the protocols that a library chooses from."""
        return self.gloo if backend is Backend.GLOO else self.nccl


@cache
def without_latency(
    protocol: Protocol, constants: CollectiveConstants
) -> tuple[Protocol, CollectiveConstants]:
    """Return both as they would be on links where every hop is instant."""
    return (
        replace(protocol, base_seconds=0.0, hop_factor=0.0, hop_seconds=0.0),
        replace(constants, tree_chunk_seconds=0.0, in_switch_seconds=0.0),
    )


@cache
def read_collective_constants() -> CollectiveConstants:
    """Return the constants that are shipped with autopar."""
    source = resources.files("autopar.planner.costs.collectives").joinpath("protocols.toml")
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    rates = table["algorithm"]
    return CollectiveConstants(
        nccl=_protocols(table["protocol"]),
        gloo=_protocols(table["gloo"]),
        tree_fraction=rates["tree_fraction"],
        tree_hop_factor=rates["tree_hop_factor"],
        chunk_ramp_seconds=parse_seconds(rates["chunk_ramp_seconds"], where="algorithm"),
        tree_chunk_seconds=parse_seconds(rates["tree_chunk_seconds"], where="algorithm"),
        in_switch_seconds=parse_seconds(rates["in_switch_seconds"], where="algorithm"),
        point_to_point_fraction=rates["point_to_point_fraction"],
        all_to_all_fraction=rates["all_to_all_fraction"],
    )


def _protocols(tables: dict[str, dict[str, object]]) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(
            name=name,
            base_seconds=figure(table, "base", parse_seconds, where=name),
            hop_factor=number(table, "hop_factor", where=name),
            hop_seconds=figure(table, "hop", parse_seconds, where=name, default=0.0),
            fraction=number(table, "fraction", where=name),
            crosses_networks=flag(table, "crosses_networks", where=name),
        )
        for name, table in tables.items()
    )
