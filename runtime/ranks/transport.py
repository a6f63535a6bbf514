"""Moves tensors between the ranks of an axis, and into the host's memory, outside autograd.

Also makes groups of neighbours, and checks that ranks read the same rows.

Layers use torch's functional collectives, which `torch.compile` supports. Buckets are reduced in
place, asynchronously.

Each pair of neighbours on the pipeline axis gets its own process group. nccl runs the messages of a
group in order, on one stream, so in a shared group a late neighbour would block messages to all
others. torch's schedules with several stages per rank require that messages of two pairs do not
wait for each other.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis, Mesh

_functional: Any = torch.ops._c10d_functional
# torch 2.13 renamed both functions; the old names raise a warning there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of every rank's tensor, on every rank."""
    if axis.size == 1:
        return x
    total = _functional.all_reduce(near(x, axis).contiguous(), "sum", _name(axis))
    return _waited(total).to(x.device)


def near(x: Tensor, axis: Axis) -> Tensor:
    """Return a tensor; one on the host that nccl has to send is copied to the GPU."""
    is_far = not x.is_cuda and axis.size > 1 and dist.get_backend(axis.group) == "nccl"
    return x.cuda() if is_far else x


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return every rank's tensor, all of one shape, stacked in the order of the ranks."""
    flat = x.contiguous().view(-1)
    every = _waited(_functional.all_gather_into_tensor(flat, axis.size, _name(axis)))
    return every.view(axis.size, *x.shape)


def joined_along_first(x: Tensor, axis: Axis) -> Tensor:
    """Return every rank's tensor, all of one shape, concatenated along dim 0."""
    name = _name(axis)
    return _waited(_functional.all_gather_into_tensor(x.contiguous(), axis.size, name))


