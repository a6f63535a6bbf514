"""Adapts torch's pipeline stage: buffers only for microbatches in flight, a backward in two halves.

Up to torch 2.14 a stage allocates receive buffers for all microbatches of a step. Later versions
allocate a buffer at the receive and free it after use, as `_EarlierStage` does here. Later versions
also keep forward results elsewhere, and let fully_shard reduce once at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import pipelining
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    reverse_closure,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.stage import _RecvInfo

from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.recompute.running_again import recomputes
from autopar.runtime.tensor.chunked_logits import chunks_logits

InputGradients: TypeAlias = tuple[Tensor | None, ...]
# earlier versions cannot be told shapes, or expect a gradient for every received tensor
PIPELINED_TORCH = (2, 13)


def refuse_earlier_torch() -> None:
    """Exit if torch is too old for pipelines."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < PIPELINED_TORCH:
        least = ".".join(map(str, PIPELINED_TORCH))
        refuse(
            f"pipelines need torch {least} or later; this is {torch.__version__}",
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


_CRASHING = "NativeGroupNormBackward0"


class SplitBackward:
    """The two halves of a stage's backward: gradients of its inputs, and later of its weights.

    In the autograd graph, torch's own split follows each weight to the op where its path to the
    output meets the path of an input. It silently loses weights whose path meets none: all weights
    of a stage whose inputs need no gradient, or a second embedding whose rows go straight to the
    next stage. Here such weights get their gradients in the first half. So do all weights

    - of a stage that recomputes activations, which two halves would do twice;
    - of a stage whose loss makes its logits in chunks, and their gradients at the same time;
    - of a stage where one weight meets the path in several places (the position bias that all
      layers of T5 add): torch would count it several times, and run collectives in different orders
      on the ranks;
    - of a stage that computes one of its outputs from another: between the halves torch detaches
      all outputs, and the graph that the second half needs would be gone;
    - of a stage on the CPU with a group norm: its kernel crashes on channels-last inputs that need
      no gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Names of the weights with gradients in the first half; found at the first microbatch
        self._early: frozenset[str] | None = None
        # Whether the backward is not split at all; the first microbatch may set it, too
        self._is_whole = recomputes(module) or chunks_logits(module)

    def backward_inputs(
        self,
        *,
        stage_output: Sequence[Tensor],
        output_grads: Sequence[Tensor | None],
        input_values: Sequence[Any],
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        """Return the gradients of the inputs, and the data that the second half will need."""
        if self._early is None:
            self._examine(stage_output, input_values)
        if self._is_whole:
            return _backward_at_once(stage_output, output_grads, input_values), []
        if self._early:
            self._accumulate_early(stage_output, output_grads)
        result: tuple[tuple[Tensor | None, ...], list[dict[str, Any]]] = stage_backward_input(
            list(stage_output),
            output_grads,  # type: ignore[arg-type]  # None for an output that needs no gradient
            list(input_values),
            iter(self._weights(early=False).values()),
        )
        return result

    def backward_weights(self, param_groups: list[dict[str, Any]]) -> None:
        """Add the gradients of the weights that `backward_inputs` postponed."""
        stage_backward_weight(iter(self._weights(early=False).values()), param_groups)

    def _weights(self, *, early: bool) -> dict[str, nn.Parameter]:
        chosen = self._early or frozenset()
        return {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and (name in chosen) == early
        }

    def _examine(self, stage_output: Sequence[Tensor], input_values: Sequence[Any]) -> None:
        """Find the weights whose path to an output meets no input's path, and whether to split."""
        early = set[str]()
        if not self._is_whole:
            roots = _nodes(stage_output)
            reverse = construct_reverse_graph(roots)
            on_cpu = any(output.is_cpu for output in stage_output)
            if on_cpu and any(node.name() == _CRASHING for node in (*roots, *reverse)):
                self._is_whole = True
            if any(reverse.get(output.grad_fn) for output in stage_output if output.grad_fn):
                self._is_whole = True
            of_inputs, _ = reverse_closure(_nodes(input_values), set(), reverse)
            for name, parameter in self._weights(early=False).items():
                alone, meeting = reverse_closure(_nodes([parameter]), of_inputs, reverse)
                if alone.intersection(roots):
                    early.add(name)
                elif len(meeting) > 1:
                    self._is_whole = True
        self._early = frozenset(early)

    def _accumulate_early(
        self, stage_output: Sequence[Tensor], output_grads: Sequence[Tensor | None]
    ) -> None:
        weights = tuple(self._weights(early=True).values())
        pairs = [(o, g) for o, g in zip(stage_output, output_grads, strict=True) if o.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            weights,
            [gradient for _, gradient in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and weight.grad is None:
                weight.grad = gradient
            elif gradient is not None:
                weight.grad += gradient


def _backward_at_once(
    stage_output: Sequence[Tensor],
    output_grads: Sequence[Tensor | None],
    input_values: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = stage_backward(
        stage_output, output_grads, list(input_values)
    )
    for output in stage_output:
        output.detach_()  # its graph is not needed any more
    return gradients


def _nodes(values: Iterable[Any]) -> list[Node]:
    """Return the autograd nodes of the tensors that need a gradient."""
    tensors = (v for v in values if isinstance(v, Tensor) and v.requires_grad)
    return [node for node in map(_get_grad_fn_or_grad_acc, tensors) if node is not None]
