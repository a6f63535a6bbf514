"""Turns a flat tensor of gradients into its mean over the data axis while other work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import ComingPart, ComingSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Over which ranks gradients are averaged, and who gets which part of the mean."""

    shard: Axis  # each of its ranks gets a part; of size 1: the whole
    replica: Axis  # its ranks get the same part
    wire_dtype: torch.dtype | None = None  # in which gradients travel, if not in their own

    @property
    def ranks(self) -> int:
        """How many ranks share the data."""
        return self.shard.size * self.replica.size

    @property
    def divides_first(self) -> bool:
        """Whether gradients are divided before they are summed: fp16 cannot hold large sums."""
        return self.shard.is_gloo or self.replica.is_gloo or self.wire_dtype is not None

    @property
    def operation(self) -> Any:
        """What the collectives do."""
        return dist.ReduceOp.SUM if self.divides_first else dist.ReduceOp.AVG


class ComingMean:
    """This rank's part of a flat tensor, which turns into the mean of every rank's."""

    def __init__(self, flat: Tensor, averaging: Averaging) -> None:
        self._flat = flat
        self._averaging = averaging
        self._wire = flat if averaging.wire_dtype is None else flat.to(averaging.wire_dtype)
        self._part = ComingPart(self._wire, averaging.shard, operation=averaging.operation)
        self._over_copies: ComingSum | None = None
        if averaging.shard.size == 1:
            self.sum_over_copies()

    def sum_over_copies(self) -> None:
        """Have the ranks that get the same part sum it, after waiting for it."""
        if self._over_copies is None:
            axis, operation = self._averaging.replica, self._averaging.operation
            self._over_copies = ComingSum(self._part.value(), axis, operation=operation)

    def value(self) -> Tensor:
        """Wait, and return the part in the memory of the flat tensor."""
        self.sum_over_copies()
        assert self._over_copies is not None
        part = self._over_copies.value()
        if self._wire is self._flat:
            return part
        shard = self._averaging.shard
        return self._flat.view(shard.size, -1)[shard.rank].copy_(part)
