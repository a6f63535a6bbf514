"""Records every module call while the exporter runs, and runs equal blocks only once.

During a trace each module's forward is wrapped. The wrapper adds two nodes to the graph that
compute nothing: `autopar::enter` has the tensors among the call's arguments, `autopar::leave` those
in its result; `convert` reads and removes both. For a module with hooks, the whole call is wrapped,
because the call runs the hooks.

If a block repeats one that was traced (its template), it is not run. The graph has one node
`autopar::replay` instead, for which `convert` replays the template: it reads the template's nodes
once more, with the arguments and the parameters of this block.

A custom autograd.Function is recorded like a module (see `running`): the exporter would inline its
forward and silently lose its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch.fx import node as fx_node
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from autopar.planner.graph.ops import (
    LOSS_CALL,
    LOSS_FUNCTION,
    GradientUse,
    OwnGradient,
    StateChange,
)
from autopar.planner.model.functions import has_backward_hooks, has_hooks
from autopar.planner.model.outside import (
    StateScope,
    StateSnapshot,
    StateValue,
    runs_torch_alone,
)
from autopar.planner.trace.build import Loss
from autopar.planner.trace.fold import (
    Template,
    attribute_ids,
    call_key,
    repeated_blocks,
    template_of,
)
from autopar.planner.trace.traps import LeftBehind, assigned_buffers_written, left_by_call

TENSOR = object()  # stands for a tensor among the leaves of a border
ENTER, LEAVE, REPLAY = "autopar.enter.default", "autopar.leave.default", "autopar.replay.default"
BEGIN, END = "autopar.begin.default", "autopar.end.default"  # around a plain function
BACKWARD = "autopar.backward.default"  # where a backward of the model's own was traced
_CALL = "_call_impl"  # the method of a module that runs hooks and forward


class Attributes(dict[str, Any]):
    """The attributes of a dataclass that a call returned; pytree finds the tensors in them."""


pytree.register_pytree_node(
    Attributes,
    lambda made: (list(made.values()), list(made)),
    lambda values, names: Attributes(zip(names, values, strict=True)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """The arguments or the result of a call, flattened by pytree, with TENSOR for each tensor."""

    leaves: tuple[Any, ...]
    spec: Any


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """A call of a module, of a custom autograd.Function, or of a plain function.

    A plain function has the name of its module as `path`, and its own name as `name`.
    """

    path: str
    name: str  # of the class
    arguments: Border
    result: Border | None = None  # None until the call returns
    parent: str | None = None
    is_function: bool = False  # a custom autograd.Function
    mode_is_set: bool = False  # the module is in another mode than before the step
    template: Template | None = None  # replayed instead of running the call
    changed_state: tuple[StateValue, ...] = ()  # the Python state that the call changed


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBackward:
    """A backward that the model's code defines, traced apart from the step (see `running`).

    `program` takes gradients of results, and returns those of operands. `marked` are the tensors of
    the step that the marker names: the operands, the results, and what the program reads.
    """

    name: str  # such as "Scale.backward"
    where: str  # file:line
    call: str  # the recorded call around it
    program: fx.GraphModule | None = None  # None if it cannot be traced
    why: str = ""  # the reason for that
    marked: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class TraceRecording:
    """The record of a trace; filled while the exporter runs, then read by `convert`."""

    outside: StateScope
    blocks: Mapping[str, Hashable]
    of_torch: Set[str]  # paths of modules whose calls run torch's code alone
    found: LeftBehind | None  # the Python state that an earlier step left; None for the first step
    counts: Counter[str] = field(default_factory=Counter)
    open_calls: list[str] = field(default_factory=list)
    calls: dict[str, RecordedCall] = field(default_factory=dict)
    templates: dict[Hashable, Template] = field(default_factory=dict)
    own_gradients: list[OwnGradient] = field(default_factory=list)
    backwards: list[RecordedBackward] = field(default_factory=list)
    is_in_backward: bool = False  # whether a backward that the model defines is being traced
    modes: dict[str, bool] = field(default_factory=dict)  # of modules, before the step
    at_end: frozenset[Any] = frozenset()  # comparable forms of all values after the step
    is_running: bool = False  # whether the step itself is running
    # each place of the Python state that the step changed → whether its value is compared by
    # content (see StateValue)
    changed: Mapping[str, bool] = field(default_factory=dict)
    left: LeftBehind = field(default_factory=LeftBehind)  # for the next step

    def restart(self) -> None:
        """Forget an earlier pass: the exporter may run the model more than once."""
        lists = self.open_calls, self.own_gradients, self.backwards
        for found in (self.counts, self.calls, self.templates, *lists):
            found.clear()
        self.modes = {path: module.training for path, module in self.modules.items()}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules of the model, by their paths."""
        return self.outside.modules

    def seen_by(self, call: str) -> StateSnapshot:
        """Return a snapshot of the Python state that a call may change."""
        path = self.calls[call].path
        scope = self.outside.around(path)
        return (replace(scope, files=()) if path in self.of_torch else scope).snapshot()

    def state_change(self, call: str) -> StateChange:
        """Return whether a call changed Python state, and whether the change outlives the step."""
        changed = self.calls[call].changed_state
        if not changed:
            return StateChange.NOTHING
        stays = all(one.is_content or one.comparable in self.at_end for one in changed)
        return StateChange.BEHIND if stays else StateChange.FOR_A_WHILE

    @property
    def innermost(self) -> str:
        """The key of the innermost call that is running; LOSS_CALL outside of the model."""
        return self.open_calls[-1] if self.open_calls else LOSS_CALL

    def note_gradient(
        self, use: GradientUse, how: str, where: str, *, is_read: bool = False
    ) -> None:
        """Record how the innermost call, or the loss, uses gradients: each use once per call."""
        if self.is_in_backward:
            return
        own = OwnGradient(call=self.innermost, use=use, how=how, where=where, is_read=is_read)
        like = [one for one in self.own_gradients if (one.call, one.use) == (own.call, use)]
        if any(one.is_read for one in like) and not is_read:  # the worse use stands for both
            self.own_gradients.remove(like.pop())
        if not like:
            self.own_gradients.append(own)

    def note_module_hook(self, path: str, *, is_read: bool) -> None:
        """Record that hooks change the gradients of a module."""
        how, where = "Module.register_full_backward_hook", f"module {path or '(root)'}"
        self.note_gradient(GradientUse.CHANGED, how, where, is_read=is_read)

    def noting_loss(self, loss: Loss) -> Loss:
        """Wrap the model file's loss function so that its call is recorded."""
        return noting(loss, LOSS_FUNCTION, self)

    @contextmanager
    def call(
        self, path: str, name: str, given: tuple[list[Any], Any], **facts: Any
    ) -> Iterator[str]:
        """Record a call of a module while the body runs it, and mark its beginning.

        Yield its key, which is `path@n` from the second call on. `given` are its flattened
        arguments.
        """
        key = f"{path}@{self.counts[path]}" if self.counts[path] else path
        self.counts[path] += 1
        parent = self.open_calls[-1] if self.open_calls else None
        self.open_calls.append(key)
        arguments = _mark(torch.ops.autopar.enter, *given, key)
        self.calls[key] = RecordedCall(
            path=path, name=name, arguments=arguments, parent=parent, **facts
        )
        try:
            yield key
        finally:
            self.open_calls.pop()

    def returned(self, key: str, result: Any) -> None:
        """Record the result of a call of a module, and mark its end."""
        seen = pytree.tree_flatten(result)
        self.calls[key].result = _mark(torch.ops.autopar.leave, *seen, key)


