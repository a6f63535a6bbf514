"""Reads the calls of modules and plain functions from the markers that a trace left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autopar.planner.ops import LOSS_CALL, Call, FunctionCall, Op, OwnGradient, Value, refs
from autopar.planner.trace import record
from autopar.planner.trace.nodes import operands_of
from autopar.planner.trace.values import Scope, Values, structured


class Calls:
    """The calls of a graph that is being read; `ops` are those read so far."""

    def __init__(self, recording: record.Recording, values: Values, ops: list[Op]) -> None:
        self.recording, self.values, self.ops = recording, values, ops
        self.modules: dict[str, Call] = {}
        self.functions: list[FunctionCall] = []
        loss = (one for one in recording.own_gradients if one.call == LOSS_CALL)
        self.own_gradients: list[OwnGradient] = list(loss)
        self._begun: dict[str, tuple[FunctionCall, int]] = {}  # with the number of ops before it

    def read(self, node: fx.Node, scope: Scope) -> bool:
        """Read a node if it is a marker, and say so."""
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

    def _enter(self, node: fx.Node, scope: Scope) -> None:
        recorded = operands_of(node)[1]
        key = self._renamed(str(recorded), scope)
        arguments, keywords = self._given(node, scope)
        path = self._module_path(str(recorded), scope)
        parent = self.recording.parents[str(recorded)]
        self.modules[key] = Call(
            key=key,
            path=path,
            class_name=self.recording.classes[str(recorded)],
            is_function=str(recorded) in self.recording.functions,
            parent=None if parent is None else self._renamed(parent, scope),
            arguments=tuple(map(structured, arguments)),
            keywords=tuple((name, structured(value)) for name, value in keywords.items()),
            result=None,
            is_batch_norm=isinstance(self.recording.modules.get(path), _BatchNorm),
            left=self.recording.left_by(str(recorded)),
            mode_is_set=str(recorded) in self.recording.modes_set,
        )
        template = self.recording.replays.get(str(recorded))
        run = str(recorded) if template is None else template.call
        own = (one for one in self.recording.own_gradients if one.call == run)
        self.own_gradients += (replace(one, call=key) for one in own)
        scope.call = key

    def _leave(self, node: fx.Node, scope: Scope) -> None:
        key = self._renamed(str(operands_of(node)[1]), scope)
        self.modules[key] = replace(self.modules[key], result=self._returned(node, scope))
        parent = self.modules[key].parent
        scope.call = LOSS_CALL if parent is None else parent

    def _begin(self, node: fx.Node, scope: Scope) -> None:
        recorded = str(operands_of(node)[1])
        module, name = self.recording.plain[recorded]
        arguments, keywords = self._given(node, scope)
        function = FunctionCall(
            module=module,
            name=name,
            call=scope.call,
            arguments=tuple(map(structured, arguments)),
            keywords=tuple((key, structured(value)) for key, value in keywords.items()),
            result=None,
            ops=(),
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
        """Return the arguments of a call, those without and those with a name."""
        tensors, recorded = operands_of(node)
        border = self.recording.entered[str(recorded)]
        given: tuple[Any, Any] = pytree.tree_unflatten(
            self._leaves(tensors, border, scope), border.spec
        )
        return given

    def _returned(self, node: fx.Node, scope: Scope) -> Value:
        tensors, recorded = operands_of(node)
        border = self.recording.left[str(recorded)]
        return structured(pytree.tree_unflatten(self._leaves(tensors, border, scope), border.spec))

    def _leaves(self, tensors: Any, border: record.Border, scope: Scope) -> list[Any]:
        values = iter([self.values.value(tensor, scope) for tensor in tensors])
        return [
            next(values) if leaf is record.TENSOR else self.values.leaf(leaf)
            for leaf in border.leaves
        ]

    def _renamed(self, recorded: str, scope: Scope) -> str:
        """Return a call key as it is at the place where it is replayed."""
        paths, template = self.recording.paths, scope.template
        if template is None or not paths[recorded].startswith(paths[template]):
            return recorded
        if recorded == template:
            return scope.site
        path = paths[recorded]  # what is behind it in a key counts the calls of the module
        return scope.site + path.removeprefix(paths[template]) + recorded.removeprefix(path)

    def _module_path(self, recorded: str, scope: Scope) -> str:
        path = self.recording.paths[recorded]
        if scope.template is None:
            return path
        return self.recording.paths[scope.site] + path.removeprefix(
            self.recording.paths[scope.template]
        )
