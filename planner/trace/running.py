"""Runs a model during a trace, and records its effects that the graph does not show.

Also records where a model changes or takes gradients, because printed code would not do so. In the
graph, `torch.autograd.grad` is one op, `autopar::gradient`. Hooks leave no op.

A backward that the model's code defines (of an autograd.Function, of an op of torch.library, of a
hook) is run once, on gradients of the right shapes, and traced apart from the step. A marker in the
graph, `autopar::backward`, names the tensors of the step that it reads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd import graph as autograd_graph
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

from autopar.planner.errors import text_of
from autopar.planner.graph.ops import LOSS_CALL, GradientUse
from autopar.planner.model.functions import plain_function, plain_functions
from autopar.planner.rules.table import has_row
from autopar.planner.trace.build import TracedStep
from autopar.planner.trace.model_checks import (
    calling_place,
    calling_spans,
    check_same_parameters,
    defined_at,
)
from autopar.planner.trace.nodes import SPANS
from autopar.planner.trace.record import RecordedBackward, TraceRecording, noting
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
        is_read = func is Tensor.register_hook and _read_tensor_hook(recording, *args)
        recording.note_gradient(use, how, calling_place(), is_read=is_read)
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


@contextmanager
def functions_noted(recording: TraceRecording) -> Iterator[None]:
    """Record calls of autograd.Function classes that are not torch's own, and plain functions."""
    original = inspect.getattr_static(Function, "apply")  # may be Python or C

    def apply(cls: type, *args: Any) -> Any:
        plain = original.__get__(None, cls)
        if cls.__module__.startswith("torch.") or recording.is_in_backward:
            return plain(*args)
        around = recording.open_calls[-1:]
        owner = recording.calls[around[0]].path if around else LOSS_CALL
        path, given = f"{owner}/{cls.__name__}", pytree.tree_flatten((args, {}))
        with recording.call(path, cls.__name__, given, is_function=True) as key:
            result = plain(*args)
        recording.returned(key, result)
        _read_function(recording, args, result)
        return result

    with ExitStack() as patches:
        patches.enter_context(patch.object(Function, "apply", classmethod(apply)))
        patches.enter_context(_module_hooks_read(recording))
        files = {type(module).__module__ for module in recording.modules.values()}
        for file in (sys.modules[name] for name in files if name in sys.modules):
            for name, value in plain_functions(vars(file)):
                place = str(value.__module__), value.__name__
                patches.enter_context(patch.object(file, name, noting(value, place, recording)))
        yield


# --- backwards of the model's own --------------------------------------------------------------


