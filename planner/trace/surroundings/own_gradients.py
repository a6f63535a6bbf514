"""Notes where a model changes gradients, or takes some: code that is printed anew would not.

What `torch.autograd.grad` makes is one op in the graph, `autopar::gradient`, which nobody looks
into. Hooks leave no op at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import graph as autograd_graph

from autopar.planner.ops import GradientUse
from autopar.planner.trace.frames import calling_place
from autopar.planner.trace.record import Recording

_NODE: Any = Tensor.grad_fn
GRAD_FN = _NODE.__get__
_USES = {
    Tensor.register_hook: (GradientUse.CHANGED, "Tensor.register_hook"),
    GRAD_FN: (GradientUse.CHANGED, "Tensor.grad_fn"),  # nodes have hooks, too
    Tensor.retain_grad: (GradientUse.KEPT, "Tensor.retain_grad"),
}
_SAVING = "torch.autograd.graph.saved_tensors_hooks"
_TAKING = "torch.autograd.grad"


def worked_on(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], recording: Recording
) -> tuple[Tensor, ...] | None:
    """Note a call that changes or takes a gradient; return what it takes, None for any other."""
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
    """Return gradients as one op makes them; they learn if a graph of them is asked for."""
    given = [list(_listed(one)) for one in (outputs, inputs, grad_outputs)]
    gradients: list[Tensor] = torch.ops.autopar.gradient(*given)
    return tuple(gradients if create_graph else (one.detach() for one in gradients))


def _listed(tensors: Tensor | Iterable[Tensor | None] | None) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        yield from (one for one in tensors or () if one is not None)


@contextmanager
def saving_noted(recording: Recording) -> Iterator[None]:
    """Note where a model packs what its backward needs: printed code would keep it as it is.

    `save_on_cpu` keeps the same numbers elsewhere, so it may be left out.
    """
    plain = autograd_graph.saved_tensors_hooks.__enter__

    def enter(self: Any) -> None:
        if not isinstance(self, autograd_graph.save_on_cpu):
            recording.note_gradient(GradientUse.CHANGED, _SAVING, calling_place())
        plain(self)

    with patch.object(autograd_graph.saved_tensors_hooks, "__enter__", enter):
        yield
