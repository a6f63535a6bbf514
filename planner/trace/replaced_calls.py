"""Calls of torch that tracing changes, or refuses.

- Losses without a reduction get their correct shape. With a symbolic number of rows,
  `cross_entropy(…, reduction="none")` of [rows, classes] has no dims on meta;
  of [rows, classes, 1] it has the right ones.
- A slice of a constant stays an op even if it takes a whole dim: for shorter rows,
  `self.mask[:, :, :t, :t]` takes a part.
- A function that the model checkpoints runs once, and the line is recorded. The plan chooses which
  layers are recomputed; `autopar plan` prints a note about the model's own checkpointing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._subclasses import fake_impls
from torch.nn import functional
from torch.nn.utils import stateless
from torch.utils import checkpoint

from autopar.planner.errors import TraceError
from autopar.planner.trace.model_checks import TORCH, calling_place, is_library_file

_OPS = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)


@contextmanager
def ctc_traced() -> Iterator[None]:
    """Make the CTC loss's op return a loss per row, and an empty tensor for the backward."""
    with patch.dict(fake_impls.op_implementations_dict, dict.fromkeys(_OPS, _ctc_losses)):
        yield


def _ctc_losses(mode: Any, _op: Any, log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    with mode:
        rows = log_probs.new_empty(log_probs.shape[1:-1])
        return rows, log_probs.new_empty(0)


_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})


def loss_of_each_row(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Compute a loss with reduction "none" in its correct shape; return None for other calls."""
    if func not in _LOSSES or kwargs.get("reduction") != "none" or len(args) < 2:
        return None
    scores, classes, *rest = args
    if not scores.is_meta or scores.dim() != 2 or classes.dim() != 1:
        return None
    losses: Tensor = func(scores.unsqueeze(2), classes.unsqueeze(1), *rest, **kwargs)
    return losses.squeeze(1)


def sliced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Compute `x[…]` with an op for each slice that takes a whole dim; return None without one."""
    if func is not torch.Tensor.__getitem__ or kwargs:
        return None
    x, index = args
    asked = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, slice) for one in asked) or len(asked) > x.ndim:
        return None
    sizes = tuple(x.shape)
    if not all(isinstance(size, int) for size in sizes):
        return None
    whole = [dim for dim, one in enumerate(asked) if _takes_all(one, sizes[dim])]
    if not whole:
        return None
    rest = tuple(slice(None) if dim in whole else one for dim, one in enumerate(asked))
    result: torch.Tensor = func(x, rest)
    for dim in whole:
        result = torch.ops.aten.slice.Tensor(result, dim, 0, sizes[dim])
    return result


def _takes_all(one: slice, size: int) -> bool:
    is_plain = one.start in (None, 0) and one.step in (None, 1)
    return is_plain and type(one.stop) is int and one.stop == size > 1


_OP = torch.ops.aten._grouped_mm.default


@contextmanager
def grouped_products_traced() -> Iterator[None]:
    """Give grouped matrix products their shape in every dtype; torch's meta function wants bf16."""
    with patch.dict(fake_impls.op_implementations_dict, {_OP: _result}):
        yield


def _result(mode: Any, _op: Any, rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> Tensor:
    with mode:
        return rows.new_empty((*rows.shape[:-1], matrices.shape[-1]))


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Make inference_mode act as no_grad, because the exporter does not distinguish them.

    A method of the class is patched, because the model's decorators are already instances of it.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.mode
        )
        self._inference_mode_context.__enter__()

    with patch.object(torch.inference_mode, "__enter__", enter):
        yield


def without_outs(program: torch.nn.Module) -> None:
    """Replace every op that has an `out` argument by the plain op and a copy."""
    for part in program.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                plain = _plain(node)
                if plain is not None:
                    _replace(node, plain)


