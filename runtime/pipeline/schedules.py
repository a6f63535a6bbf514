"""Runs microbatches through the stages: with torch's schedules, or forward only.

Forward only, the ranks work in rounds of equal length: in each, a rank runs the last of its stages
that has a microbatch ready. Ranks with several stages are then as busy as ranks with one. If each
microbatch went through all stages before the next began, all ranks but one would wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache, partial
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
from autopar.runtime.pipeline.stage import Shapes, Stage, Tie, TiedWeights
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import Pairs, neighbour_groups

__all__ = ["Pipeline", "build_schedule", "stage_at", "stage_indices"]  # for scripts

Batch = Mapping[str, Any]
_TOGETHER = 8  # microbatches that are read at once, per rank


class ForwardKind(Enum):
    """An action of a rank with one microbatch on one stage."""

    RUN = "run the stage"
    SEND = "send what it has made to the next stage"
    RECEIVE = "receive what the stage before has made"


@dataclass(frozen=True, slots=True)
class ForwardAction:
    """The next action of a rank."""

    kind: ForwardKind
    stage: int
    microbatch: int


@lru_cache(maxsize=8)
def orders(rank_of: tuple[int, ...], microbatches: int) -> tuple[tuple[ForwardAction, ...], ...]:
    """Return the actions of each rank; `rank_of` has the rank of each stage.

    A send and its receive are appended together, so that two ranks start the messages of their
    group in the same order, as nccl needs.
    """
    found: list[list[ForwardAction]] = [[] for _ in range(max(rank_of) + 1)]
    made = [0] * len(rank_of)  # microbatches that each stage has run
    while made[-1] < microbatches:
        runs = {
            rank_of[stage]: stage  # a rank runs the last of its stages that can run
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
    """Tensors that are being sent to another rank, or received."""

    tensors: Sequence[Tensor]
    works: Sequence[Any]

    def waited(self) -> Sequence[Tensor]:
        """Wait for the tensors, and return them."""
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class _MicrobatchesUnderWay:
    """Microbatches that are passing through this rank's stages."""

    stages: Sequence[Stage]
    batches: Sequence[Batch]
    coming: dict[tuple[int, int], _Message] = field(default_factory=dict)
    made: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)
    sent: list[_Message] = field(default_factory=list)

    def losses(self, actions: Iterable[ForwardAction]) -> Iterator[Tensor]:
        """Perform this rank's actions; yield losses in the order of the microbatches."""
        own = {stage.stage_index: stage for stage in self.stages}
        for one in actions:
            stage, place = own[one.stage], (one.stage, one.microbatch)
            if one.kind is ForwardKind.RECEIVE:
                tensors = stage.arriving(self.batches[one.microbatch])
                self.coming[place] = _started(dist.irecv, tensors, stage, -1)
            elif one.kind is ForwardKind.SEND:
                tensors = [tensor.contiguous() for tensor in self.made.pop(place)]
                self._sent(_started(dist.isend, tensors, stage, 1))
            else:
                self.made[place] = stage.evaluate(self.batches[one.microbatch], self._given(place))
                if stage.is_last:
                    yield self.made.pop(place)[0]
        for message in self.sent:
            message.waited()
        if not any(stage.is_last for stage in self.stages):
            yield from (torch.zeros((), device=stage.device) for _ in self.batches)

    def _given(self, place: tuple[int, int]) -> Sequence[Tensor]:
        """Return the inputs of a stage, received or from this rank."""
        if place in self.coming:
            return self.coming.pop(place).waited()
        stage, microbatch = place
        return self.made.pop((stage - 1, microbatch), ())

    def _sent(self, message: _Message) -> None:
        """Keep sent tensors until they are received; at most a few are pending."""
        self.sent.append(message)
        if len(self.sent) > 2 * self.stages[0].group_size:
            self.sent.pop(0).waited()


def _started(function: Any, tensors: Sequence[Tensor], stage: Stage, offset: int) -> _Message:
    """Start sending tensors to the rank of another stage, or receiving from it."""
    rank = stage.stage_index_to_group_rank[stage.stage_index + offset]
    assert stage.group is not None
    peer, group = dist.get_global_rank(stage.group, rank), stage.group_with(rank)
    return _Message(tensors, [function(one, peer, group=group) for one in tensors])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """torch's class for a kind of schedule, and the process groups that it needs.

    Pairs of neighbours get their own process groups if a waiting message would block others. 1F1B
    needs none: it waits for each message before the next, and sends both ways in one batch.
    """

    torch_class: type[PipelineScheduleSingle | PipelineScheduleMulti]
    splits_backward: bool = False
    is_v: bool = False  # two stages per rank: down to the last rank and up again
    pairs: Pairs = Pairs.RING


