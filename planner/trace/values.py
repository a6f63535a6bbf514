"""Reads what the nodes of an exported program are given: tensors, sizes, plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec

from autopar.planner.extent import Extent
from autopar.planner.graph import input_name
from autopar.planner.ops import (
    MODULE,
    Constant,
    DType,
    Fields,
    Listed,
    Mapped,
    NamedFields,
    Origin,
    Ref,
    Value,
)
from autopar.planner.trace.export import Exported
from autopar.planner.trace.ledger import Ledger
from autopar.planner.trace.names import ModelNames
from autopar.planner.trace.nodes import constant, storage_of
from autopar.planner.trace.record import Attributes


class CannotReplayError(Exception):
    """A folded block reads tensors from elsewhere, or leaves some there, other than its result."""


@dataclass(slots=True, kw_only=True)
class Scope:
    """Where nodes are being read: their values, and in a replay which call stands for which."""

    values: dict[fx.Node, Value]
    storages: dict[int, str]
    call: str
    grad_enabled: bool = True
    template: str | None = None  # the key of the replayed call
    site: str = ""

    def inner(self, **changes: Any) -> Scope:
        """Return a scope for a nested graph that starts with no values."""
        return replace(self, values={}, storages=dict(self.storages), **changes)


class Values:
    """The values of nodes, in the scope in which they are read."""

    def __init__(self, exported: Exported, names: ModelNames, ledger: Ledger) -> None:
        self.program, self.recording = exported.program, exported.recording
        self.batch = exported.subject.batch
        self.names, self.ledger = names, ledger
        self.paths = {id(module): path for path, module in self.recording.modules.items()}
        self.constants: dict[str, Constant] = {}
        self.specs: dict[str, InputSpec] = {
            spec.arg.name: spec for spec in self.program.graph_signature.input_specs
        }

    def read_placeholders(self, scope: Scope) -> None:
        """Read what comes from outside the program: parameters and buffers, then the batch."""
        keys = (key for key, value in self.batch.items() if isinstance(value, torch.Tensor))
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
                name, origin = input_name(next(keys), self.ledger.tensors), Origin.INPUT
            else:
                name, origin = target, Origin.CONSTANT
            self.bind_outside(node, name, origin, scope)

    def bind_outside(self, node: fx.Node, name: str, origin: Origin, scope: Scope) -> None:
        """Make a node what comes from outside the program."""
        val = node.meta["val"]
        scope.values[node] = Ref(name)
        if name not in self.ledger.tensors:
            trainable = origin is Origin.PARAMETER and self.names.is_trainable(name)
            self.ledger.add(name, val, storage=name, origin=origin, requires_grad=trainable)
            if origin is Origin.CONSTANT:
                target = self.specs[node.name].target or ""
                self.constants[name] = constant(name, self.program.constants.get(target))
        scope.storages[storage_of(val)] = name

    def bind(self, node: fx.Node, value: Value, scope: Scope) -> None:
        """Make a node a value, and its memory that of the value."""
        scope.values[node] = value
        self.remember_storage(node, value, scope)

    def remember_storage(self, node: Any, value: Value, scope: Scope) -> None:
        """Note whose memory the tensor of a node lies in."""
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and isinstance(value, Ref):
            scope.storages[storage_of(val)] = value.tensor

    def arguments(self, node: fx.Node, scope: Scope) -> tuple[tuple[str, Value], ...]:
        """Return the arguments by schema name, defaults filled in."""
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
        """Return an argument of a node."""
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
        """Return what the replaying module has where the template has this parameter or buffer."""
        spec = self.specs.get(node.name)
        if spec is None:  # of a region with names of its own, around several blocks
            raise CannotReplayError(node.name)
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            target = (spec.target or "").removeprefix("model.")
            if target.rpartition(".")[2].startswith("lifted_tensor"):
                self.bind_outside(node, target, Origin.CONSTANT, scope)
                return scope.values[node]
            raise CannotReplayError(node.name)
        assert scope.template is not None
        paths = self.recording.paths
        target = (spec.target or "").removeprefix("model.")
        name = self.names.corresponding(target, paths[scope.template], paths[scope.site])
        if name is None:
            raise CannotReplayError(target)
        parameter = spec.kind is InputKind.PARAMETER
        self.bind_outside(node, name, Origin.PARAMETER if parameter else Origin.BUFFER, scope)
        return self.ledger.latest_value(scope.values[node])

    def leaf(self, leaf: Any) -> Value:
        """Return what is neither a tensor nor a container."""
        if isinstance(leaf, torch.SymInt):
            return self.ledger.symbols.extent(leaf)
        if isinstance(leaf, torch.dtype):
            return DType(self.ledger.dtype(leaf))
        if isinstance(leaf, (int, float, complex, str, bool, type(None))):
            return leaf
        path = self.paths.get(id(leaf))
        return f"<{type(leaf).__name__}>" if path is None else f"<{MODULE}{path}>"


def structured(value: Any) -> Value:
    """Return a nest of containers as tuples; keys of mappings stand before their values."""
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