def sum_scattered(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of dim 0, summed over all ranks."""
    name = _name(axis)
    return _waited(_functional.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, name))


def exchanged(stack: Tensor, axis: Axis) -> Tensor:
    """Send slice r of dim 0 to rank r, and stack the received slices in the order of the ranks."""
    sizes = [1] * axis.size
    return _waited(_functional.all_to_all_single(stack.contiguous(), sizes, sizes, _name(axis)))


def exchanged_pieces(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis
) -> list[Tensor]:
    """Send piece r to rank r, and return the received pieces; the one from rank r has shapes[r]."""
    sizes = [math.prod(shape) for shape in shapes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    lengths = [piece.numel() for piece in pieces]
    received = _waited(_functional.all_to_all_single(sent, sizes, lengths, _name(axis)))
    flat = torch.split(received, sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


class _UpdatedTensor:
    """A tensor of this rank that a collective is updating in place."""

    def __init__(self, own: Tensor) -> None:
        self._own = own
        self._work: dist.Work | None = None

    def value(self) -> Tensor:
        """Return the tensor; the first call waits for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._own


class ComingSum(_UpdatedTensor):
    """A tensor that is being replaced by the sum or mean over all ranks."""

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        super().__init__(x)
        self._sent = near(x, axis)
        if axis.size > 1:
            self._work = dist.all_reduce(self._sent, op=operation, group=axis.group, async_op=True)

    def value(self) -> Tensor:
        """Return the tensor; the first call waits for it."""
        own = super().value()
        if self._sent is not own:
            self._sent = own.copy_(self._sent)
        return own


class ComingPart(_UpdatedTensor):
    """This rank's part of a flat tensor, being replaced by the sum or mean over all ranks."""

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        super().__init__(x.view(axis.size, -1)[axis.rank])
        if axis.size > 1:
            self._work = _reduce_scatter(
                self._own, x, op=operation, group=axis.group, async_op=True
            )


def started_gather(flat: Tensor, axis: Axis) -> dist.Work | None:
    """Start an in-place all-gather of a flat tensor from every rank's part."""
    part = flat.view(axis.size, -1)[axis.rank]
    work: dist.Work | None = _all_gather(flat, part, group=axis.group, async_op=True)
    return work


_MOST_COPIES = 2  # under way to the host at once: until then each takes memory of the device
_MOST_ADDED = 2**23  # elements added to a sum at once: so many exist twice on the host


class HostLink:
    """Copies tensors into the host's memory and back, on streams beside the one that computes.

    On a CPU both memories are the host's, and a copy is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # of each copy under way: the event at its end, and what to call then
        self._copies: deque[tuple[Any, Callable[[], object]]] = deque()

    @cached_property
    def _stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @cached_property
    def _back(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def is_apart(self) -> bool:
        """Whether the device has a memory of its own."""
        return self._device.type == "cuda"

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate pinned memory of the host, which the device reads and writes directly."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self.is_apart)

    def send(self, part: Tensor, home: Tensor, then: Callable[[], object] = bool) -> None:
        """Start to copy a part to `home`; the caller may free the part at once.

        Waits while too many copies are under way. Once the copy has ended, a later `send` or `wait`
        calls `then`.
        """
        if not self.is_apart:
            home.copy_(part)
            then()
            return
        if len(self._copies) == _MOST_COPIES:
            self._await_first()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            home.copy_(part, non_blocking=True)
            self._copies.append((self._stream.record_event(), then))
        part.record_stream(self._stream)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy a tensor after all work that the device has been given so far.

        The caller must keep both tensors unchanged until the copy ends (see `mark` and `join`).
        """
        if not self.is_apart:
            target.copy_(source)
            return
        stream = self._stream if source.is_cuda else self._back
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def mark(self, *, comes_back: bool) -> Any:
        """Return an event at the end of all copies so far, to the host or back; None on a CPU."""
        if not self.is_apart:
            return None
        return (self._back if comes_back else self._stream).record_event()

    def join(self, end: Any) -> None:
        """Make the device wait for an event of `mark` before it computes anything more."""
        if end is not None:
            torch.cuda.current_stream(self._device).wait_event(end)

    def wait(self) -> None:
        """Wait for all copies that were sent."""
        while self._copies:
            self._await_first()

    def _await_first(self) -> None:
        arrived, then = self._copies.popleft()
        arrived.synchronize()
        then()


class HostPart:
    """A rank's part of a bucket's gradients, summed on the host over a step's backwards."""

    def __init__(self, link: HostLink, elements: int, dtype: torch.dtype) -> None:
        self.memory = link.empty(elements, dtype)
        self._link = link
        self._is_begun = False  # in this step

    def take(self, part: Tensor) -> None:
        """Copy the first part of a step into `memory`, and add later parts of the step to it."""
        if not self._is_begun:
            self._is_begun = True
            self._link.send(part, self.memory)
            return
        sums, arrived = torch.split(self.memory, _MOST_ADDED), torch.split(part, _MOST_ADDED)
        for own, more in zip(sums, arrived, strict=True):
            arriving = self._link.empty(more.numel(), more.dtype)
            self._link.send(more, arriving, partial(own.add_, arriving))

    def value(self) -> Tensor:
        """Wait for all parts, and return their sum."""
        self._link.wait()
        return self.memory

    def forget(self) -> None:
        """Let the next part begin a new sum."""
        self._is_begun = False


def _waited(coming: Any) -> Tensor:
    arrived: Tensor = _functional.wait_tensor(coming)
    return arrived


def _name(axis: Axis) -> str:
    assert axis.group is not None, "an axis of one rank moves nothing"
    return axis.group.group_name


_DESCRIBED = "mesh_pipeline"  # torch's description of the pipeline axis's group in its records


class Pairs(Enum):
    """Which pairs of pipeline ranks have their own process group."""

    NONE = "none: all messages travel in the group of the axis"
    LINE = "each rank and the next"
    RING = "the last rank and the first, too"


def neighbour_groups(mesh: Mesh, kind: Pairs) -> Mapping[int, dist.ProcessGroup]:
    """Return this rank's groups with its neighbours, by the neighbour's pipeline rank.

    An axis of two ranks is itself such a group. All ranks of the world create these groups
    together, in the same order.
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
    """Return all pairs of neighbours, in lists of disjoint pairs."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)]
    apart = [pairs[::2], pairs[1::2]]
    if is_ring and size % 2:
        apart.append([(0, size - 1)])
    elif is_ring:
        apart[1].append((0, size - 1))
    return apart


def _on_each_column(pairs: Sequence[tuple[int, int]], mesh: Mesh) -> list[list[int]]:
    """Return the world ranks of the pairs, for all positions on the other axes."""
    columns = mesh.world.size // mesh.pipeline.size
    return [
        [pipeline * columns + column for pipeline in pair]
        for pair in pairs
        for column in range(columns)
    ]


def _group_of_this_rank(
    groups: Sequence[list[int]], timeout: timedelta, described: str = _DESCRIBED
) -> dist.ProcessGroup | None:
    """Create disjoint groups, and return this rank's group, or None.

    nccl splits all of them off the world's communicator in one call.
    """
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        return dist.split_group(split_ranks=list(groups), timeout=timeout, group_desc=described)
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(ranks, timeout=timeout, group_desc=described)
        if dist.get_rank() in ranks:
            own = made
    return own


def replicas_apart(mesh: Mesh) -> Axis:
    """Return the replica axis with its own process groups, whose messages wait for no others."""
    if mesh.replica.size == 1:
        return mesh.replica
    copies, width = mesh.replica.size, mesh.shard.size * mesh.tensor.size  # of a replica's stage
    firsts = [
        stage * copies * width + rank
        for stage in range(mesh.pipeline.size)
        for rank in range(width)
    ]
    groups = [[first + width * replica for replica in range(copies)] for first in firsts]
    group = _group_of_this_rank(groups, mesh.message_timeout, "mesh_replica")
    return replace(mesh.replica, group=group)


def every_rank(value: Any, axis: Axis) -> list[Any]:
    """Gather every rank's value on all ranks of an axis. Equal values become one object."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, pickle.dumps(value), group=axis.group)
    read = {one: pickle.loads(one) for one in set(found)}
    return [read[one] for one in found]


def differing(numbers: Sequence[int], axis: Axis, mesh: Mesh) -> dict[int, int]:
    """Return, by index, the first rank of an axis whose number there differs from rank 0's.

    All ranks give equally many numbers. A dry run has one process, and so no differences.
    """
    if axis.size == 1 or mesh.is_dry_run:
        return {}
    every = gathered(torch.tensor(numbers, device=mesh.device), axis).T.tolist()
    found = enumerate(next((r for r, x in enumerate(one) if x != one[0]), 0) for one in every)
    return {index: rank for index, rank in found if rank}
