"""Runs microbatches through the stages: torch's schedules, or forward only.

Turns microbatches into their losses by the stages of all ranks, without backwards or a schedule.

In turns of the same length, each rank runs the last of its stages that has a microbatch to run. So
ranks of several stages are as busy as those of one; one microbatch after the other, all ranks but
one would wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from autopar.runtime.data.loss import scale_loss
from autopar.runtime.model.parts import Crossing, Rows, StagePart
from autopar.runtime.pipeline.stage import Shapes, Stage, cut, stage_of
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import Pairs, neighbour_groups

Batch = Mapping[str, Any]
_TOGETHER = 8  # microbatches for each rank that are read at once


def losses_through(stages: Sequence[Stage], batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Yield the loss of each microbatch where the last stage is, and zero on other ranks."""
    first, left = stages[0], iter(batches)
    ranks = tuple(first.stage_index_to_group_rank[n] for n in range(first.num_stages))
    while some := list(islice(left, _TOGETHER * first.group_size)):
        actions = orders(ranks, len(some))[first.group_rank]
        yield from _MicrobatchesUnderWay(stages, some).losses(actions)


class ForwardKind(Enum):
    """What a rank does with a microbatch on a stage."""

    RUN = "run the stage"
    SEND = "send what it has made to the next stage"
    RECEIVE = "receive what the stage before has made"


@dataclass(frozen=True, slots=True)
class ForwardAction:
    """What a rank does next."""

    kind: ForwardKind
    stage: int
    microbatch: int


@lru_cache(maxsize=8)
def orders(rank_of: tuple[int, ...], microbatches: int) -> tuple[tuple[ForwardAction, ...], ...]:
    """Return what each rank does, for stages that lie on these ranks.

    Who sends has the other ask for it at the same place: two ranks tell their group of all messages
    in one order, in which nccl moves them.
    """
    found: list[list[ForwardAction]] = [[] for _ in range(max(rank_of) + 1)]
    made = [0] * len(rank_of)  # how many microbatches each stage has run
    while made[-1] < microbatches:
        runs = {
            rank_of[stage]: stage  # the last one that can
            for stage, own in enumerate(made)
            if own < (microbatches if stage == 0 else made[stage - 1])
        }
        for rank, stage in runs.items():
            found[rank].append(ForwardAction(ForwardKind.RUN, stage, made[stage]))
        for rank, stage in sorted(runs.items()):
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank:
                found[rank].append(ForwardAction(ForwardKind.SEND, stage, made[stage]))
                receive = ForwardAction(ForwardKind.RECEIVE, stage + 1, made[stage])
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
class _MicrobatchesUnderWay:
    """Some microbatches on their way through the stages of this rank."""

    stages: Sequence[Stage]
    batches: Sequence[Batch]
    coming: dict[tuple[int, int], _Message] = field(default_factory=dict)
    made: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)
    sent: list[_Message] = field(default_factory=list)

    def losses(self, actions: Iterable[ForwardAction]) -> Iterator[Tensor]:
        """Do what is this rank's; yield the losses in the order of the microbatches."""
        own = {stage.stage_index: stage for stage in self.stages}
        for one in actions:
            stage, place = own[one.stage], (one.stage, one.microbatch)
            if one.kind is ForwardKind.RECEIVE:
                tensors = stage.arriving(self.batches[one.microbatch])
                self.coming[place] = _moved(dist.irecv, tensors, stage, -1)
            elif one.kind is ForwardKind.SEND:
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