_RECORDINGS: list[TraceRecording] = []  # of the traces under way, the innermost last


@contextmanager
def recorded(
    model: nn.Module, outside: StateScope, *, fold: bool, found: LeftBehind | None
) -> Iterator[TraceRecording]:
    """Wrap the modules of a model during a trace; with `fold`, repeated blocks run only once."""
    modules = outside.modules
    names = {path: _CALL if has_hooks(module) else "forward" for path, module in modules.items()}
    own = {path: module.__dict__.get(names[path]) for path, module in modules.items()}
    blocks = repeated_blocks(model) if fold else {}
    of_torch = {path for path, module in modules.items() if runs_torch_alone(module)}
    recording = TraceRecording(outside=outside, blocks=blocks, of_torch=of_torch, found=found)
    _RECORDINGS.append(recording)
    try:
        for path, module in modules.items():
            original = getattr(module, names[path])
            module.__dict__[names[path]] = _noting_call(module, path, original, recording)
        yield recording
    finally:
        _RECORDINGS.pop()
        for path, module in modules.items():
            module.__dict__.pop(names[path], None)
            if own[path] is not None:  # a forward assigned to the instance
                module.__dict__[names[path]] = own[path]


def _marker_library() -> torch.library.Library:
    """Define the marker ops.

    They stay defined: if they were removed after a trace, graphs and torch's caches would point to
    nothing.
    """
    library = torch.library.Library("autopar", "FRAGMENT")
    markers = ("enter", "leave", "begin", "end", "backward")
    for name in markers:
        library.define(f"{name}(Tensor[] tensors, str call) -> ()")
    library.define("replay(Tensor[] tensors, str call) -> Tensor[]")
    library.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] given) -> Tensor[]")

    def nothing(tensors: list[torch.Tensor], call: str) -> None:
        del tensors, call

    def replay(tensors: list[torch.Tensor], call: str) -> list[torch.Tensor]:
        template = _RECORDINGS[-1].calls[call].template
        assert template is not None
        return [form.empty(tensors[0].device) for form in template.forms]

    def gradient(_: Any, inputs: list[torch.Tensor], given: Any) -> list[torch.Tensor]:
        del given
        return [torch.empty_like(one) for one in inputs]

    torch.library.register_fake("autopar::replay", replay, lib=library)
    torch.library.register_fake("autopar::gradient", gradient, lib=library)
    for name in markers:
        torch.library.register_fake(f"autopar::{name}", nothing, lib=library)
        # otherwise dead code elimination removes them
        fx_node.has_side_effect(getattr(torch.ops.autopar, name).default)
    return library


