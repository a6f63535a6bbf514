"""Turns a cluster into runs of equal nodes and units for a JSON file, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, groupby, repeat

from autopar.planner.cluster.cluster import Cluster, Level, Node, Origin, Unit
from autopar.planner.numbers import MOST_DEVICES, Degree


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """So many equal nodes in a row."""

    count: Degree
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """So many equal units of a level in a row."""

    count: Degree
    unit: Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDocument:
    """One level of the hierarchy."""

    name: str
    units: tuple[UnitRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDocument:
    """A cluster as it lies in a file: a thousand equal nodes take the room of one."""

    nodes: tuple[NodeRun, ...]
    levels: tuple[LevelDocument, ...]
    origin: Origin


def cluster_document(cluster: Cluster) -> ClusterDocument:
    """Return a cluster as it lies in a file."""
    return ClusterDocument(
        nodes=tuple(
            NodeRun(count=len(list(run)), node=node) for node, run in groupby(cluster.nodes)
        ),
        levels=tuple(
            LevelDocument(name=level.name, units=_unit_runs(level.units))
            for level in cluster.levels
        ),
        origin=cluster.origin,
    )


def _unit_runs(units: Iterable[Unit]) -> tuple[UnitRun, ...]:
    return tuple(UnitRun(count=len(list(run)), unit=unit) for unit, run in groupby(units))


def cluster_of(document: ClusterDocument) -> Cluster:
    """Return the cluster that a document holds; ValueError where there is none such."""
    size = sum(run.count * run.node.devices for run in document.nodes)
    if not 1 <= size <= MOST_DEVICES:  # before each node is one object
        raise ValueError(f"cluster.nodes: {size} devices, expected 1 to {MOST_DEVICES}")
    for number, level in enumerate(document.levels):
        ranks = sum(run.count * run.unit.ranks for run in level.units)
        if ranks != size:
            raise ValueError(f"cluster.levels.{number}: {ranks} ranks for {size} devices")
    return Cluster(
        nodes=tuple(chain.from_iterable(repeat(run.node, run.count) for run in document.nodes)),
        levels=tuple(
            Level(
                name=level.name,
                units=tuple(
                    chain.from_iterable(repeat(run.unit, run.count) for run in level.units)
                ),
            )
            for level in document.levels
        ),
        origin=document.origin,
    )
