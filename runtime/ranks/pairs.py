"""Gives each two neighbours on the pipeline axis a group of their own.

nccl runs what a group is told in turn, on one stream: a message to a neighbour that is late would
hold up those to all others of the axis. torch's schedules of several stages per rank count on it
that messages of two pairs do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum

import torch.distributed as dist

from autopar.runtime.ranks.mesh import Mesh

_DESCRIBED = "mesh_pipeline"  # as torch describes the group of the axis, in what it records


class Pairs(Enum):
    """Which pipeline ranks have a group of two."""

    NONE = "none: all messages travel in the group of the axis"
    LINE = "each rank and the next"
    RING = "the last rank and the first, too"


def neighbour_groups(mesh: Mesh, kind: Pairs) -> Mapping[int, dist.ProcessGroup]:
    """Return the groups of this rank and each of its neighbours, by the neighbour's pipeline rank.

    The group of an axis of two ranks is one of two already. All ranks of the world make these
    groups together, in one order.
    """
    axis = mesh.pipeline
    if axis.size <= 2 or kind is Pairs.NONE:
        return {}
    found = {}
    for pairs in _pairs_apart(axis.size, is_ring=kind is Pairs.RING):
        group = _group_of_this_rank(_on_each_column(pairs, mesh), mesh.message_timeout)
        if group is not None:
            (pair,) = (one for one in pairs if axis.rank in one)
            found[sum(pair) - axis.rank] = group
    return found


def _pairs_apart(size: int, *, is_ring: bool) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours, in lists of pairs that have no rank in common."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)]
    apart = [pairs[::2], pairs[1::2]]
    if is_ring and size % 2:
        apart.append([(0, size - 1)])
    elif is_ring:
        apart[1].append((0, size - 1))
    return apart


def _on_each_column(pairs: Sequence[tuple[int, int]], mesh: Mesh) -> list[list[int]]:
    """Return the ranks of the pairs in the world, for all places on the other axes."""
    columns = mesh.world_size // mesh.pipeline.size
    return [
        [pipeline * columns + column for pipeline in pair]
        for pair in pairs
        for column in range(columns)
    ]


def _group_of_this_rank(
    groups: Sequence[list[int]], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Make groups that have no rank in common; return the one of this rank, if there is one.

    nccl makes all of them in one go, out of the communicator of the world.
    """
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        return dist.split_group(split_ranks=list(groups), timeout=timeout, group_desc=_DESCRIBED)
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(ranks, timeout=timeout, group_desc=_DESCRIBED)
        if dist.get_rank() in ranks:
            own = made
    return own
