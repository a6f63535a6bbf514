"""Turns an exported program and its recorded calls into a Graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils import _pytree as pytree

from autopar.planner.errors import TraceError
from autopar.planner.extent import Extent
from autopar.planner.graph import (
    MODEL_DTYPE,
    Call,
    Constant,
    DType,
    Graph,
    Listed,
    Op,
    Origin,
    Ref,
    Tensor,
    Value,
    refs,
)
from autopar.planner.trace import record
from autopar.planner.trace.export import Exported
from autopar.planner.trace.fold import Form, Plain
from autopar.planner.trace.names import ModelNames
from autopar.planner.trace.nodes import (
    bodies,
    constant,
    has_tensor,
    is_getitem,
    location,
    operands_of,
    region_graph,
    storage_of,
    written_arguments,
)
from autopar.planner.trace.prune import pruned
from autopar.planner.trace.scatter import with_scatters
from autopar.planner.trace.symbols import Symbols

LOSS_CALL = "(loss)"

# Ops that say nothing about the computation: the tracer's checks, and names for the same tensor.
_CHECKS = re.compile(r"aten\.(_assert\w*|sym_\w+|_local_scalar_dense|is_nonzero)\.")
_ALIASES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default", "aten.detach_.default"})
_SAME_IF_TYPE_IS_SAME = re.compile(r"aten\.(to\.|type_as\.|_to_copy\.)")

# Written to without saying so in their schema.
_HIDDEN_WRITES = {
    "aten.batch_norm.default": ("running_mean", "running_var"),
    "aten.instance_norm.default": ("running_mean", "running_var"),
}


class CannotReplayError(Exception):
    """A folded block reads tensors that are neither its own nor its arguments."""


def convert(exported: Exported) -> Graph:
    """Return the graph of an exported step."""
    return _Converter(exported).graph()


@dataclass(slots=True, kw_only=True)
class _Scope:
    """Where nodes are being read: their values, and in a replay which call stands for which."""

    values: dict[fx.Node, Value]
    storages: dict[int, str]
    call: str
    grad_enabled: bool = True
    template: str | None = None  # the key of the replayed call
    site: str = ""

    def inner(self, **changes: Any) -> _Scope:
        """Return a scope for a nested graph that starts with no values."""
        return replace(self, values={}, storages=dict(self.storages), **changes)


class _Converter:
    def __init__(self, exported: Exported) -> None:
        self.program = exported.program
        self.recording = exported.recording
        self.subject, self.fixed_at = exported.subject, exported.fixed_at
        self.specs: dict[str, InputSpec] = {
            spec.arg.name: spec for spec in self.program.graph_signature.input_specs
        }
        self.names = ModelNames(exported.subject.model)
        self.symbols = Symbols(fixed_batch=_fixed_batch(exported))
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Constant] = {}
        self.latest: dict[str, str] = {}  # a tensor written in place → its newest version
        self.ops: list[Op] = []
        self.calls: dict[str, Call] = {}
        self.used_names: dict[str, int] = {}
        self.model_dtype = exported.subject.model_dtype
        self.bodies = bodies(self.program.graph_module)

    def graph(self) -> Graph:
        """Read the program from its first node to the loss."""
        scope = _Scope(values={}, storages={}, call=LOSS_CALL)
        self._read_placeholders(scope)
        nodes = [n for n in self.program.graph.nodes if n.op not in ("placeholder", "output")]
        self._read_all(nodes, scope)
        ((output,),) = operands_of(self.program.graph.output_node())
        (loss,) = refs(self._value(output, scope))
        graph = Graph(
            ops=tuple(self.ops),
            tensors=MappingProxyType(self.tensors),
            parameters=self.names.parameters(self._shape, self._dtype),
            buffers=self.names.buffers(self._shape, self._dtype, self._written_storages()),
            constants=MappingProxyType(self.constants),
            inputs=tuple(t.name for t in self.tensors.values() if t.origin is Origin.INPUT),
            calls=MappingProxyType(self.calls),
            loss=loss,
            fixed_batch=self.symbols.fixed_batch,
            fixed_at=self.fixed_at if self.symbols.fixed_batch is not None else "",
        )
        return pruned(with_scatters(graph))

    # --- what comes from outside -----------------------------------------------------------------

    def _read_placeholders(self, scope: _Scope) -> None:
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = self.specs[node.name]
            target = (spec.target or "").removeprefix("model.")
            if spec.kind is InputKind.PARAMETER:
                name, origin = self.names.parameter(target), Origin.PARAMETER
            elif spec.kind is InputKind.BUFFER:
                name, origin = self.names.buffer(target), Origin.BUFFER
            elif spec.kind is InputKind.USER_INPUT:
                name, origin = node.name, Origin.INPUT
            else:
                name, origin = target, Origin.CONSTANT
            self._bind_outside(node, name, origin, scope)

    def _bind_outside(self, node: fx.Node, name: str, origin: Origin, scope: _Scope) -> None:
        val = node.meta["val"]
        scope.values[node] = Ref(name)
        if name not in self.tensors:
            trainable = origin is Origin.PARAMETER and self.names.is_trainable(name)
            self._add_tensor(name, val, storage=name, origin=origin, requires_grad=trainable)
            if origin is Origin.CONSTANT:
                target = self.specs[node.name].target or ""
                self.constants[name] = constant(name, self.program.constants.get(target))
        scope.storages[storage_of(val)] = name

    def _add_tensor(
        self, name: str, val: torch.Tensor, *, storage: str, origin: Origin, requires_grad: bool
    ) -> None:
        self.tensors[name] = Tensor(
            name=name,
            shape=self._shape(val),
            dtype=self._dtype(val.dtype),
            storage=storage,
            origin=origin,
            requires_grad=requires_grad and val.dtype.is_floating_point,
        )

    # --- nodes -----------------------------------------------------------------------------------

    def _read_all(self, nodes: Iterable[fx.Node], scope: _Scope) -> None:
        for node in nodes:
            if node.op == "call_function":
                self._read(node, scope)

    def _read(self, node: fx.Node, scope: _Scope) -> None:
        target = str(node.target)
        if is_getitem(node):
            source, index = operands_of(node)
            value = self._value(source, scope)
            scope.values[node] = value[index] if isinstance(value, tuple) else None
        elif target == record.ENTER:
            self._enter(node, scope)
        elif target == record.LEAVE:
            self._leave(node, scope)
        elif target == record.REPLAY:
            self._replay(node, scope)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._read_region(node, scope)
        elif _CHECKS.match(target) or not has_tensor(node.meta.get("val")):
            return
        elif target in _ALIASES or self._keeps_type(node, target, scope):
            scope.values[node] = self._value(node.args[0], scope)
        else:
            self._read_op(node, target, scope)

    def _keeps_type(self, node: fx.Node, target: str, scope: _Scope) -> bool:
        """Whether a conversion gives the tensor it got, under every precision."""
        if not _SAME_IF_TYPE_IS_SAME.match(target):
            return False
        (source,) = refs(self._value(node.args[0], scope))
        same_type = self.tensors[source].dtype == self._dtype(node.meta["val"].dtype)
        asks_copy = bool(node.kwargs.get("copy")) or "contiguous" in str(node.kwargs)
        return same_type and not asks_copy

    def _read_op(self, node: fx.Node, target: str, scope: _Scope) -> None:
        arguments = self._arguments(node, scope)
        inputs = tuple(self._newest(name) for _, value in arguments for name in refs(value))
        name = self._unique(node.name)
        vals = node.meta["val"]
        is_many = isinstance(vals, (tuple, list))
        outputs: list[Value] = []
        differentiable = scope.grad_enabled and any(self.tensors[i].requires_grad for i in inputs)
        self._bound_unbacked(vals, inputs)
        for i, val in enumerate(vals if is_many else (vals,)):
            if not isinstance(val, torch.Tensor):
                outputs.append(None)
                continue
            out = self._unique(f"{name}_{i}") if is_many else name
            owner = scope.storages.setdefault(storage_of(val), out)
            storage = self.tensors[owner].storage if owner != out else out
            grad = differentiable and not target.startswith("aten.detach")
            self._add_tensor(out, val, storage=storage, origin=Origin.OP, requires_grad=grad)
            outputs.append(Ref(out))
        scope.values[node] = tuple(outputs) if is_many else outputs[0]
        written = self._written(node, target, dict(arguments))
        if differentiable and target not in _HIDDEN_WRITES:
            self._learn(written)
        self.ops.append(
            Op(
                name=name,
                target=target,
                arguments=arguments,
                inputs=inputs,
                outputs=tuple(refs(tuple(outputs))),
                call=scope.call,
                location=location(node),
                grad_enabled=scope.grad_enabled,
                writes=written,
            )
        )
        if not is_many and target not in _HIDDEN_WRITES:
            self.latest.update(dict.fromkeys(written, name))

    def _learn(self, written: tuple[str, ...]) -> None:
        """Have gradients flow through what was written, and so through all that is read of it."""
        for name in (self.tensors[one].storage for one in written):
            if self.tensors[name].origin is Origin.OP:
                self.tensors[name] = replace(self.tensors[name], requires_grad=True)

    def _bound_unbacked(self, vals: Any, inputs: tuple[str, ...]) -> None:
        for val in vals if isinstance(vals, (tuple, list)) else (vals,):
            for size in val.shape if isinstance(val, torch.Tensor) and inputs else ():
                self.symbols.bound(size, self.tensors[inputs[0]].numel)

    def _written(
        self, node: fx.Node, target: str, arguments: Mapping[str, Value]
    ) -> tuple[str, ...]:
        hidden = _HIDDEN_WRITES.get(target, ())
        if hidden and not (arguments.get("training") or arguments.get("use_input_stats")):
            hidden = ()
        keys = (*written_arguments(node), *hidden)
        return tuple(name for key in keys for name in refs(arguments.get(key)))

    def _read_region(self, node: fx.Node, scope: _Scope) -> None:
        """Inline a region: no_grad and autocast are wrapped as graphs of their own."""
        target = str(node.target)
        position = next(i for i, a in enumerate(node.args) if region_graph(a) is not None)
        if "wrap_with_set_grad_enabled" in target:
            region = scope.inner(grad_enabled=scope.grad_enabled and bool(node.args[0]))
        elif "wrap_with_autocast" in target:
            region = scope.inner()
        else:
            raise TraceError(
                f"the model uses {target}, which has no plain graph",
                where=location(node),
                fix="write the control flow with torch.where, or unroll it",
            )
        graph = region_graph(node.args[position])
        assert graph is not None
        operands = operands_of(node)[position + 1 :]
        inside = [n for n in graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(inside, operands, strict=True):
            self._bind(placeholder, self._value(operand, scope), region)
        self._read_all(graph.nodes, region)
        scope.call = region.call
        (returned,) = operands_of(graph.output_node())
        results = tuple(self._value(n, region) for n in returned)
        for result, val in zip(results, returned, strict=True):
            self._remember_storage(val, result, scope)
        scope.values[node] = results

    # --- calls of modules ------------------------------------------------------------------------

    def _enter(self, node: fx.Node, scope: _Scope) -> None:
        tensors, recorded = operands_of(node)
        key = self._renamed(str(recorded), scope)
        border = self.recording.entered[str(recorded)]
        arguments, keywords = pytree.tree_unflatten(
            self._leaves(tensors, border, scope), border.spec
        )
        path = self._module_path(str(recorded), scope)
        parent = self.recording.parents[str(recorded)]
        self.calls[key] = Call(
            key=key,
            path=path,
            class_name=self.recording.classes[str(recorded)],
            is_function=str(recorded) in self.recording.functions,
            parent=None if parent is None else self._renamed(parent, scope),
            arguments=tuple(map(_structured, arguments)),
            keywords=tuple((name, _structured(value)) for name, value in keywords.items()),
            result=None,
        )
        scope.call = key

    def _leave(self, node: fx.Node, scope: _Scope) -> None:
        tensors, recorded = operands_of(node)
        key = self._renamed(str(recorded), scope)
        border = self.recording.left[str(recorded)]
        result = pytree.tree_unflatten(self._leaves(tensors, border, scope), border.spec)
        self.calls[key] = replace(self.calls[key], result=_structured(result))
        parent = self.calls[key].parent
        scope.call = LOSS_CALL if parent is None else parent

    def _leaves(self, tensors: Any, border: record.Border, scope: _Scope) -> list[Any]:
        values = iter([self._value(tensor, scope) for tensor in tensors])
        return [
            next(values) if leaf is record.TENSOR else self._leaf(leaf) for leaf in border.leaves
        ]

    def _leaf(self, leaf: Any) -> Value:
        if isinstance(leaf, torch.SymInt):
            return self.symbols.extent(leaf)
        if isinstance(leaf, torch.dtype):
            return DType(self._dtype(leaf))
        if isinstance(leaf, (int, float, str, bool, type(None))):
            return leaf
        return f"<{type(leaf).__name__}>"

    def _replay(self, node: fx.Node, scope: _Scope) -> None:
        tensors, site = operands_of(node)
        template = self.recording.replays[str(site)]
        nodes = self.bodies[template.call]
        body = scope.inner(template=template.call, site=str(site))
        body.storages.clear()
        for inner, outer in zip(operands_of(nodes[0])[0], tensors, strict=True):
            self._bind(inner, self._value(outer, scope), body)
        self._read_all(nodes[1:-1], body)
        returned = iter(operands_of(nodes[-1])[0])
        fresh = []
        for leaf in template.leaves:
            if not isinstance(leaf, Plain):
                inner = next(returned)
                if isinstance(leaf, Form):
                    fresh.append((inner, self._value(inner, body)))
        scope.values[node] = tuple(value for _, value in fresh)
        for user in node.users:
            if is_getitem(user):
                self._remember_storage(user, fresh[operands_of(user)[1]][1], scope)

    def _renamed(self, recorded: str, scope: _Scope) -> str:
        """Return a call key as it is at the place where it is replayed."""
        if scope.template is None or not recorded.startswith(scope.template):
            return recorded
        return scope.site + recorded.removeprefix(scope.template)

    def _module_path(self, recorded: str, scope: _Scope) -> str:
        path = self.recording.paths[recorded]
        if scope.template is None:
            return path
        return self.recording.paths[scope.site] + path.removeprefix(
            self.recording.paths[scope.template]
        )

    # --- values ----------------------------------------------------------------------------------

    def _bind(self, node: fx.Node, value: Value, scope: _Scope) -> None:
        scope.values[node] = value
        self._remember_storage(node, value, scope)

    def _remember_storage(self, node: Any, value: Value, scope: _Scope) -> None:
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and isinstance(value, Ref):
            scope.storages[storage_of(val)] = value.tensor

    def _arguments(self, node: fx.Node, scope: _Scope) -> tuple[tuple[str, Value], ...]:
        """Return the arguments by schema name, defaults filled in."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            positional = [(f"arg{i}", self._value(a, scope)) for i, a in enumerate(node.args)]
            named = [(key, self._value(value, scope)) for key, value in node.kwargs.items()]
            return tuple(positional + named)
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        return tuple(
            (argument.name, self._value(given.get(argument.name, argument.default_value), scope))
            for argument in schema.arguments
        )

    def _value(self, argument: Any, scope: _Scope) -> Value:
        if isinstance(argument, fx.Node):
            return self._node_value(argument, scope)
        if isinstance(argument, (tuple, list)):
            return tuple(self._value(item, scope) for item in argument)
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return tuple(self._value(item, scope) for item in parts)
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return str(argument)
        return self._leaf(argument)

    def _node_value(self, node: fx.Node, scope: _Scope) -> Value:
        if node in scope.values:
            return self._latest_value(scope.values[node])
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            return self.symbols.extent(val)
        if isinstance(val, (int, float, bool, torch.SymFloat, torch.SymBool)):
            return str(val) if isinstance(val, (torch.SymFloat, torch.SymBool)) else val
        if node.op == "placeholder" and scope.template is not None:
            return self._own_tensor(node, scope)
        if scope.template is not None:
            raise CannotReplayError(node.name)
        return f"<{node.name}>"

    def _own_tensor(self, node: fx.Node, scope: _Scope) -> Value:
        """Return what the replaying module has where the template has this parameter or buffer."""
        spec = self.specs[node.name]
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            target = (spec.target or "").removeprefix("model.")
            if target.rpartition(".")[2].startswith("lifted_tensor"):
                self._bind_outside(node, target, Origin.CONSTANT, scope)
                return scope.values[node]
            raise CannotReplayError(node.name)
        assert scope.template is not None
        paths = self.recording.paths
        target = (spec.target or "").removeprefix("model.")
        name = self.names.corresponding(target, paths[scope.template], paths[scope.site])
        if name is None:
            raise CannotReplayError(target)
        parameter = spec.kind is InputKind.PARAMETER
        self._bind_outside(node, name, Origin.PARAMETER if parameter else Origin.BUFFER, scope)
        return self._latest_value(scope.values[node])

    def _latest_value(self, value: Value) -> Value:
        if isinstance(value, Ref):
            return Ref(self._newest(value.tensor))
        if isinstance(value, tuple):
            return tuple(map(self._latest_value, value))
        return value

    def _newest(self, name: str) -> str:
        while name in self.latest:
            name = self.latest[name]
        return name

    def _shape(self, val: torch.Tensor) -> tuple[Extent, ...]:
        return tuple(self.symbols.extent(size) for size in val.shape)

    def _dtype(self, dtype: torch.dtype) -> str:
        return MODEL_DTYPE if dtype == self.model_dtype else str(dtype).removeprefix("torch.")

    def _unique(self, name: str) -> str:
        stem = re.sub(r"(_\d+)+$", "", name)
        if name not in self.used_names:
            self.used_names[name] = 1
            return name
        while True:
            self.used_names[stem] = self.used_names.get(stem, 0) + 1
            candidate = f"{stem}_{self.used_names[stem]}"
            if candidate not in self.used_names:
                self.used_names[candidate] = 1
                return candidate

    def _written_storages(self) -> frozenset[str]:
        return frozenset(self.tensors[name].storage for op in self.ops for name in op.writes)


def _fixed_batch(exported: Exported) -> int | None:
    """Return the batch of the trace where the model fixed it, that is, where no symbol is left."""
    signature = exported.program.graph_signature
    nodes = {n.name: n for n in exported.program.graph.nodes if n.op == "placeholder"}
    sizes = [nodes[name].meta["val"].shape[0] for name in signature.user_inputs if name in nodes]
    # A symbol that the model compared with a number is still a symbol here, but has that value.
    is_fixed = any(isinstance(size, int) or size.node.expr.is_number for size in sizes)
    return exported.subject.batch_size if is_fixed else None


def _structured(value: Any) -> Value:
    """Return a nest of containers as tuples; keys of mappings stand before their values."""
    if isinstance(value, Mapping):
        return tuple((str(key), _structured(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        kind = Listed if isinstance(value, list) else tuple
        return kind(map(_structured, value))
    if isinstance(value, (Ref, DType, Extent, str, bool, int, float, type(None))):
        return value
    return f"<{type(value).__name__}>"
