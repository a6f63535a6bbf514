"""Runs a model during a trace, and records its effects that the graph does not show.

Also records where a model changes or takes gradients, because printed code would not do so. In the
graph, `torch.autograd.grad` is one op, `autopar::gradient`. Hooks leave no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.autograd import graph as autograd_graph
from torch.fx.proxy import TracerBase

from autopar.planner.graph.ops import GradientUse
from autopar.planner.trace.build import TracedStep
from autopar.planner.trace.model_checks import calling_place, calling_spans, check_same_parameters
from autopar.planner.trace.nodes import SPANS
from autopar.planner.trace.record import TraceRecording
from autopar.planner.trace.traps import attributes_kept, left_behind


@contextmanager
def expressions_noted() -> Iterator[None]:
    """Record, for each node of a graph, the expressions of the model that make it.

    They replace the exporter's stack traces, which only have lines and take longer.
    """
    plain = TracerBase.create_node

    def noting(self: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
        self.record_stack_traces = False
        node = plain(self, *args, **kwargs)
        node.meta.setdefault(SPANS, calling_spans(_loss_of.__code__))
        return node

    with patch.object(TracerBase, "create_node", noting):
        yield


_NODE: Any = Tensor.grad_fn
GRAD_FN = _NODE.__get__
_USES = {
    Tensor.register_hook: (GradientUse.CHANGED, "Tensor.register_hook"),
    GRAD_FN: (GradientUse.CHANGED, "Tensor.grad_fn"),  # the autograd node may get hooks
    Tensor.retain_grad: (GradientUse.KEPT, "Tensor.retain_grad"),
}
_SAVING = "torch.autograd.graph.saved_tensors_hooks"
_TAKING = "torch.autograd.grad"


def note_gradient_use(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    recording: TraceRecording,
) -> tuple[Tensor, ...] | None:
    """Record a call that changes or takes gradients; return the taken ones, or None."""
    if func in _USES:
        use, how = _USES[func]
        recording.note_gradient(use, how, calling_place())
    if func is not torch.autograd.grad:
        return None
    recording.note_gradient(GradientUse.TAKEN, _TAKING, calling_place())
    return _taken(*args, **kwargs)


def _taken(
    outputs: Tensor | Iterable[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Tensor | Iterable[Tensor | None] | None = None,
    _: bool | None = None,
    create_graph: bool = False,
    **__: Any,
) -> tuple[Tensor, ...]:
    """Return gradients as results of one op; they require gradients if create_graph is set."""
    given = [list(_listed(one)) for one in (outputs, inputs, grad_outputs)]
    gradients: list[Tensor] = torch.ops.autopar.gradient(*given)
    return tuple(gradients if create_graph else (one.detach() for one in gradients))


def _listed(tensors: Tensor | Iterable[Tensor | None] | None) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        yield from (one for one in tensors or () if one is not None)


@contextmanager
def saving_noted(recording: TraceRecording) -> Iterator[None]:
    """Record where a model uses saved-tensor hooks, which printed code would not run.

    `save_on_cpu` does not change values, so it is ignored.
    """
    plain = autograd_graph.saved_tensors_hooks.__enter__

    def enter(self: Any) -> None:
        if not isinstance(self, autograd_graph.save_on_cpu):
            recording.note_gradient(GradientUse.CHANGED, _SAVING, calling_place())
        plain(self)

    with patch.object(autograd_graph.saved_tensors_hooks, "__enter__", enter):
        yield


def _loss_of(step: TracedStep, batch: Mapping[str, Any], recording: TraceRecording) -> torch.Tensor:
    """Run a step and return its loss; record and undo its changes of the Python state."""
    recording.restart()
    outside, found = recording.outside, recording.found
    at_first = outside.snapshot()
    try:
        if found is not None:
            found.put()
        before = at_first if found is None else outside.snapshot()
        kept = attributes_kept(step.model) if found is None else nullcontext()
        parameters = dict(step.model.named_parameters())
        recording.is_running = True
        with kept:
            loss = step.run(batch, noted=recording.noting_loss)
            check_same_parameters(step.model, parameters, str(step.path))
        recording.is_running = False
        after = outside.snapshot()
        recording.at_end = frozenset(leaf.comparable for leaf in after.leaves.values())
        recording.changed = before.changes_to(after)
        recording.left = left_behind(before, after)
    finally:
        at_first.put_back()
    return loss


def traced_step(
    step: TracedStep,
    tensors: dict[str, Any],
    constants: dict[str, Any],
    recording: TraceRecording,
) -> torch.nn.Module:
    """Return a module whose forward names the batch's keys, as the exporter requires."""

    class Traced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = step.model

    def run(**batch: Any) -> torch.Tensor:
        return _loss_of(step, {**batch, **constants}, recording)

    names = ", ".join(tensors)
    pairs = ", ".join(f"{key}={key}" for key in tensors)
    scope: dict[str, Any] = {"run": run}
    exec(f"def forward(self, {names}):\n    return run({pairs})", scope)  # keys are identifiers
    Traced.forward = scope["forward"]
    return Traced()