def _plain(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the overload of an op without the `out` argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or "out" not in node.kwargs:
        return None
    given = _inputs_of(node.target)
    packet: Any = node.target.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next(
        (one for one in overloads if one is not node.target and _inputs_of(one) == given), None
    )


def _inputs_of(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    arguments = op._schema.arguments
    return [(one.name, str(one.type)) for one in arguments if not one.is_out]


def _replace(node: fx.Node, plain: torch._ops.OpOverload) -> None:
    written, others = node.kwargs["out"], {k: v for k, v in node.kwargs.items() if k != "out"}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(plain, node.args, others)
        copied = node.graph.call_function(torch.ops.aten.copy_.default, (written, made))
    made.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
    copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    node.graph.erase_node(node)


# generators of torch that run around the forward of a checkpointed function
_AROUND_A_FORWARD = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # of torch 2.15
)


@contextmanager
def own_checkpoints_noted() -> Iterator[list[str]]:
    """Collect `file:line` of the model's own checkpointing."""
    places: list[str] = []

    def around(*_: Any, **__: Any) -> Iterator[None]:
        places.append(calling_place())
        yield

    class Reentrant:
        """Replaces the reentrant checkpoint's Function, whose forward runs without gradients."""

        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            places.append(calling_place())
            return function(*args)

    with ExitStack() as patches:
        patches.enter_context(patch.object(checkpoint, "CheckpointFunction", Reentrant))
        for name in _AROUND_A_FORWARD:
            if hasattr(checkpoint, name):
                patches.enter_context(patch.object(checkpoint, name, around))
        yield places


_PACKS = (
    "the model packs sequences by their lengths, so that shapes depend on numbers",
    "shapes that follow from the shapes of the batch",
    "give the layer the padded sequences, and read each row's last state: "
    "out[torch.arange(out.shape[0]), lengths - 1]",
)
_RUNS_BACKWARD = (
    "the forward itself runs a backward (backward()), whose gradients stay on the parameters",
    "one backward for each step, which the script runs",
    "take a gradient by torch.autograd.grad(…, create_graph=True), and add up losses",
)
_LEARNS_OUTSIDE = (
    "the forward or the loss computes with a trainable parameter that is not the model's",
    "parameters of modules of the model: these are built, split and optimized",
    "make it, or the module that has it, a part of the model, and let forward compute with it "
    "(return the loss, or what it needs); if it is not to be trained: requires_grad_(False)",
)
_DERIVES = (
    "the forward differentiates a function by torch.func, which has no plain graph",
    "gradients that torch.autograd computes",
    "torch.autograd.grad(…, create_graph=True)",
)
_REFUSED = {
    torch.Tensor.backward: _RUNS_BACKWARD,
    torch._VF._pack_padded_sequence: _PACKS,
}


_SWAPS = (
    "the forward runs a module with other weights than its own (functional_call)",
    "modules that compute with their own weights: scripts call them, or print their code",
    "write what the module computes as a function of the weights (F.linear(x, weight, bias))",
)


def refuse_call(func: Callable[..., Any]) -> None:
    """Raise TraceError for a function that no plan supports."""
    refused = _REFUSED.get(func) or (_DERIVES if _is_derived() else None)
    if refused is not None:
        raise _refusal(*refused)


def _refusal(found: str, expected: str, fix: str) -> TraceError:
    return TraceError(found, where=calling_place(), expected=expected, fix=fix)


def refuse_learning_outside(args: Iterable[Any]) -> None:
    """Raise TraceError if code computes with a trainable parameter that is not the model's.

    During a trace stand-ins replace the model's own parameters, so an nn.Parameter is not one of
    them.
    """
    if any(type(one) is torch.nn.Parameter and one.requires_grad for one in args):
        raise _refusal(*_LEARNS_OUTSIDE)


def _is_derived() -> bool:
    """Whether torch.func is computing a derivative."""
    outer = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return outer is not None and outer.key() in (kinds.Grad, kinds.Jvp)


@contextmanager
def refused_weight_swaps() -> Iterator[None]:
    """Raise in the body if the model runs a module with other weights than its own."""
    plain = stateless._functional_call

    @wraps(plain)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if _is_of_model(sys._getframe(1)):
            raise _refusal(*_SWAPS)
        return plain(*args, **kwargs)

    with patch.object(stateless, "_functional_call", checked):
        yield


def _is_of_model(frame: FrameType | None) -> bool:
    """Whether the next frame outside torch is the model's."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)
