"""Logs what one rank of many tells its communicators, in a process in which there is no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.runtime.ranks.mesh import DRY_RUN
from tests.strict.group import StrictGroup, batches_as_one, never_recorded
from tests.strict.log import Communicator, Event, Log
from tests.strict.refusals import refuse
from tests.strict.work import Move, size_bytes

NAME = "strict_alone"


def log_alone(function: Callable[..., object], rank: int, ranks: int, *args: Any) -> list[Event]:
    """Call function(log, *args) as one rank of a world in which nothing is moved; return the log.

    What would be received stays what it was; who gathers finds what it has.
    """
    log = Log()

    def made(options: Any, _: Any) -> _LoneGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return _LoneGroup(Communicator(name=options.group_id, ranks=members), options, log)

    dist.Backend.register_backend(NAME, made, extended_api=True, devices=["cpu"])
    batches_as_one()
    never_recorded()
    with patch.dict(os.environ, {DRY_RUN: f"{rank}/{ranks}"}):
        dist.init_process_group(NAME, rank=rank, world_size=ranks, store=FakeStore())
        try:
            function(log, *args)
        finally:
            dist.destroy_process_group()
    return log.events


def logs_alone(function: Callable[..., object], ranks: int, *args: Any) -> list[list[Event]]:
    """Return the logs of all ranks, one after the other."""
    return [log_alone(function, rank, ranks, *args) for rank in range(ranks)]


class _Lone:
    """The place of a rank in a group, where gloo's group would be."""

    def __init__(self, options: Any) -> None:
        self._rank, self._size = options.group_rank, options.group_size

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)


class _Noted(dist.Work):
    """An operation that moves nothing; who waits for it is noted."""

    def __init__(self, number: int, log: Log) -> None:
        super().__init__()
        self._number, self._log = number, log

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self._log.wait(self._number)
        return True


class _LoneGroup(StrictGroup):
    """A strict group that notes what it is told, and moves nothing."""

    def __init__(self, communicator: Communicator, options: Any, log: Log) -> None:
        super().__init__(communicator, _Lone(options), log, device_type="cpu")

    def batch(self, issue: Callable[[], Any]) -> list[Any]:
        with self._log.batched():
            return list(issue())

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for every, own in zip(outputs, inputs, strict=True):
            for one in every:
                one.copy_(own)
        return super().allgather(outputs, inputs, opts)

    def _issue(
        self,
        op: str,
        sent: Sequence[Tensor],
        filled: Sequence[Tensor],
        move: Move,
        peer: int | None = None,
    ) -> Any:
        del move
        for one in (*sent, *filled):
            refuse(op, one, "cpu")
        size = sum(size_bytes(one) for one in (sent or filled))
        return _Noted(self._log.issue(self.communicator, op, size, peer), self._log)
