"""What joins devices: one kind of link with its shape, latency and rate."""

from dataclasses import dataclass
from enum import StrEnum

from autopar.planner.numbers import Bytes, Degree, Figure, Rate, Seconds, Share


class Topology(StrEnum):
    """How the units of one level are wired together."""

    RING = "ring"  # every unit reaches its two neighbours, traffic runs one way round
    DOUBLE_RING = "double-ring"  # both ways round at once
    TREE = "tree"  # leaves under switches that pass messages on
    MESH = "mesh"  # a link of its own to every other unit; the rate is the sum of those links
    SWITCH = "switch"  # every unit reaches every other at its full rate


class Backend(StrEnum):
    """The library that runs the collectives; RCCL keeps NCCL's protocols."""

    NCCL = "nccl"
    GLOO = "gloo"


class Collective(StrEnum):
    """What a group of ranks does together; costs/collectives says which size is the payload."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point-to-point"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One collective over a link as `autopar profile` measured it, and the line fitted to that."""

    collective: Collective
    ranks: Degree
    alpha_seconds: Seconds  # of one hop
    bytes_per_second: Rate
    points: tuple[tuple[Bytes, Seconds], ...]  # payload bytes, seconds; both rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link; half a port per device means that two devices share one."""

    name: str
    topology: Topology
    bytes_per_second: Rate  # of one port in one direction, as the data sheet says
    alpha_seconds: Seconds  # of one hop of the smallest message
    efficiency: Share  # share of the rate that long transfers reach
    ports_per_device: Figure = 1.0
    reduction_efficiency: Share = 0.0  # share reached when the switch itself sums; 0: it cannot
    backend: Backend = Backend.NCCL
    collectives: tuple[MeasuredCollective, ...] = ()  # where they were measured
