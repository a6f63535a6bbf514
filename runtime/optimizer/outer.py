"""Averages replicas after their local steps, and applies an outer optimizer to the mean change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from autopar.runtime.optimizer.pieces import pieces_of, spread_values, value_of
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import summed

MOMENTUM = "outer_momentum"  # the key of the state in checkpoints
_BUCKET_BYTES = 25 * 2**20  # sent at once
_OUTER = "outer_optimizer"  # the attribute of an inner optimizer that holds its outer one


class OuterOptimizer:
    """Steps the last common parameters by the mean change of all replicas.

    After some local steps, replica r has parameters q_r, where all began with p. SGD, with Nesterov
    momentum if there is any, takes the mean of p − q_r as the gradient of p (DiLoCo, Douillard et
    al., 2023, arXiv:2311.08105). A rate of 1 without momentum gives the mean of all q_r (local SGD,
    Stich 2019). Running statistics of norms become their mean.

    Each rank of a replica has the outer state of the pieces that its own optimizer steps.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer,
        mesh: Mesh,
        *,
        lr: float,
        momentum: float,
    ) -> None:
        self.replica = mesh.replica
        self._parts, self._optimizer = tuple(parts), optimizer
        self._common = [nn.Parameter(one.clone()) for one in self._values()]
        targets = map(id, self._targets())
        self._common_of = dict(zip(targets, self._common, strict=True))
        stepped = self._common or [nn.Parameter(torch.empty(0, device=mesh.device))]
        self._sgd = SGD(stepped, lr=lr, momentum=momentum, nesterov=momentum > 0)
        if momentum:  # from the start, so that memory that is too small shows before the first step
            for one in stepped:
                self._sgd.state[one]["momentum_buffer"] = torch.zeros_like(one)
        optimizer.__dict__[_OUTER] = self

    @torch.no_grad()
    def step(self) -> None:
        """Give all replicas the same new parameters. All ranks call this after the same step."""
        values = self._values()
        for common, value in zip(self._common, values, strict=True):
            common.grad = torch.sub(common, value, out=value)  # in place, without further memory
        average(values, self.replica)
        self._sgd.step()
        self._sgd.zero_grad()
        for common, value in zip(self._common, values, strict=True):
            value.copy_(common)
        average(list(_running_statistics(self._parts)), self.replica)
        spread_values(self._optimizer)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the parameters as the common ones, after a checkpoint was restored."""
        for common, value in zip(self._common, self._values(), strict=True):
            common.copy_(value)

    def state_of(self, target: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the outer state of a tensor that the inner optimizer steps."""
        state = self._sgd.state[self._common_of[id(target)]]
        return {MOMENTUM: state["momentum_buffer"]} if state else {}

    def put_momentum(self, target: nn.Parameter, value: Tensor) -> None:
        """Restore the momentum of a tensor that the inner optimizer steps."""
        if self._sgd.defaults["momentum"]:
            self._sgd.state[self._common_of[id(target)]]["momentum_buffer"] = value

    def _targets(self) -> list[nn.Parameter]:
        pieces = pieces_of(self._optimizer)
        if pieces is not None:
            return [one.target for one in pieces]
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _values(self) -> list[Tensor]:
        """Return the memory of what the inner optimizer steps."""
        pieces = pieces_of(self._optimizer)
        if pieces is not None:
            return [value_of(one) for one in pieces]
        return [one.detach() for one in self._targets()]


def outer_of(optimizer: Optimizer) -> OuterOptimizer | None:
    """Return the outer optimizer that averages an optimizer's replicas, or None."""
    found: OuterOptimizer | None = optimizer.__dict__.get(_OUTER)
    return found


def _running_statistics(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, _NormBase):
            yield from (one for one in (module.running_mean, module.running_var) if one is not None)


def average(tensors: Sequence[Tensor], axis: Axis) -> None:
    """Replace tensors by their means over an axis, which are sent in buckets."""
    if axis.size == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        mean = summed(flat, axis).div_(axis.size)
        for one, part in zip(
            bucket, torch.split(mean, list(map(Tensor.numel, bucket))), strict=True
        ):
            one.copy_(part.view(one.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of one dtype, together about as large as a bucket."""
    for _, alike in groupby(filter(Tensor.numel, tensors), key=lambda one: one.dtype):
        bucket, size = list[Tensor](), 0
        for one in alike:
            bucket.append(one)
            size += one.numel() * one.itemsize
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
