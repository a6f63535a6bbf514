"""Reads the values and calls of an exported program, and removes unused ops and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autopar.planner.errors import SourceSpan
from autopar.planner.graph.graph import Graph, input_name
from autopar.planner.graph.ops import (
    LOSS_CALL,
    MODULE,
    Constant,
    DType,
    Extent,
    Fields,
    FunctionCall,
    Listed,
    Mapped,
    ModuleCall,
    NamedFields,
    Op,
    OwnGradient,
    Ref,
    TensorOrigin,
    Value,
    refs,
)
from autopar.planner.trace import record
from autopar.planner.trace.export import ExportedTrace
from autopar.planner.trace.nodes import constant, operands_of, spans_of, storage_of
from autopar.planner.trace.record import Attributes
from autopar.planner.trace.symbols import Ledger, ModelNames


class CannotReplayError(Exception):
    """A block cannot be replayed: it reads or stores tensors outside its arguments and result."""


@dataclass(slots=True, kw_only=True)
class Scope:
    """A graph that is being read: its nodes' values, the owners of memory, and the current call.

    In a replay (see `record`), `template` is the key of the traced call, whose nodes are read once
    more, and `site` the key of the call for which they are read. `spans` has the expressions that
    make the template's call, and those that make the call at `site`.
    """

    values: dict[fx.Node, Value]
    storages: dict[int, str]
    call: str
    grad_enabled: bool = True
    template: str | None = None
    site: str = ""
    spans: tuple[tuple[SourceSpan, ...], tuple[SourceSpan, ...]] = ((), ())

    def spans_of(self, node: fx.Node) -> tuple[SourceSpan, ...]:
        """Return the expressions of the model that make a node, the innermost one first."""
        found, (template, site) = spans_of(node), self.spans
        return site if found == template else found

    def inner(self, **changes: Any) -> Scope:
        """Return a scope for a nested graph, without values."""
        return replace(self, values={}, storages=dict(self.storages), **changes)


class Values:
    """Turns the arguments of nodes into values of the graph; a scope keeps each node's value."""

    def __init__(self, exported: ExportedTrace, names: ModelNames, ledger: Ledger) -> None:
        self.program, self.recording = exported.program, exported.recording
        self.batch = exported.subject.batch
        self.names, self.ledger = names, ledger
        self.paths = {id(module): path for path, module in self.recording.modules.items()}
        self.constants: dict[str, Constant] = {}
        self.specs: dict[str, InputSpec] = {
            spec.arg.name: spec for spec in self.program.graph_signature.input_specs
        }

    def read_placeholders(self, scope: Scope) -> None:
        """Read the program's inputs: parameters and buffers, then the batch."""
        keys = (key for key, value in self.batch.items() if isinstance(value, torch.Tensor))
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = self.specs[node.name]
            target = (spec.target or "").removeprefix("model.")
            if spec.kind is InputKind.PARAMETER:
                name, origin = self.names.parameter(target), TensorOrigin.PARAMETER
            elif spec.kind is InputKind.BUFFER:
                name, origin = self.names.buffer(target), TensorOrigin.BUFFER
            elif spec.kind is InputKind.USER_INPUT:
                name, origin = input_name(next(keys), self.ledger.tensors), TensorOrigin.INPUT
            else:
                name, origin = target, TensorOrigin.CONSTANT
            self.bind_outside(node, name, origin, scope)

    def bind_outside(self, node: fx.Node, name: str, origin: TensorOrigin, scope: Scope) -> None:
        """Bind a node to a parameter, buffer, constant or input of the batch."""
        val = node.meta["val"]
        scope.values[node] = Ref(name)
        if name not in self.ledger.tensors:
            trainable = origin is TensorOrigin.PARAMETER and self.names.is_trainable(name)
            self.ledger.add(name, val, storage=name, origin=origin, requires_grad=trainable)
            if origin is TensorOrigin.CONSTANT:
                target = self.specs[node.name].target or ""
                self.constants[name] = constant(name, self.program.constants.get(target))
        scope.storages[storage_of(val)] = name

    def bind(self, node: fx.Node, value: Value, scope: Scope) -> None:
        """Bind a node to a value, and record which tensor owns its memory."""
        scope.values[node] = value
        self.remember_storage(node, value, scope)

    def remember_storage(self, node: Any, value: Value, scope: Scope) -> None:
        """Record which tensor owns the memory of a node's tensor."""
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and isinstance(value, Ref):
            scope.storages[storage_of(val)] = value.tensor

    def arguments(self, node: fx.Node, scope: Scope) -> tuple[tuple[str, Value], ...]:
        """Return the arguments by schema name, including defaults."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            positional = [(f"arg{i}", self.value(a, scope)) for i, a in enumerate(node.args)]
            named = [(key, self.value(value, scope)) for key, value in node.kwargs.items()]
            return tuple(positional + named)
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        return tuple(
            (argument.name, self.value(given.get(argument.name, argument.default_value), scope))
            for argument in schema.arguments
        )

    def value(self, argument: Any, scope: Scope) -> Value:
        """Return the value of a node's argument."""
        if isinstance(argument, fx.Node):
            return self._node_value(argument, scope)
        if isinstance(argument, (tuple, list)):
            return tuple(self.value(item, scope) for item in argument)
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return tuple(self.value(item, scope) for item in parts)
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return str(argument)
        return self.leaf(argument)

    def _node_value(self, node: fx.Node, scope: Scope) -> Value:
        if node in scope.values:
            return self.ledger.latest_value(scope.values[node])
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            return self.ledger.symbols.extent(val)
        if isinstance(val, torch.SymFloat):
            return self.ledger.symbols.number(val) or str(val)
        if isinstance(val, (int, float, bool, torch.SymBool)):
            return str(val) if isinstance(val, torch.SymBool) else val
        if node.op == "placeholder" and scope.template is not None:
            return self._own_tensor(node, scope)
        if scope.template is not None:
            raise CannotReplayError(node.name)
        return f"<{node.name}>"

    def _own_tensor(self, node: fx.Node, scope: Scope) -> Value:
        """Return the tensor at `site` that corresponds to a parameter or buffer of the template."""
        spec = self.specs.get(node.name)
        if spec is None:  # an input of a no_grad or autocast graph around the block
            raise CannotReplayError(node.name)
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            target = (spec.target or "").removeprefix("model.")
            if target.rpartition(".")[2].startswith("lifted_tensor"):
                self.bind_outside(node, target, TensorOrigin.CONSTANT, scope)
                return scope.values[node]
            raise CannotReplayError(node.name)
        assert scope.template is not None
        calls = self.recording.calls
        target = (spec.target or "").removeprefix("model.")
        name = self.names.corresponding(target, calls[scope.template].path, calls[scope.site].path)
        if name is None:
            raise CannotReplayError(target)
        parameter = spec.kind is InputKind.PARAMETER
        self.bind_outside(
            node, name, TensorOrigin.PARAMETER if parameter else TensorOrigin.BUFFER, scope
        )
        return self.ledger.latest_value(scope.values[node])

    def leaf(self, leaf: Any) -> Value:
        """Return the value of an argument that is neither a tensor nor a container."""
        if isinstance(leaf, torch.SymInt):
            return self.ledger.symbols.extent(leaf)
        if isinstance(leaf, torch.dtype):
            return DType(self.ledger.dtype(leaf))
        if isinstance(leaf, (int, float, complex, str, bool, type(None))):
            return leaf
        path = self.paths.get(id(leaf))
        return f"<{type(leaf).__name__}>" if path is None else f"<{MODULE}{path}>"


