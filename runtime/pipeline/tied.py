"""Keeps parameters equal that several pipeline stages hold, such as a tied embedding."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.optimizer.held_gradients import local, made_gradient
from autopar.runtime.ranks.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter under all its names, and the pipeline ranks that hold it."""

    names: tuple[str, ...]
    stages: tuple[int, ...]  # pipeline ranks in ascending order; the first one owns it


@dataclass(frozen=True, slots=True)
class Copy:
    """A tied parameter and the part of the model that holds it."""

    part: nn.Module
    parameter: nn.Parameter


class TiedWeights:
    """The ties of a model, seen from this pipeline stage.

    Holders exchange messages directly, so stages between them have no part in it, and all sum in
    the order of the stages, so the copies stay equal to the bit.
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
    def broadcast(self) -> None:
        """Give every copy the owner's values."""
        for tie, copies in self._held:
            values = self._swapped(tie, local(copies[0].parameter.detach()))
            for copy in copies:
                local(copy.parameter.detach()).copy_(values[0])

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients, each rank of what it holds of them.

        Under ZeRO-1 that is the same part on all stages if the tie is `apart` (see wrap()).
        """
        for tie, copies in self._held:
            gradients = [made_gradient(copy.part, copy.parameter) for copy in copies]
            if gradients[0].numel():
                mine = sum(gradients[1:], start=gradients[0])
                first, *others = self._swapped(tie, mine)
                total = first.clone()
                for other in others:  # one by one: an embedding is large
                    total.add_(other)
                for gradient in gradients:
                    gradient.copy_(total)

    def _swapped(self, tie: Tie, mine: Tensor) -> list[Tensor]:
        """Send a tensor to the other holders; return everybody's in the order of the stages."""
        mine = mine.contiguous()
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


def _copies(model_parts: Sequence[nn.Module], tie: Tie) -> list[Copy]:
    """Find the tie's distinct parameters in this process."""
    found: dict[int, Copy] = {}
    for part in model_parts:
        for name in tie.names:
            module, _, attribute = name.rpartition(".")
            with suppress(AttributeError):  # another stage's layer
                parameter = part.get_submodule(module)._parameters.get(attribute)
                if parameter is not None:
                    found.setdefault(id(parameter), Copy(part, parameter))
    if not found:
        raise KeyError(f"this stage has none of {', '.join(tie.names)}")
    return list(found.values())