_MARKERS = _marker_library()


def _noting_call(
    module: nn.Module, path: str, original: Callable[..., Any], recording: TraceRecording
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if recording.is_in_backward:
            return original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        structure = recording.blocks.get(path)
        # equal for calls that may replay one template; None: the call always runs
        folded = None if structure is None else call_key(structure, leaves, spec)
        template = recording.templates.get(folded)
        mode_is_set = module.training is not recording.modes[path]
        facts = {"mode_is_set": mode_is_set, "template": template}
        with recording.call(path, type(module).__name__, (leaves, spec), **facts) as key:
            if has_backward_hooks(module):
                is_full = module._is_full_backward_hook is not False
                recording.note_module_hook(path, is_read=is_full)
            if template is None:
                result = _run(recording, key, folded, original, (args, kwargs))
            else:  # runs nothing, and so changes no state
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                result = template.result(leaves, iter(torch.ops.autopar.replay(tensors, key)))
        recording.returned(key, _with_fields(result))
        return result

    return call


def _with_fields(result: Any) -> Any:
    """Return a result with `Attributes` instead of dataclasses, into which pytree does not look."""
    return pytree.tree_map(_as_fields, result)


def _as_fields(leaf: Any) -> Any:
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    values = {one.name: getattr(leaf, one.name) for one in fields(leaf)}
    return Attributes((name, _with_fields(value)) for name, value in values.items())


def noting(
    function: Callable[..., Any], place: tuple[str, str], recording: TraceRecording
) -> Callable[..., Any]:
    """Return a plain function that records its calls; `place` is its module and name."""

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if recording.is_in_backward:
            return function(*args, **kwargs)
        call = f"{place[1]}()@{len(recording.calls)}"
        given = pytree.tree_flatten((args, kwargs))
        arguments = _mark(torch.ops.autopar.begin, *given, call)
        own = RecordedCall(path=place[0], name=place[1], arguments=arguments)
        recording.calls[call] = own
        result = function(*args, **kwargs)
        own.result = _mark(torch.ops.autopar.end, *pytree.tree_flatten(result), call)
        return result

    return noted


_Given = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


def _run(
    recording: TraceRecording,
    call: str,
    folded: Hashable,
    forward: Callable[..., Any],
    given: _Given,
) -> Any:
    """Run a call, and record what it changes; if it has a key `folded`, it may become a template.

    A block that stores tensors elsewhere than in its result (in a list, in an attribute such as
    `self.aux_loss`) becomes none and runs each time: a replay would not store them.
    """
    own = recording.calls[call]
    module, before = recording.modules[own.path], recording.seen_by(call)
    leaves = pytree.tree_leaves(given)
    attributes = None if folded is None else attribute_ids(module)
    with assigned_buffers_written(module, own.path):
        result = forward(*given[0], **given[1])
        made = None if folded is None else template_of(call, leaves, result)
        if made is not None and attributes == attribute_ids(module):
            leaves_after = pytree.tree_leaves(given)
            is_untouched = list(map(id, leaves)) == list(map(id, leaves_after))
            if is_untouched and not before.changes_to(recording.seen_by(call)):
                recording.templates[folded] = made
    own.changed_state = left_by_call(before, recording.seen_by(call))
    return result


def _mark(op: Any, leaves: list[Any], spec: Any, call: str) -> Border:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not _noted(op.default, tensors, call):
        op(tensors, call)
    held = (TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Border(leaves=tuple(held), spec=spec)


def _noted(op: Any, tensors: list[torch.Tensor], call: str) -> bool:
    """Add a marker directly to the graph if each tensor has a node; return whether it was added.

    A call of the marker's op passes through all modes of torch: it takes as long as a model's op.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return False
    tracer = mode.tracer
    tracked = [proxy_tensor.get_proxy_slot(one, tracer, None) for one in tensors]
    nodes = [one.proxy.node for one in tracked if one is not None]
    if len(nodes) < len(tensors):
        return False
    tracer.create_node("call_function", op, (nodes, call), {}).meta["val"] = None
    return True