def structured(value: Any) -> Value:
    """Return nested containers as tuples, whose types tell their kinds (Listed, Mapped, Fields, …).

    Mappings and objects become pairs of key and value.
    """
    if isinstance(value, Mapping):
        is_object = is_dataclass(value) or isinstance(value, Attributes)
        is_plain = not is_object and all(isinstance(key, str) for key in value)
        pairs = ((str(key), structured(item)) for key, item in value.items())
        return Mapped(pairs) if is_plain else Fields(pairs)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return NamedFields(zip(value._fields, map(structured, value), strict=True))
    if isinstance(value, (tuple, list)):
        kind = Listed if isinstance(value, list) else tuple
        return kind(map(structured, value))
    if isinstance(value, (Ref, DType, Extent, str, bool, int, float, complex, type(None))):
        return value
    return f"<{type(value).__name__}>"


def _callers(unused: Iterable[str], live: Iterable[str], graph: Graph) -> Iterator[str]:
    """Yield unused calls, and the calls around each, up to the first that contains a used op.

    The forward of an outer call makes the unused call. If that forward is printed, arguments of the
    unused call may be missing, because the ops that compute them are removed.
    """
    needed = {around for call in live for around in graph.index.around(call)}
    for call in unused:
        for around in graph.index.around(call):
            yield around
            if around in needed:
                break


def pruned(graph: Graph) -> Graph:
    """Remove unused ops and tensors from a graph; mark the calls that ran differentiable ones."""
    buffers = (t.name for t in graph.tensors.values() if t.origin is TensorOrigin.BUFFER)
    kept = graph.index.needed_for([graph.loss, *buffers])
    live = {graph.loss}.union(*((*op.inputs, *op.outputs) for op in kept))
    names = {op.name for op in kept}
    unused = {
        op.call
        for op in graph.ops
        if op.name not in names and any(graph.tensors[name].requires_grad for name in op.inputs)
    }
    unused |= set(_callers(unused, {op.call for op in kept}, graph))
    tensors = {
        name: t
        for name, t in graph.tensors.items()
        if name in live or t.origin is not TensorOrigin.OP
    }
    calls = {
        key: replace(call, has_unused=True) if key in unused else call
        for key, call in graph.calls.items()
    }
    functions = (
        replace(one, ops=tuple(name for name in one.ops if name in names))
        for one in graph.functions
    )
    return replace(
        graph,
        ops=kept,
        functions=tuple(one for one in functions if one.ops),
        tensors=MappingProxyType(tensors),
        calls=MappingProxyType(calls),
    )


