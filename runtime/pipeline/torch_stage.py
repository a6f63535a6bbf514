"""Adapts torch's pipeline stage: it has buffers only for microbatches in flight.

Up to torch 2.14 a stage allocates receive buffers for all microbatches of a step. Later versions
allocate a buffer at the receive and free it after use, as `_EarlierStage` does here. Later versions
also keep forward results elsewhere, and let fully_shard reduce once at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining.stage import _RecvInfo

from autopar.runtime.ranks.refusal import refuse

InputGradients: TypeAlias = tuple[Tensor | None, ...]
# stages of earlier versions lack shapes, or expect a gradient for every received tensor
PIPELINED_TORCH = (2, 13)


def refuse_earlier_torch() -> None:
    """Exit if torch is too old for pipelines."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < PIPELINED_TORCH:
        least = ".".join(map(str, PIPELINED_TORCH))
        refuse(
            f"pipelines want torch {least} or later; this is {torch.__version__}",
            fix=f"pip install 'torch>={least}', or plan with --max-pp 1",
        )


def resize(infos: Sequence[_RecvInfo], shapes: Sequence[torch.Size]) -> None:
    """Change the shapes of receive buffers, in the order of the received tensors."""
    for info, shape in zip(infos, shapes, strict=False):
        if info.tensor_meta is not None:
            stride = torch.empty(shape, device="meta").stride()
            info.tensor_meta = replace(info.tensor_meta, shape=shape, stride=stride)


class _EarlierStage(pipelining.PipelineStage):
    """The stage for torch 2.13 and 2.14."""

    def keep(self, chunk: int, outputs: tuple[Tensor, ...], inputs: Sequence[Tensor]) -> None:
        """Keep the tensors for the backward of a microbatch."""
        self.fwd_cache[chunk] = (outputs, list(inputs))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers for a microbatch's inputs, and return the receives."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers for a microbatch's output gradients, and return the receives."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a backward; an input without a gradient gets zeros of its shape."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache.get(bwd_chunk_id)
        if gradients is not None:
            infos = self.args_recv_info[bwd_chunk_id]
            pairs = zip(gradients, infos, strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(self._sent_back(*pair) for pair in pairs)

    def _sent_back(self, gradient: Tensor | None, info: _RecvInfo) -> Tensor | None:
        meta = info.tensor_meta
        if gradient is not None or meta is None or not meta.requires_grad or info.is_root_arg:
            return gradient
        return meta.to_tensor(self.device).detach().zero_()

    def set_local_bwd_input(self, next_stage_bwd_outputs: InputGradients, mb_index: int) -> None:
        """Take gradients from the next stage on this same rank (the turn of a V)."""
        infos = self.grad_recv_info[mb_index]
        for info, gradient in zip(infos, next_stage_bwd_outputs, strict=True):
            if gradient is None and info.tensor_meta is not None:
                self._allocate((info,))
                info.buffer.zero_()
            else:
                info.buffer = gradient

    def _allocate(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = info.tensor_meta.to_tensor(self.device).detach()

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        tensors: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        self._forget(self.args_recv_info[fwd_chunk_id])
        return tensors

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> InputGradients:
        gradients: InputGradients = super()._retrieve_recv_grads(bwd_chunk_id)
        self._forget(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def _forget(self, infos: Sequence[_RecvInfo]) -> None:
        """Free the buffers; the autograd graph keeps the tensors that it needs."""
        for info in infos:
            info.buffer = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info = {
            chunk: _without_buffers(self.args_recv_info[0]) for chunk in range(num_microbatches)
        }

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info = {
            chunk: _without_buffers(self.grad_recv_info[0]) for chunk in range(num_microbatches)
        }


def _without_buffers(infos: Sequence[_RecvInfo]) -> tuple[_RecvInfo, ...]:
    return tuple(
        _RecvInfo(
            input_name=info.input_name,
            source=info.source,
            buffer=None,
            tensor_meta=info.tensor_meta,
            is_root_arg=info.is_root_arg,
        )
        for info in infos
    )


class _LaterStage(pipelining.PipelineStage):
    """The stage for torch 2.15 and later."""

    def keep(self, chunk: int, outputs: tuple[Tensor, ...], inputs: Sequence[Tensor]) -> None:
        """Keep the tensors for the backward of a microbatch."""
        own: Any = self
        own._forward_chunk_states[chunk] = own._make_forward_chunk_state(outputs, list(inputs))

    def start_gradient_reduction(self) -> None:
        """Do nothing: fully_shard has reduced in every backward."""

    def wait_for_gradient_reduction(self, _: int) -> None:
        """Do nothing: fully_shard has reduced in every backward."""

    def _output_slot_is_releasable(self, _: object) -> tuple[bool, str]:
        return False, "a backward in halves starts from it"


if TYPE_CHECKING or not hasattr(_RecvInfo, "allocate_buffer"):
    TorchStage = _EarlierStage
else:
    TorchStage = _LaterStage