def note_library_op(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    recording: TraceRecording,
) -> None:
    """Trace the backward that `torch.library.register_autograd` gave to an op without a rule."""
    func = getattr(func, "default", func)  # the one overload of such ops
    is_op = isinstance(func, torch._ops.OpOverload)
    if is_op and not str(func).startswith(("aten.", "autopar.")) and not has_row(str(func)):
        names = [one.name for one in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        _read_function(recording, [given.get(name) for name in names], result)


def _read_function(recording: TraceRecording, args: Sequence[Any], result: Any) -> None:
    """Trace the backward of the Function that has computed a result, if it needs a gradient."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    with torch._C.DisableTorchFunction():
        nodes = [one.grad_fn for one in outputs if isinstance(one, Tensor)]
    context = next((one for one in nodes if hasattr(one, "_forward_cls")), None)
    if context is None:
        return
    own = context._forward_cls
    backward = own.vjp if own.backward is Function.backward else own.backward

    def run(gradients: Sequence[Tensor]) -> list[Any]:
        coming = iter(gradients)
        given = (_given(one, coming) for one in outputs)
        made = backward(context, *given)
        made = made if isinstance(made, tuple | list) else (made,)
        made = (*made, *[None] * len(args))  # an op's may be fewer: torch adds the others
        return [one for arg, one in zip(args, made, strict=False) if _learns(arg)]

    results = [one for one in outputs if _learns(one)]
    learning = [one for one in args if _learns(one)]
    traced = _traced(recording, *_shown_backward(own), run, learning, results)
    recording.backwards += [] if traced is None else [traced]


def _shown_backward(own: Any) -> tuple[str, Any]:
    """Return the name of a Function's backward, and its code; for an op, what it registered."""
    if not own.__module__.startswith("torch."):
        return f"{own.__name__}.backward", own.backward
    held = inspect.getclosurevars(own.backward).nonlocals
    function = getattr(held.get("info"), "_backward_fn", own.backward)
    return getattr(function, "__name__", "backward"), function


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _given(output: Any, gradients: Iterator[Tensor]) -> Tensor | None:
    """Return the gradient of an output; zeros for a tensor that has none, as torch gives them."""
    if _learns(output):
        return next(gradients)
    return torch.zeros_like(output) if isinstance(output, Tensor) else None


def _read_tensor_hook(recording: TraceRecording, tensor: Tensor, hook: Callable[..., Any]) -> bool:
    """Trace a hook of a tensor; return whether that succeeded."""

    def run(gradients: Sequence[Tensor]) -> list[Tensor]:
        (given,) = gradients
        made = hook(given)
        return [given if made is None else made]

    return _read_hook(recording, hook, run, [tensor])


def _read_hook(
    recording: TraceRecording,
    hook: Callable[..., Any],
    run: Callable[[Sequence[Tensor]], Sequence[Any]],
    tensors: Sequence[Tensor],
) -> bool:
    """Trace hooks that change the gradients of tensors; return whether that succeeded."""
    name = getattr(hook, "__name__", type(hook).__name__)
    traced = _traced(recording, name, hook, run, tensors, tensors)
    is_read = traced is None or traced.program is not None
    recording.backwards += [traced] if traced is not None and is_read else []
    return is_read


@contextmanager
def _module_hooks_read(recording: TraceRecording) -> Iterator[None]:
    """Trace the hooks of modules on their backwards, in the body."""
    enter, leave = BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
    given: dict[int, Sequence[Any]] = {}

    def entering(self: Any, args: Any) -> Any:
        given[id(self)] = args
        with torch._C.DisableTorchFunction():  # torch's own uses of gradients are not the model's
            return enter(self, args)  # type: ignore[no-untyped-call]

    def leaving(self: Any, made: Any) -> Any:
        outputs = made if isinstance(made, tuple) else (made,)
        inputs = given.pop(id(self), ())

        def run(gradients: Sequence[Tensor]) -> list[Any]:
            coming = iter(gradients)
            results = tuple(next(coming) if _learns(one) else None for one in (*outputs, *inputs))
            of_outputs, of_inputs = results[: len(outputs)], results[len(outputs) :]
            for hook in self.user_pre_hooks:
                changed = hook(self.module, of_outputs)
                of_outputs = of_outputs if changed is None else changed
            for hook in self.user_hooks:
                changed = hook(self.module, of_inputs, of_outputs)
                of_inputs = of_inputs if changed is None else changed
            pairs = zip((*outputs, *inputs), (*of_outputs, *of_inputs), strict=True)
            return [gradient for one, gradient in pairs if _learns(one)]

        hooks = [*self.user_pre_hooks, *self.user_hooks]
        learning = [one for one in (*outputs, *inputs) if _learns(one)]
        if not _read_hook(recording, hooks[0], run, learning):
            recording.note_module_hook(recording.calls[recording.innermost].path, is_read=False)
        with torch._C.DisableTorchFunction():
            return leave(self, made)  # type: ignore[no-untyped-call]

    with (
        patch.object(BackwardHook, "setup_input_hook", entering),
        patch.object(BackwardHook, "setup_output_hook", leaving),
    ):
        yield


def _traced(
    recording: TraceRecording,
    name: str,
    code: Any,
    run: Callable[[Sequence[Tensor]], Sequence[Any]],
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
) -> RecordedBackward | None:
    """Trace a backward: `run` turns the gradients of results into those of operands.

    The result is None if no gradient passes. What the code changes in the Python state is undone.
    """
    mode: Any = proxy_tensor.get_proxy_mode()
    if recording.is_in_backward or mode is None or not operands or not results:
        return None
    where = next(map(str, defined_at(plain_function(code))), "")
    own = RecordedBackward(name=name, where=where, call=recording.innermost)
    count, shapes = len(results), operands[0].fake_mode.shape_env  # type: ignore[attr-defined]
    before, recording.is_in_backward = recording.outside.snapshot(), True
    try:
        with proxy_tensor.disable_proxy_modes_tracing(), shapes.ignore_fresh_unbacked_symbols():
            gradients = map(torch.empty_like, results)
            trace = proxy_tensor.make_fx(lambda *given: run(given[:count]), pre_dispatch=True)
            program = trace(*gradients, *operands, *results)
        place = len(recording.backwards)
        own = _marked(own, program, mode.tracer, (*operands, *results), place)
    except Exception as error:  # the model's code may raise any error
        own = replace(own, why=_reason(error))
    finally:
        recording.is_in_backward = False
        before.put_back()
    return own


def _reason(error: Exception) -> str:
    if re.search("data-dependent|DataDependent", f"{type(error).__name__} {text_of(error)}"):
        return "the values of a tensor decide what it computes"
    first = (text_of(error).strip().splitlines() or [type(error).__name__])[0]
    return first if len(first) <= _MOST_CHARACTERS else f"{first[: _MOST_CHARACTERS - 1]}…"


_MOST_CHARACTERS = 120  # of the reason why a backward cannot be traced


def _marked(
    own: RecordedBackward, program: fx.GraphModule, tracer: Any, given: Sequence[Tensor], place: int
) -> RecordedBackward:
    """Mark in the step where a backward was traced; `given` are the program's last inputs."""
    inputs = program.graph.find_nodes(op="placeholder")[-len(given) :]
    held = {
        one: getattr(program, str(one.target)) for one in program.graph.find_nodes(op="get_attr")
    }
    read = dict(zip(inputs, given, strict=True)) | held
    slots = {one: proxy_tensor.get_proxy_slot(tensor, tracer, None) for one, tensor in read.items()}
    marked = {one.name: slot.proxy.node for one, slot in slots.items() if slot is not None}
    marker: Any = torch.ops.autopar.backward.default
    node = tracer.create_node("call_function", marker, (list(marked.values()), str(place)), {})
    node.meta["val"] = None
    return replace(own, program=program, marked=tuple(marked))


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