class Calls:
    """The calls of a graph that is being read; `ops` are the ops read so far."""

    def __init__(self, recording: record.TraceRecording, values: Values, ops: list[Op]) -> None:
        self.recording, self.values, self.ops = recording, values, ops
        self.modules: dict[str, ModuleCall] = {}
        self.functions: list[FunctionCall] = []
        loss = (one for one in recording.own_gradients if one.call == LOSS_CALL)
        self.own_gradients: list[OwnGradient] = list(loss)
        # by recorded key: a function call, and how many ops were read before it began
        self._begun: dict[str, tuple[FunctionCall, int]] = {}

    def read(self, node: fx.Node, scope: Scope) -> bool:
        """Read a node if it is a marker of a call; return whether it is one."""
        readers = {
            record.ENTER: self._enter,
            record.LEAVE: self._leave,
            record.BEGIN: self._begin,
            record.END: self._end,
        }
        reader = readers.get(str(node.target))
        if reader is not None:
            reader(node, scope)
        return reader is not None

    def is_in_function(self, scope: Scope) -> bool:
        """Whether a custom autograd.Function is being read."""
        return scope.call in self.modules and self.modules[scope.call].is_function

    def _enter(self, node: fx.Node, scope: Scope) -> None:
        recorded = str(operands_of(node)[1])
        key, own = self._renamed(recorded, scope), self.recording.calls[recorded]
        arguments, keywords = self._given(node, scope)
        path = self._module_path(recorded, scope)
        self.modules[key] = ModuleCall(
            key=key,
            path=path,
            class_name=own.name,
            is_function=own.is_function,
            parent=None if own.parent is None else self._renamed(own.parent, scope),
            arguments=tuple(map(structured, arguments)),
            keywords=tuple((name, structured(value)) for name, value in keywords.items()),
            result=None,
            is_batch_norm=isinstance(self.recording.modules.get(path), _BatchNorm),
            left=self.recording.state_change(recorded),
            mode_is_set=own.mode_is_set,
            spans=scope.spans_of(node),
        )
        run = recorded if own.template is None else own.template.call
        used = (one for one in self.recording.own_gradients if one.call == run)
        self.own_gradients += (replace(one, call=key) for one in used)
        scope.call = key

    def _leave(self, node: fx.Node, scope: Scope) -> None:
        key = self._renamed(str(operands_of(node)[1]), scope)
        self.modules[key] = replace(self.modules[key], result=self._returned(node, scope))
        parent = self.modules[key].parent
        scope.call = LOSS_CALL if parent is None else parent

    def _begin(self, node: fx.Node, scope: Scope) -> None:
        recorded = str(operands_of(node)[1])
        own = self.recording.calls[recorded]
        arguments, keywords = self._given(node, scope)
        function = FunctionCall(
            module=own.path,
            name=own.name,
            call=scope.call,
            arguments=tuple(map(structured, arguments)),
            keywords=tuple((key, structured(value)) for key, value in keywords.items()),
            result=None,
            ops=(),
            spans=scope.spans_of(node),
        )
        self._begun[recorded] = function, len(self.ops)

    def _end(self, node: fx.Node, scope: Scope) -> None:
        function, before = self._begun.pop(str(operands_of(node)[1]))
        result = self._returned(node, scope)
        ops = self.ops[before:]
        if any(refs(result)) and all(op.call == function.call for op in ops):
            names = tuple(op.name for op in ops)
            self.functions.append(replace(function, result=result, ops=names))

    def _given(self, node: fx.Node, scope: Scope) -> tuple[Any, Any]:
        """Return the positional and the keyword arguments of a call."""
        tensors, recorded = operands_of(node)
        border = self.recording.calls[str(recorded)].arguments
        given: tuple[Any, Any] = pytree.tree_unflatten(
            self._leaves(tensors, border, scope), border.spec
        )
        return given

    def _returned(self, node: fx.Node, scope: Scope) -> Value:
        tensors, recorded = operands_of(node)
        border = self.recording.calls[str(recorded)].result
        assert border is not None
        return structured(pytree.tree_unflatten(self._leaves(tensors, border, scope), border.spec))

    def _leaves(self, tensors: Any, border: record.Border, scope: Scope) -> list[Any]:
        values = iter([self.values.value(tensor, scope) for tensor in tensors])
        return [
            next(values) if leaf is record.TENSOR else self.values.leaf(leaf)
            for leaf in border.leaves
        ]

    def _renamed(self, recorded: str, scope: Scope) -> str:
        """Return the key of a recorded call; in a replay, of the corresponding call at `site`."""
        template = scope.template
        if template is None or recorded == template:
            return recorded if template is None else scope.site
        path, outer = self.recording.calls[recorded].path, self.recording.calls[template].path
        if not path.startswith(outer):
            return recorded
        # the key is the path, with @n from the module's second call on
        return scope.site + path.removeprefix(outer) + recorded.removeprefix(path)

    def _module_path(self, recorded: str, scope: Scope) -> str:
        calls = self.recording.calls
        path = calls[recorded].path
        if scope.template is None:
            return path
        return calls[scope.site].path + path.removeprefix(calls[scope.template].path)
