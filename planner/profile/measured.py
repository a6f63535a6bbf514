"""What profiles found, ready to stand in for formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from annotated_types import Ge

from autopar.planner.cluster.cluster import Cluster, Level, Node
from autopar.planner.cluster.link import Backend, Link, MeasuredCollective, Topology
from autopar.planner.costs.ops.measurements import HostTimes, OpKey, Timing
from autopar.planner.errors import InputError
from autopar.planner.numbers import Degree, Rate, SomeSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """The median of one op on one device under one version of torch."""

    torch: str
    samples: Annotated[int, Ge(1)]
    timing: Timing
    key: OpKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHost:
    """What the host of a device adds, with the threads that torch computed with."""

    device: str
    threads: Degree
    torch: str
    times: HostTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNet:
    """The link among the devices of one machine, as these ranks found it."""

    device: str
    backend: Backend
    ranks: Annotated[Degree, Ge(2)]
    torch: str
    alpha_seconds: SomeSeconds  # of one hop, fitted to all collectives together
    bytes_per_second: Rate
    collectives: tuple[MeasuredCollective, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """The content of a measured.toml; figures of the latest torch version stand in for older."""

    hosts: tuple[MeasuredHost, ...] = ()
    nets: tuple[MeasuredNet, ...] = ()
    ops: tuple[MeasuredOp, ...] = ()

    def seconds(self, key: OpKey) -> Timing | None:
        """Return the timing of an op, None where it was not measured."""
        return self._timings.get(key)

    def host(self, device: str) -> HostTimes | None:
        """Return what the host of a device adds, None where it was not measured."""
        return self._hosts.get(device)

    def on(self, cluster: Cluster) -> Cluster:
        """Return a cluster whose devices are joined by the links that were measured."""
        nets = {net.device: net for net in self.nets}
        changed = {
            node.link: _link(node, nets[node.device.name])
            for node in cluster.nodes
            if node.device.name in nets
        }
        if not changed:
            return cluster
        return replace(
            cluster,
            nodes=tuple(_joined(node, changed) for node in cluster.nodes),
            levels=tuple(_relinked(level, changed) for level in cluster.levels),
        )

    def merged(self, newer: MeasuredFile) -> MeasuredFile:
        """Return both together; where they measured the same, the newer counts."""
        for host in newer.hosts:
            self._check_threads(host)
        ops = {(one.key, one.torch): one for one in (*self.ops, *newer.ops)}
        hosts = {(one.device, one.torch): one for one in (*self.hosts, *newer.hosts)}
        nets = {one.device: one for one in (*self.nets, *newer.nets)}
        return MeasuredFile(
            ops=tuple(ops.values()), hosts=tuple(hosts.values()), nets=tuple(nets.values())
        )

    def _check_threads(self, newer: MeasuredHost) -> None:
        for host in self.hosts:
            if host.device == newer.device and host.threads != newer.threads:
                raise InputError(
                    f"{host.device} was measured with {host.threads} threads before, "
                    f"with {newer.threads} now",
                    fix="set OMP_NUM_THREADS as before, or write to another file with -o",
                )

    @cached_property
    def _timings(self) -> Mapping[OpKey, Timing]:
        return {
            one.key: one.timing for one in sorted(self.ops, key=lambda one: _version(one.torch))
        }

    @cached_property
    def _hosts(self) -> Mapping[str, HostTimes]:
        ordered = sorted(self.hosts, key=lambda one: _version(one.torch))
        return {one.device: one.times for one in ordered}


def _version(text: str) -> tuple[int, ...]:
    """Return what orders versions: "2.13.0+cpu" is (2, 13, 0)."""
    plain = text.partition("+")[0]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in plain.split("."))


def _link(node: Node, net: MeasuredNet) -> Link:
    """Return the node's link with measured figures: what was measured is reached in full."""
    return Link(
        name=f"{node.link.name} as measured",
        topology=Topology.SWITCH if net.backend is Backend.GLOO else node.link.topology,
        bytes_per_second=net.bytes_per_second,
        alpha_seconds=net.alpha_seconds,
        efficiency=1.0,
        ports_per_device=node.link.ports_per_device,
        backend=net.backend,
        collectives=net.collectives,
    )


def _joined(node: Node, changed: Mapping[Link, Link]) -> Node:
    return replace(node, link=changed.get(node.link, node.link))


def _relinked(level: Level, changed: Mapping[Link, Link]) -> Level:
    units = tuple(replace(unit, link=changed.get(unit.link, unit.link)) for unit in level.units)
    return replace(level, units=units)
