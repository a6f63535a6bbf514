"""Splits a stage's backward into two halves: gradients of its inputs, and later of its weights.

In the autograd graph, torch's own split follows each weight to the op where its path to the output
meets the path of an input. It silently loses weights whose path meets none: all weights of a stage
whose inputs need no gradient, or a second embedding whose rows go straight to the next stage. Here
such weights get their gradients in the first half. So do all weights

- of a stage that recomputes activations, which two halves would do twice;
- of a stage whose loss makes its logits in chunks, and their gradients at the same time;
- of a stage where one weight meets the path in several places (the position bias that all layers of
  T5 add): torch would count it several times, and run collectives in different orders on the ranks;
- of a stage that computes one of its outputs from another: between the halves torch detaches all
  outputs, and the graph that the second half needs would be gone;
- of a stage on the CPU with a group norm: its kernel crashes on channels-last inputs that need no
  gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    reverse_closure,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from autopar.runtime.recompute.running_again import recomputes
from autopar.runtime.tensor.chunked_logits import chunks_logits

_CRASHING = "NativeGroupNormBackward0"


class SplitBackward:
    """The two halves of the backward of one stage."""

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