__all__ = ["Pipeline", "Stage", "build_schedule", "cut", "stage_at", "stage_indices", "stage_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How torch runs a schedule.

    Neighbours have groups of their own where a message that waits would hold up others: 1F1B waits
    for each message at once, and sends both ways in one batch.
    """

    torch_class: type[PipelineScheduleSingle | PipelineScheduleMulti]
    splits_backward: bool = False
    pairs: Pairs = Pairs.RING


KINDS: Mapping[str, _Kind] = {
    "gpipe": _Kind(torch_class=ScheduleGPipe, pairs=Pairs.LINE),
    "1f1b": _Kind(torch_class=Schedule1F1B, pairs=Pairs.NONE),
    "interleaved-1f1b": _Kind(torch_class=ScheduleInterleaved1F1B),
    "interleaved-zero-bubble": _Kind(
        torch_class=ScheduleInterleavedZeroBubble, splits_backward=True
    ),
    "zero-bubble-v": _Kind(
        torch_class=ScheduleZBVZeroBubble, splits_backward=True, pairs=Pairs.LINE
    ),
}


def stage_indices(kind: str, rank: int, ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """Return which stages a rank holds: round robin, or down and up again for the V."""
    if kind == "zero-bubble-v":
        return (rank, 2 * ranks - 1 - rank)
    return tuple(rank + ranks * turn for turn in range(per_rank))


def stage_at(
    index: int,
    parts: Sequence[StagePart],
    module: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
) -> Stage:
    """Make a module the stage of this index among parts that tell what each gives to the next."""

    around = parts[max(index - 1, 0) : index + 1]

    def crossing(part: StagePart, batch: Mapping[str, Any]) -> tuple[Crossing, ...]:
        return part.gives(batch) if callable(part.gives) else part.gives

    def described(crossings: Sequence[Crossing], rows: int = 1) -> list[Tensor]:
        return [one.described(mesh.tensor, dtype, rows=rows) for one in crossings]

    def shapes_of(batch: Mapping[str, Any], rows: int) -> Shapes:
        received = crossing(parts[index - 1], batch) if index else ()
        return Shapes(
            received=[tensor.shape for tensor in described(received, rows)],
            sent=[tensor.shape for tensor in described(crossing(parts[index], batch), rows)],
            lengths=[one.length for one in received if one.length is not None],
        )

    has_lengths = any(callable(part.gives) for part in around)
    of_rows = lru_cache(partial(shapes_of, {}))  # which all microbatches share, but for a few

    def shapes(batch: Mapping[str, Any]) -> Shapes:
        rows = len(next(iter(batch.values())))
        return shapes_of(batch, rows) if has_lengths else of_rows(rows)

    unknown = _Unknown()
    return stage_of(
        module,
        mesh,
        index=index,
        stages=len(parts),
        receives=described(crossing(parts[index - 1], unknown)) if index else (),
        sends=described(crossing(parts[index], unknown)),
        shapes=shapes if has_lengths or any(map(_follows_rows, around)) else None,
    )


def _follows_rows(part: StagePart) -> bool:
    """Whether the shapes of what a stage gives are told by the rows of a microbatch."""
    gives = () if callable(part.gives) else part.gives
    return any(isinstance(size, Rows) for one in gives for size in one.shape)


class _Unknown(Mapping[str, Tensor]):
    """A batch before there is one: its tensors have no known sizes, and all of them are 1."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.empty((1,) * 9, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def build_schedule(
    kind: str,
    stages: Sequence[Stage],
    microbatches: int,
) -> Pipeline:
    """Build the schedule `kind` over this rank's stages, in order.

    Stages of one rank may not share a parameter (each would average its gradient): give each a copy
    and tie them with `TiedWeights`.
    """
    _check_disjoint(stages)
    if kind not in KINDS:
        raise RuntimeError(f"{kind!r} is no pipeline schedule: choose one of {', '.join(KINDS)}")
    chosen = KINDS[kind]
    for stage in stages if chosen.splits_backward else ():
        _split_backward_of(stage, kind)
    groups = neighbour_groups(stages[0].mesh, chosen.pairs)
    for stage in stages:
        stage.neighbours = groups
    own: Any = list(stages)
    if issubclass(chosen.torch_class, PipelineScheduleSingle):
        (own,) = stages
    made = chosen.torch_class(own, microbatches, loss_fn=_own_loss, scale_grads=False)
    return Pipeline(made, stages)


class Pipeline:
    """The stages of this rank under a schedule."""

    def __init__(
        self, schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: Sequence[Stage]
    ) -> None:
        self.schedule = schedule
        self.stages = tuple(stages)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return [stage.submod for stage in self.stages]

    def step(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        weights: Sequence[Tensor | float],
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Run forward and backward of one step; return the sum of the weighted losses here.

        Each microbatch goes to every stage as keyword arguments, whatever its values are; its
        weight multiplies its loss. Only the last stage has losses. Gradients are summed over the
        microbatches and averaged over the data axis; they, and they alone, come out `scale` times
        as great, which keeps small ones from vanishing in fp16.
        """
        device = self.stages[0].device
        wide = [torch.as_tensor(weight, dtype=torch.float64) for weight in weights]
        factors = torch.stack(wide).to(device, non_blocking=True)
        starts = (factors if scale == 1.0 else factors * scale).unbind()
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
            stage.take(microbatches, starts)
        losses: list[Tensor] = []
        self.schedule._step_microbatches(
            target_mbs=list(weights), losses=losses, return_outputs=False
        )
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.take((), ())
        if not losses:
            return torch.zeros((), device=device)
        return scale_loss(torch.stack(losses).detach(), factors).sum()

    def losses_of(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
        """Yield the losses of microbatches that are evaluated; zeros where no last stage is."""
        return losses_through(self.stages, batches)


def _own_loss(output: tuple[Tensor, ...], _: object) -> Tensor:
    """Return what the last stage gives; `Stage` weighs it."""
    return output[0]


def _check_disjoint(stages: Sequence[Stage]) -> None:
    seen: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if id(parameter) in seen:
                raise RuntimeError(
                    f"{name} of stage {stage.stage_index} is also {seen[id(parameter)]}: "
                    "give each stage its own copy and tie the copies with TiedWeights"
                )
        for name, parameter in stage.submod.named_parameters():
            seen[id(parameter)] = f"{name} of stage {stage.stage_index}"


def _split_backward_of(stage: Stage, kind: str) -> None:
    """Have a stage run its backwards in halves.

    These look the parameters up by their autograd nodes, which sharding renews, and hide their
    gradients from the hooks that would reduce them: both would stay whole to the last microbatch.
    """
    if isinstance(stage.submod, FSDPModule):
        raise RuntimeError(
            f"{kind} runs backwards in halves, which keep parameters and gradients whole: ZeRO-2 "
            "and 3 would save nothing; plan with zero 0 or 1, or with another schedule"
        )
    stage.splits_backward = True
