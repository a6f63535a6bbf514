"""A pipeline stage of this rank, and weights that several stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward

from autopar.runtime.data.loss import send_nothing_back
from autopar.runtime.data_parallel.gradient_buckets import GradientBuckets
from autopar.runtime.data_parallel.wrapping import buckets_of, set_last
from autopar.runtime.optimizer.gradients import made_gradient
from autopar.runtime.pipeline.torch_stage import (
    InputGradients,
    SplitBackward,
    TorchStage,
    refuse_earlier_torch,
    resize,
)
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import near
from autopar.runtime.tensor.slices import receives

__all__ = ["Stage", "Tie"]  # for scripts


@dataclass(frozen=True, slots=True)
class Tie:
    """A tied parameter: all its names, and the pipeline ranks that hold it."""

    names: tuple[str, ...]
    stages: tuple[int, ...]  # pipeline ranks in ascending order; the first one owns the parameter


class TiedWeights:
    """The tied weights of a model, seen from this pipeline stage.

    The stages that hold a tied weight exchange messages directly, not through the stages between
    them. All of them sum in the order of the stages, so that the copies stay bitwise equal.
    """

    def __init__(self, mesh: Mesh, model_parts: Sequence[nn.Module], ties: Sequence[Tie]) -> None:
        self._axis = mesh.pipeline
        self._held = [
            (tie, _copies(model_parts, tie)) for tie in ties if mesh.pipeline.rank in tie.stages
        ]
        self.not_owned = frozenset(
            name
            for tie, _ in self._held
            if tie.stages[0] != mesh.pipeline.rank
            for name in tie.names
        )

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of all copies, each rank for the part that it holds.

        Under ZeRO-1 all stages hold the same part if the tie is in `apart` (see wrap()).
        """
        for tie, copies in self._held:
            gradients = [made_gradient(*copy) for copy in copies]
            if gradients[0].numel():
                mine = sum(gradients[1:], start=gradients[0])
                first, *others = self._swapped(tie, mine)
                total = first.clone()
                for other in others:  # without a stacked copy, because an embedding is large
                    total.add_(other)
                for gradient in gradients:
                    gradient.copy_(total)

    def _swapped(self, tie: Tie, mine: Tensor) -> list[Tensor]:
        """Exchange a tensor with the other holders; return all of them in the order of stages."""
        mine = near(mine, self._axis).contiguous()
        by_stage = {stage: torch.empty_like(mine) for stage in tie.stages}
        by_stage[self._axis.rank] = mine
        messages = []
        for stage in tie.stages:
            if stage != self._axis.rank:
                for function, tensor in ((dist.isend, mine), (dist.irecv, by_stage[stage])):
                    messages.append(
                        dist.P2POp(function, tensor, group=self._axis.group, group_peer=stage)
                    )
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return list(by_stage.values())