KINDS: Mapping[str, _Kind] = {
    "gpipe": _Kind(torch_class=ScheduleGPipe, pairs=Pairs.LINE),
    "1f1b": _Kind(torch_class=Schedule1F1B, pairs=Pairs.NONE),
    "interleaved-1f1b": _Kind(torch_class=ScheduleInterleaved1F1B),
    "interleaved-zero-bubble": _Kind(
        torch_class=ScheduleInterleavedZeroBubble, splits_backward=True
    ),
    "zero-bubble-v": _Kind(
        torch_class=ScheduleZBVZeroBubble, splits_backward=True, is_v=True, pairs=Pairs.LINE
    ),
}


def stage_indices(kind: str, rank: int, ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """Return the stages of a rank: round robin, or for V schedules down and up again."""
    if KINDS[kind].is_v:
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
    """Turn a module into a pipeline stage; `parts` has the shapes that each stage sends."""

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
    of_rows = lru_cache(partial(shapes_of, {}))  # nearly all microbatches have equally many rows

    def shapes(batch: Mapping[str, Any]) -> Shapes:
        rows = len(next(iter(batch.values())))
        return shapes_of(batch, rows) if has_lengths else of_rows(rows)

    # in place of a batch: all of its sizes are 1
    unknown = defaultdict[str, Tensor](partial(torch.empty, (1,) * 9, device="meta"))
    return Stage(
        module,
        mesh,
        index=index,
        stages=len(parts),
        receives=described(crossing(parts[index - 1], unknown)) if index else (),
        sends=described(crossing(parts[index], unknown)),
        shapes=shapes if has_lengths or any(map(_follows_rows, around)) else None,
    )


def _follows_rows(part: StagePart) -> bool:
    """Whether the rows of a microbatch determine the shapes that a stage sends."""
    gives = () if callable(part.gives) else part.gives
    return any(isinstance(size, Rows) for one in gives for size in one.shape)


def build_schedule(
    kind: str,
    stages: Sequence[Stage],
    microbatches: int,
    ties: Sequence[Tie] = (),
) -> Pipeline:
    """Build the schedule `kind` over this rank's stages, in order.

    Stages of one rank must not share a parameter, because each stage would average its gradient.
    Give each stage a copy, and name the copies in `ties`.
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
    made = chosen.torch_class(
        own,
        microbatches,
        loss_fn=lambda output, _: output[0],  # `Stage` applies the weight
        scale_grads=False,
    )
    return Pipeline(made, stages, ties)


class Pipeline:
    """The stages of this rank under a schedule."""

    def __init__(
        self,
        schedule: PipelineScheduleSingle | PipelineScheduleMulti,
        stages: Sequence[Stage],
        ties: Sequence[Tie] = (),
    ) -> None:
        self.schedule = schedule
        self.stages, self.ties = tuple(stages), tuple(ties)

    @cached_property
    def tied(self) -> TiedWeights:
        """The weights that several stages hold, found at first use: parameters have memory then."""
        return TiedWeights(self.stages[0].mesh, self.parts, self.ties)

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
        """Run forward and backward of one step; return the sum of this rank's weighted losses.

        Each microbatch goes to every stage as keyword arguments. The weights multiply the losses;
        only the last stage has losses. Gradients are summed over the microbatches and averaged over
        the data axis. `scale` multiplies the gradients only, so that small ones do not vanish in
        fp16.
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
        """Yield the losses of evaluated microbatches; zeros on ranks without the last stage."""
        first, left = self.stages[0], iter(batches)
        ranks = tuple(first.stage_index_to_group_rank[n] for n in range(first.num_stages))
        while some := list(islice(left, _TOGETHER * first.group_size)):
            actions = orders(ranks, len(some))[first.group_rank]
            yield from _MicrobatchesUnderWay(self.stages, some).losses(actions)


def _check_disjoint(stages: Sequence[Stage]) -> None:
    seen: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if id(parameter) in seen:
                raise RuntimeError(
                    f"{name} of stage {stage.stage_index} is also {seen[id(parameter)]}: "
                    "give each stage its own copy, and name the copies in the ties"
                )
        for name, parameter in stage.submod.named_parameters():
            seen[id(parameter)] = f"{name} of stage {stage.stage_index}"


def _split_backward_of(stage: Stage, kind: str) -> None:
    """Make a stage split its backwards into halves; raise if fully_shard has sharded it.

    The halves find parameters by their autograd nodes, which sharding replaces, and gradients
    bypass the hooks that reduce them. Parameters and gradients would therefore stay whole until the
    last microbatch.
    """
    if isinstance(stage.submod, FSDPModule):
        raise RuntimeError(
            f"{kind} runs backwards in halves, which keep parameters and gradients whole: ZeRO-2 "
            "and 3 would save nothing; plan with zero 0 or 1, or with another schedule"
        )
    stage.splits_backward = True
