"""Turns microbatches into their losses by the stages of all ranks, without backwards or a schedule.

In turns of the same length, each rank runs the last of its stages that has a microbatch to run. So
ranks of several stages are as busy as those of one; one microbatch after the other, all ranks but
one would wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pipeline.stage import Stage

Batch = Mapping[str, Any]
_TOGETHER = 8  # microbatches for each rank that are read at once


def losses_through(stages: Sequence[Stage], batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield the loss of each microbatch where the last stage is, and zero on other ranks."""
    first, left = stages[0], iter(batches)
    ranks = tuple(first.stage_index_to_group_rank[n] for n in range(first.num_stages))
    while some := list(islice(left, _TOGETHER * first.group_size)):
        actions = orders(ranks, len(some))[first.group_rank]
        yield from _Running(stages, some).losses(actions)


class Kind(Enum):
    """What a rank does with a microbatch on a stage."""

    RUN = "run the stage"
    SEND = "send what it has made to the next stage"
    RECEIVE = "receive what the stage before has made"


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next."""

    kind: Kind
    stage: int
    microbatch: int


@lru_cache(maxsize=8)
def orders(rank_of: tuple[int, ...], microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does, for stages that lie on these ranks.

    Who sends has the other ask for it at the same place: two ranks tell their group of all messages
    in one order, in which nccl moves them.
    """
    found: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    made = [0] * len(rank_of)  # how many microbatches each stage has run
    while made[-1] < microbatches:
        runs = {
            rank_of[stage]: stage  # the last one that can
            for stage, own in enumerate(made)
            if own < (microbatches if stage == 0 else made[stage - 1])
        }
        for rank, stage in runs.items():
            found[rank].append(Action(Kind.RUN, stage, made[stage]))
        for rank, stage in sorted(runs.items()):
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank:
                found[rank].append(Action(Kind.SEND, stage, made[stage]))
                receive = Action(Kind.RECEIVE, stage + 1, made[stage])
                found[rank_of[stage + 1]].append(receive)
            made[stage] += 1
    return tuple(tuple(actions) for actions in found)


@dataclass(slots=True)
class _Message:
    """Tensors on their way to another rank, or from there."""

    tensors: Sequence[Tensor]
    works: Sequence[Any]

    def waited(self) -> Sequence[Tensor]:
        """Return the tensors, once they have come."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class _Running:
    """Some microbatches on their way through the stages of this rank."""

    stages: Sequence[Stage]
    batches: Sequence[Batch]
    coming: dict[tuple[int, int], _Message] = field(default_factory=dict)
    made: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)
    sent: list[_Message] = field(default_factory=list)

    def losses(self, actions: Iterable[Action]) -> Iterator[Tensor]:
        """Do what is this rank's; yield the losses in the order of the microbatches."""
        own = {stage.stage_index: stage for stage in self.stages}
        for one in actions:
            stage, place = own[one.stage], (one.stage, one.microbatch)
            if one.kind is Kind.RECEIVE:
                tensors = stage.arriving(self.batches[one.microbatch])
                self.coming[place] = _moved(dist.irecv, tensors, stage, -1)
            elif one.kind is Kind.SEND:
                tensors = [tensor.contiguous() for tensor in self.made.pop(place)]
                self._sent(_moved(dist.isend, tensors, stage, 1))
            else:
                self.made[place] = stage.evaluate(self.batches[one.microbatch], self._given(place))
                if stage.is_last:
                    yield self.made.pop(place)[0]
        for message in self.sent:
            message.waited()
        if not any(stage.is_last for stage in self.stages):
            yield from (torch.zeros((), device=stage.device) for _ in self.batches)

    def _given(self, place: tuple[int, int]) -> Sequence[Tensor]:
        """Return what a stage gets, from another rank or from this one."""
        if place in self.coming:
            return self.coming.pop(place).waited()
        stage, microbatch = place
        return self.made.pop((stage - 1, microbatch), ())

    def _sent(self, message: _Message) -> None:
        """Hold what is sent until it has been received; the oldest is waited for."""
        self.sent.append(message)
        if len(self.sent) > 2 * self.stages[0].group_size:
            self.sent.pop(0).waited()


def _moved(function: Any, tensors: Sequence[Tensor], stage: Stage, offset: int) -> _Message:
    """Begin to send tensors to the rank of another stage, or to receive them from there."""
    rank = stage.stage_index_to_group_rank[stage.stage_index + offset]
    assert stage.group is not None
    peer, group = dist.get_global_rank(stage.group, rank), stage.group_with(rank)
    return _Message(tensors, [function(one, peer, group=group) for one in tensors])
