"""Averages replicas after their local steps, and applies an outer optimizer to the mean change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from autopar.runtime.optimizer.pieces import pieces_of, spread_values, value_of
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import ComingSum, HostLink, every_rank, replicas_apart, summed
from autopar.runtime.tensor.shards import chunks_of, group_aliases, places, whole_names

__all__ = ["OuterOptimizer"]  # for scripts

MOMENTUM = "outer_momentum"  # the key of the state in checkpoints
_BUCKET_BYTES = 25 * 2**20  # sent at once
_OUTER = "outer_optimizer"  # the attribute of an inner optimizer that holds its outer one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ComingChange:
    """Some tensors whose change is being summed over the replicas."""

    numbers: Sequence[int]  # their indices among the tensors that the inner optimizer steps
    values: Tensor  # this replica's when the change was sent, flat; where the outer state is
    change: ComingSum


class OuterOptimizer:
    """Steps the last common parameters by the mean change of all replicas.

    After some local steps, replica r has parameters q_r, where all began with p. SGD, with Nesterov
    momentum if there is any, takes the mean of p − q_r as the gradient of p (DiLoCo, Douillard et
    al., 2023, arXiv:2311.08105). A rate of 1 without momentum gives the mean of all q_r (local SGD,
    Stich 2019). Running statistics of norms become their mean.

    With several `parts`, each part of the model has outer steps of its own, evenly spread over a
    round of local steps (Streaming DiLoCo, Douillard et al., 2025, arXiv:2501.18512). Its change is
    sent `delay` steps before its outer step, while all replicas train on. After the outer step, a
    replica has the new p plus its own change since the sending.

    Each rank of a replica has the outer state of the pieces that its own optimizer steps. With
    `on_host`, this state is in the host's memory, and the host computes the outer steps.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: Optimizer,
        mesh: Mesh,
        *,
        lr: float,
        momentum: float,
        parts: int = 1,
        delay: int = 0,
        on_host: bool = False,
    ) -> None:
        if mesh.sync_every // parts <= delay:
            raise ValueError(
                f"{mesh.sync_every} local steps do not suffice for {parts} parts that are sent "
                f"{delay} steps before their outer step"
            )
        self.replica = mesh.replica
        self._model_parts, self._optimizer = tuple(model_parts), optimizer
        self._sync_every, self._delay = mesh.sync_every, delay
        self._link = HostLink(mesh.device) if on_host else None
        self._common = [nn.Parameter(self._kept_copy(one)) for one in self._values()]
        targets = map(id, self._targets())
        self._common_of = dict(zip(targets, self._common, strict=True))
        stepped = self._common or [nn.Parameter(torch.empty(0, device=mesh.device))]
        self._sgd = SGD(stepped, lr=lr, momentum=momentum, nesterov=momentum > 0)
        if momentum:  # from the start, so that memory that is too small shows before the first step
            for one in stepped:
                self._sgd.state[one]["momentum_buffer"] = torch.zeros_like(one)
        self._turns = (
            [list(range(len(self._common)))] if parts == 1 else self._tensors_of_parts(parts, mesh)
        )
        self._sending = mesh.replica if parts == 1 else replicas_apart(mesh)
        self._sent: list[_ComingChange] = []
        self._are_alike = True
        optimizer.__dict__[_OUTER] = self

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Give all replicas the same new parameters, after the last local step of a round.

        If a training ends within a round, the replicas get their mean, without an outer step: its
        momentum would move them as far as after a whole round.
        """
        if step % self._sync_every:
            self._give_mean()
            return
        for numbers in _buckets(self._common):
            self._receive(self._send(numbers))
        self._finish()

    @torch.no_grad()
    def step_parts(self, step: int) -> None:
        """Send the parts whose turn it is after a local step, and step those that were sent."""
        self._are_alike = False
        within = (step - 1) % self._sync_every + 1
        for number, turn in enumerate(self._turns, start=1):
            end = number * self._sync_every // len(self._turns)
            if within == end - self._delay:
                held = [self._common[one] for one in turn]
                buckets = ([turn[place] for place in bucket] for bucket in _buckets(held))
                self._sent = [self._send(bucket) for bucket in buckets]
            if within == end:
                self._receive_all()
        if within == self._sync_every:
            average(list(_running_statistics(self._model_parts)), self.replica)

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Give all replicas their mean as common parameters, unless they have equal ones."""
        if not self._are_alike:
            self._receive_all()
            self._give_mean()
            self._are_alike = True

    @torch.no_grad()
    def begin(self) -> None:
        """Make the current parameters the common ones, after a checkpoint was restored."""
        for common, value in zip(self._common, self._values(), strict=True):
            common.copy_(value)

    def state_of(self, target: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the outer state of a tensor that the inner optimizer steps."""
        state = self._sgd.state[self._common_of[id(target)]]
        return {MOMENTUM: state["momentum_buffer"]} if state else {}

    def put_momentum(self, target: nn.Parameter, value: Tensor) -> None:
        """Restore the momentum of a tensor that the inner optimizer steps."""
        if self._sgd.defaults["momentum"]:
            self._sgd.state[self._common_of[id(target)]]["momentum_buffer"].copy_(value)

    def _send(self, numbers: Sequence[int]) -> _ComingChange:
        every = self._values()
        values = torch.cat([every[one].reshape(-1) for one in numbers])
        change, held = torch.empty_like(values), [self._common[one] for one in numbers]
        for part, common in zip(torch.split(change, _sizes(held)), held, strict=True):
            part.view(common.shape).copy_(common)
        change.sub_(values)
        if self._link is not None and self._delay:
            values = self._kept_copy(values)
        return _ComingChange(
            numbers=numbers, values=values, change=ComingSum(change, self._sending)
        )

    def _receive(self, sent: _ComingChange) -> None:
        held, every = [self._common[one] for one in sent.numbers], self._values()
        sizes = _sizes(held)
        mean = sent.change.value().div_(self.replica.size)
        values = sent.values.to(mean.device)
        if self._link is not None:
            mean = self._kept_copy(mean)
        for common, gradient in zip(held, torch.split(mean, sizes), strict=True):
            common.grad = gradient.view(common.shape)
        self._sgd.step()
        self._sgd.zero_grad()
        parts = torch.split(values, sizes)
        for number, common, was in zip(sent.numbers, held, parts, strict=True):
            learnt = was.view(common.shape).neg_().add_(every[number])  # since it was sent
            every[number].copy_(common).add_(learnt)

    def _receive_all(self) -> None:
        for one in self._sent:
            self._receive(one)
        self._sent = []
        spread_values(self._optimizer)

    def _kept_copy(self, value: Tensor) -> Tensor:
        """Return a copy in the memory of the outer state."""
        if self._link is None:
            return value.clone()
        return self._link.empty(value.numel(), value.dtype).view(value.shape).copy_(value)

    def _give_mean(self) -> None:
        average(self._values(), self.replica)
        self.begin()
        self._finish()

    def _finish(self) -> None:
        average(list(_running_statistics(self._model_parts)), self.replica)
        spread_values(self._optimizer)

    def _tensors_of_parts(self, parts: int, mesh: Mesh) -> list[list[int]]:
        """Return the numbers of this rank's tensors in each part of the model."""
        names, sizes = dict[int, str](), dict[str, int]()
        for part in self._model_parts:
            for first, *others in group_aliases(places(part)):
                if first.tensor.requires_grad:
                    name = whole_names(part, [first, *others])[0]
                    names[id(first.tensor)] = name
                    sizes[name] = math.prod(chunks_of(first).global_shape)
        if not mesh.is_dry_run:
            known = every_rank(sizes, mesh.pipeline)
            sizes = {name: size for one in known for name, size in one.items()}
        part_of, turns = parts_of_model(sizes, parts), [list[int]() for _ in range(parts)]
        pieces = pieces_of(self._optimizer)
        owners = self._targets() if pieces is None else [one.parameter for one in pieces]
        for number, owner in enumerate(owners):
            turns[part_of[names[id(owner)]]].append(number)
        return turns

    def _targets(self) -> list[nn.Parameter]:
        pieces = pieces_of(self._optimizer)
        if pieces is not None:
            return [one.target for one in pieces]
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _values(self) -> list[Tensor]:
        """Return the memory of the tensors that the inner optimizer steps."""
        pieces = pieces_of(self._optimizer)
        if pieces is not None:
            return [value_of(one) for one in pieces]
        return [one.detach() for one in self._targets()]


def outer_of(optimizer: Optimizer) -> OuterOptimizer | None:
    """Return the outer optimizer that averages an optimizer's replicas, or None."""
    found: OuterOptimizer | None = optimizer.__dict__.get(_OUTER)
    return found


def average_replicas(optimizer: Optimizer) -> None:
    """Give all replicas the same parameters, if an outer optimizer averages them in parts."""
    if (outer := outer_of(optimizer)) is not None:
        outer.average_replicas()


def parts_of_model(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Divide tensors of these sizes into equally large parts; return the part of each.

    From the largest tensor to the smallest, each joins the part that is smallest so far. So equal
    tensors of all layers go to the parts in turn. Only names and sizes decide, so all ranks find
    the same parts.
    """
    filled, found = [0] * parts, dict[str, int]()
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        found[name] = filled.index(min(filled))
        filled[found[name]] += sizes[name]
    return found


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.numel, tensors))


def _running_statistics(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, _NormBase):
            yield from (one for one in (module.running_mean, module.running_var) if one is not None)


def average(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Replace tensors by their means over an axis, which are sent in buckets."""
    if axis.size == 1:
        return
    for numbers in _buckets(tensors):
        bucket = [tensors[one] for one in numbers]
        flat = torch.cat([one.reshape(-1) for one in bucket])
        mean = summed(flat, axis).div_(axis.size)
        for one, part in zip(bucket, torch.split(mean, _sizes(bucket)), strict=True):
            one.copy_(part.view(one.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors of one dtype that together are about as large as a bucket."""
    filled = (place for place, one in enumerate(tensors) if one.numel())
    for _, alike in groupby(filled, key=lambda place: tensors[place].dtype):
        bucket, size = list[int](), 0
        for place in alike:
            bucket.append(place)
            size += tensors[place].numel() * tensors[place].itemsize
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