def _copies(model_parts: Sequence[nn.Module], tie: Tie) -> list[tuple[nn.Module, nn.Parameter]]:
    """Find the tie's distinct parameters in this process, each with the part that holds it."""
    found: dict[int, tuple[nn.Module, nn.Parameter]] = {}
    for part in model_parts:
        for name in tie.names:
            module, _, attribute = name.rpartition(".")
            with suppress(AttributeError):  # a layer of another stage
                parameter = part.get_submodule(module)._parameters.get(attribute)
                if parameter is not None:
                    found.setdefault(id(parameter), (part, parameter))
    if not found:
        raise KeyError(f"this stage has none of {', '.join(tie.names)}")
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a stage receives and sends for one microbatch.

    A dim that is split over the tensor axis has the size of this rank's share. `lengths` are the
    whole lengths of such dims in the received tensors.
    """

    received: Sequence[torch.Size]
    sent: Sequence[torch.Size]
    lengths: Sequence[int]


# torch's stages vote on whether they know all shapes; a dry run has no other stages to ask
_VOTE = cast(Tensor, SimpleNamespace(item=lambda: 1))
ShapesOf: TypeAlias = Callable[[Mapping[str, Any]], Shapes]


class Stage(TorchStage):
    """Stage `index` of `stages`: a module, already wrapped for data parallelism.

    The module's forward takes the received tensors in order, then the batch by keyword, and returns
    a tuple of tensors to send; the last stage's forward returns the loss. `receives` and `sends`
    describe these tensors on the meta device. If their shapes vary, `shapes` returns those of one
    microbatch.

    torch's own class finds shapes by running the model, searches batches for tensors that need
    gradients, and does not reduce the gradients of a split backward (zero bubble) under DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        index: int,
        stages: int,
        receives: Sequence[Tensor],
        sends: Sequence[Tensor],
        shapes: ShapesOf | None = None,
    ) -> None:
        refuse_earlier_torch()
        super().__init__(
            module,
            index,
            stages,
            mesh.device,
            input_args=tuple(receives),
            # the last stage has the loss
            output_args=tuple(sends) or (torch.empty((), device="meta"),),
            group=mesh.pipeline.group,
        )
        self.receives = receives
        self._shapes_of = shapes
        self._shapes: Sequence[Shapes] = ()
        self._sized: Sequence[Shapes] = ()  # those that `resize` has set
        self._microbatches: Sequence[Mapping[str, Any]] = ()
        self._weights: Sequence[Tensor] = ()
        self._backward_microbatch = 0  # the microbatch whose backward is running
        self.mesh = mesh
        # process groups of two ranks, by the other one's pipeline rank
        self.neighbours: Mapping[int, dist.ProcessGroup] = {}
        self.splits_backward = False
        self._split_backward = SplitBackward(module)
        self._buckets: GradientBuckets | None = buckets_of(module)
        if self._buckets is not None:
            self._buckets.finishes_with_backward = False

    def take(self, microbatches: Sequence[Mapping[str, Any]], weights: Sequence[Tensor]) -> None:
        """Store a step's batches, and the weights of their losses; backwards start from these.

        Passing batches through the schedule would search each tensor for gradients, and multiplying
        a loss by its weight would add four autograd ops.
        """
        self._microbatches, self._weights = microbatches, weights
        if self._shapes_of is not None:
            self._shapes = [self._shapes_of(batch) for batch in microbatches]
            if self._shapes and self._shapes != self._sized:
                self.resize(self._shapes)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        self.resize(self._shapes)
        return result

    def resize(self, shapes: Sequence[Shapes]) -> None:
        """Replace the shapes in torch's descriptions of received tensors, for each microbatch."""
        self._sized = shapes
        for chunk, own in enumerate(shapes):
            resize(self.args_recv_info.get(chunk, ()), own.received)
            resize(self.grad_recv_info.get(chunk, ()), own.sent)

    def _warmup_forward_vote(
        self, has_backward: bool, received_acc: Tensor | None = None
    ) -> Tensor:
        if self.mesh.is_dry_run:
            return _VOTE
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self.mesh.is_dry_run:
            return _VOTE
        return super()._warmup_backward_result(received_result)

    def group_with(self, rank: int) -> dist.ProcessGroup | None:
        """Return the process group for messages with a pipeline rank."""
        return self.neighbours.get(rank, self.group)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a microbatch's inputs."""
        return self._between_neighbours(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a microbatch's outputs."""
        return self._between_neighbours(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a microbatch's outputs."""
        return self._between_neighbours(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a microbatch's inputs."""
        return self._between_neighbours(super().get_bwd_send_ops(bwd_chunk_id))

    def _between_neighbours(self, messages: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        return [
            dist.P2POp(one.op, one.tensor, one.peer, self.group_with(one.group_peer))
            for one in messages
        ]

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Run the forward of one microbatch, and keep the tensors for its backward.

        torch's own method searches nested inputs and outputs, and formats them for its log.
        """
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        if self._shapes:
            receives(self.submod, self._shapes[fwd_chunk_id].lengths)
        result = self.submod(*received, **self._microbatches[fwd_chunk_id])
        outputs = result if isinstance(result, tuple) else (result,)
        sendable = tuple(self._sendable(output) for output in outputs)
        if self._shapes:
            self._check_sent(sendable, self._shapes[fwd_chunk_id].sent)
        self.keep(fwd_chunk_id, sendable, received)
        return sendable

    def arriving(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Allocate the tensors that a microbatch receives from the stage before."""
        described = self.receives
        if self._shapes_of is not None:
            shapes = self._shapes_of(batch).received
            described = tuple(map(Tensor.new_empty, described, shapes))
        return [torch.empty_like(one, device=self.device) for one in described]

    def evaluate(self, batch: Mapping[str, Any], received: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward of a microbatch that has no backward."""
        if self._shapes_of is not None:
            receives(self.submod, self._shapes_of(batch).lengths)
        result = self.submod(*received, **batch)
        return result if isinstance(result, tuple) else (result,)

    def _check_sent(self, outputs: Sequence[Tensor], expected: Sequence[torch.Size]) -> None:
        """Exit if a stage's outputs have other sizes than the next stage expects.

        The expected sizes are inferred from two traces of the model, which cannot distinguish `n //
        2` from a half that is rounded up.
        """
        for output, size in zip(outputs, expected, strict=False):
            if output.shape != size:
                refuse(
                    f"stage {self.stage_index + 1} makes {list(output.shape)} of rows of this "
                    f"length, where its next stage expects {list(size)}",
                    fix="pad or cut rows to the planned length, or to a multiple of it",
                )

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward of one microbatch, or its half for the inputs."""
        self._backward_microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[InputGradients, list[dict[str, Any]] | None]:
        """Run a backward of one microbatch; the last backward also reduces the gradients."""
        set_last(self.submod, last_backward)
        if self.is_last and backward_type != "weight":
            self._start_from_weight(bwd_kwargs)
        if backward_type == "full":
            gradients = stage_backward(**bwd_kwargs)
            if self._buckets is not None and self._buckets.link is not None:
                self._buckets.finish()
            return _contiguous(gradients), None
        if backward_type == "weight":
            self._split_backward.backward_weights(bwd_kwargs["param_groups"])
            self._take_in()
            return (), None
        gradients, groups = self._split_backward.backward_inputs(**bwd_kwargs)
        self._take_in()
        return _contiguous(gradients), groups

    def _start_from_weight(self, bwd_kwargs: dict[str, Any]) -> None:
        """Start the backward of a loss from its weight, so that gradients are weighted."""
        output = bwd_kwargs["stage_output"]
        loss = output[0] if isinstance(output, tuple) else output
        weight = self._weights[self._backward_microbatch].to(loss.dtype)
        send_nothing_back(loss, weight)
        bwd_kwargs.update(stage_output=(loss,), output_grads=(weight.view_as(loss),))

    def _take_in(self) -> None:
        """Move gradients that bypassed the hooks into the buckets."""
        if self._buckets is not None:
            self._buckets.take_in()

    def _sendable(self, output: Tensor) -> Tensor:
        """Make a tensor contiguous for sending; for split backwards, copy it if it is a view."""
        output = output.contiguous()
        return output.clone() if self.splits_backward and output._is_view() else output

    def perform_reduce_grad(self, _: int) -> None:
        """Finish the reduction after the last microbatch; fully_shard reduces in every backward."""
        if self._buckets is not None and self._buckets.link is None:
            self._buckets.finish()


def _contiguous(gradients: InputGradients) -> InputGradients:
    return tuple(None if g is None else g.contiguous() for g in gradients)
