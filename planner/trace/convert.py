"""Turns an exported program and its recorded calls into a Graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.planner.errors import AutoparError, SourceSpan, TraceError
from autopar.planner.findings.rows import TracedBackward, with_own_backwards
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import LOSS_CALL, Op, Ref, TensorOrigin, Value, refs
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of
from autopar.planner.trace import record
from autopar.planner.trace.calls import Calls, CannotReplayError, Scope, Values, pruned
from autopar.planner.trace.export import ExportedTrace
from autopar.planner.trace.fold import Plain, TensorForm
from autopar.planner.trace.model_checks import defined_at
from autopar.planner.trace.nodes import (
    bodies,
    has_tensor,
    is_getitem,
    is_mapped,
    is_sparse,
    keeps_shapes,
    leaves_tensors,
    operands_of,
    region_graph,
    spans_of,
    storage_of,
    writers_of,
    written_arguments,
)
from autopar.planner.trace.scatter import mask_of, refuse_counted, with_scatters
from autopar.planner.trace.symbols import Ledger, ModelNames, Symbols, check_numbers
from autopar.planner.trace.traps import weight_written

# Ops without effect on the result: the exporter's checks, and aliases.
_CHECKS = re.compile(r"aten\.(_assert\w*|sym_\w+|_local_scalar_dense|is_nonzero)\.")
_ALIASES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default", "aten.detach_.default"})
# ops that return their first operand if the second is this number
_KEEPING = MappingProxyType(
    {"aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.mul.Tensor": 1, "aten.div.Tensor": 1}
)
_CUTS_GRADIENT = re.compile(r"aten\.(detach|new_\w+|(zeros|ones|full|empty|rand\w*)_like)\.")
_CASTS = re.compile(r"aten\.(to\.|type_as\.|_to_copy\.)")


def convert(exported: ExportedTrace) -> Graph:
    """Return the graph of an exported step."""
    return _Converter(exported).graph()


class _Converter:
    def __init__(self, exported: ExportedTrace) -> None:
        self.program = exported.program
        self.exported = exported
        self.autocast_at = ""
        self.loss_at = defined_at(exported.subject.step.loss)
        self.names = ModelNames(exported.subject.model, exported.subject.narrowed)
        self.symbols = Symbols(fixed_batch=exported.fixed_batch)
        self.ledger = Ledger(self.symbols, exported.subject.model_dtype)
        self.values = Values(exported, self.names, self.ledger)
        self.ops: list[Op] = []
        self.calls = Calls(exported.recording, self.values, self.ops)
        # where a backward of the model's own was traced: its record, and what it reads
        self.backwards: list[tuple[record.RecordedBackward, Sequence[Value]]] = []
        self.bodies = bodies(self.program.graph_module)
        modules = self.program.graph_module.modules()
        graphs = (part.graph for part in modules if isinstance(part, fx.GraphModule))
        self.written = set[int]().union(*map(writers_of, graphs))

    def graph(self) -> Graph:
        """Read the program from its first node to the loss."""
        scope = Scope(values={}, storages={}, call=LOSS_CALL)
        self.values.read_placeholders(scope)
        nodes = [n for n in self.program.graph.nodes if n.op not in ("placeholder", "output")]
        self._read_all(nodes, scope)
        ((output,),) = operands_of(self.program.graph.output_node())
        (loss,) = refs(self.values.value(output, scope))
        written = frozenset(
            self.ledger.tensors[one].storage for op in self.ops for one in op.writes
        )
        graph = Graph(
            ops=tuple(self.ops),
            tensors=MappingProxyType(dict(self.ledger.tensors)),
            parameters=self.names.parameters(self.ledger),
            buffers=self.names.buffers(self.ledger, written),
            constants=MappingProxyType(self.values.constants),
            inputs=tuple(
                t.name for t in self.ledger.tensors.values() if t.origin is TensorOrigin.INPUT
            ),
            calls=MappingProxyType(self.calls.modules),
            loss=loss,
            fixed_batch=self.symbols.fixed_batch,
            fixed_at=self.exported.fixed_at if self.symbols.fixed_batch is not None else "",
            lone_at=self.exported.lone_at,
            recomputed_at=self.exported.recomputed_at,
            autocast_at=self.autocast_at,
            was_noticed=self.exported.was_noticed,
            functions=tuple(self.calls.functions),
            own_gradients=tuple(self.calls.own_gradients),
        )
        if self.exported.recording.backwards and graph.fixed_batch is None:
            backwards = tuple(self._own_backwards())
            tensors = MappingProxyType(self.ledger.tensors)
            whole = replace(graph, ops=tuple(self.ops), tensors=tensors)
            graph = with_own_backwards(graph, whole, backwards)
        return pruned(with_scatters(graph))

    def _mark_backward(self, node: fx.Node, scope: Scope) -> None:
        """Remember what a backward reads; it is read after the whole step."""
        tensors, place = operands_of(node)
        if scope.template is None:  # a replayed block has the backwards of its template
            own = self.exported.recording.backwards[int(place)]
            self.backwards.append((own, [self.values.value(one, scope) for one in tensors]))

    def _own_backwards(self) -> Iterator[TracedBackward]:
        """Read the backwards that the model's code defines; their ops come after all others."""
        for own in self.exported.recording.backwards:
            if own.program is None:
                yield TracedBackward(name=own.name, where=own.where, why=own.why)
        for own, given in self.backwards:
            before = len(self.ops)
            try:
                yield self._own_backward(own, given)
            except AutoparError as error:
                del self.ops[before:]
                yield TracedBackward(name=own.name, where=own.where, why=error.found)

    def _own_backward(self, own: record.RecordedBackward, given: Sequence[Value]) -> TracedBackward:
        assert own.program is not None
        before, scope = len(self.ops), Scope(values={}, storages={}, call=own.call)
        marked = dict(zip(own.marked, given, strict=True))
        inputs = own.program.graph.find_nodes(op="placeholder")
        for node in (*inputs, *own.program.graph.find_nodes(op="get_attr")):
            if node.name not in marked:
                grad = node.op == "placeholder"
                name = self.ledger.unique("gradient" if grad else "held")
                origin = TensorOrigin.GRADIENT if grad else TensorOrigin.CONSTANT
                val = node.meta["val"]
                self.ledger.add(name, val, storage=name, origin=origin, requires_grad=grad)
                marked[node.name] = Ref(name)
            self.values.bind(node, marked[node.name], scope)
        self._read_all(own.program.graph.nodes, scope)
        (returned,) = operands_of(own.program.graph.output_node())
        made = [next(refs(self.values.value(one, scope)), "") for one in returned]
        names = [next(refs(marked[node.name])) for node in inputs]
        count = (len(names) - len(made)) // 2  # gradients, then operands, then as many results
        return TracedBackward(
            name=own.name,
            where=own.where,
            ops=tuple(op.name for op in self.ops[before:]),
            given=tuple(zip(names[-count:], names[:count], strict=True)),
            made=tuple(zip(names[count:-count], made, strict=True)),
        )

    # --- nodes -----------------------------------------------------------------------------------

    def _read_all(self, nodes: Iterable[fx.Node], scope: Scope) -> None:
        for node in nodes:
            if node.op == "call_function":
                self._read(node, scope)

    def _read(self, node: fx.Node, scope: Scope) -> None:
        target = str(node.target)
        if self.calls.read(node, scope):
            return
        if is_getitem(node):
            source, index = operands_of(node)
            value = self.values.value(source, scope)
            scope.values[node] = value[index] if isinstance(value, tuple) else None
        elif target == record.REPLAY:
            self._replay(node, scope)
        elif target == record.BACKWARD:
            self._mark_backward(node, scope)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._read_region(node, scope)
        elif _CHECKS.match(target) or not has_tensor(node.meta.get("val")):
            return
        elif any(map(is_sparse, pytree.tree_leaves(node.meta["val"]))):
            raise TraceError(
                "the model makes a sparse tensor, which cannot be divided among ranks",
                where=self._location(node, scope),
                fix="compute with dense tensors, or with an index and values",
            )
        elif any(map(is_mapped, pytree.tree_leaves(node.meta["val"]))):
            raise TraceError(
                "the model maps a function over rows with torch.vmap, which has no plain graph",
                where=self._location(node, scope),
                fix="compute all rows at once, by broadcasting",
            )
        elif self._gives_its_input(node, target, scope):
            scope.values[node] = self.values.value(node.args[0], scope)
        else:
            self._read_op(node, target, scope)

    def _gives_its_input(self, node: fx.Node, target: str, scope: Scope) -> bool:
        """Whether an op returns its input, perhaps as an alias.

        Inside an autograd.Function the answer is always no: if the Function's result were its
        argument, the Function would not be called, and its backward would be lost.
        """
        return not self.calls.is_in_function(scope) and (
            target in _ALIASES
            or self._drops_nothing(node, target, scope)
            or self._keeps_type(node, target, scope)
            or self._keeps_numbers(node, target, scope)
            or keeps_shapes(node)
        )

    def _drops_nothing(self, node: fx.Node, target: str, scope: Scope) -> bool:
        """Whether an op is a dropout that drops nothing: it returns its input itself."""
        if rule_of(target).kind is not OpKind.DROPOUT:
            return False
        arguments = dict(self.values.arguments(node, scope))
        return arguments["p"] == 0.0 or arguments["train"] is False

    def _keeps_type(self, node: fx.Node, target: str, scope: Scope) -> bool:
        """Whether a cast changes nothing, whichever dtype the model will be trained in."""
        if not _CASTS.match(target):
            return False
        (source,) = refs(self.values.value(node.args[0], scope))
        same_type = self.ledger.tensors[source].dtype == self.ledger.dtype(node.meta["val"].dtype)
        asks_copy = bool(node.kwargs.get("copy")) or "contiguous" in str(node.kwargs)
        return same_type and not asks_copy

    def _keeps_numbers(self, node: fx.Node, target: str, scope: Scope) -> bool:
        """Whether an op such as `x + 0` or `x * 1.0` may be replaced by x itself.

        It must keep x's dtype and gradient, and neither x nor the result may be written to.
        """
        first, *others = (*operands_of(node), None)
        if others != [_KEEPING.get(target), None] or node.kwargs or not isinstance(first, fx.Node):
            return False
        made, val = node.meta["val"], first.meta["val"]
        (source,) = refs(self.values.value(first, scope))
        is_cut_off = self.ledger.tensors[source].requires_grad and not scope.grad_enabled
        is_written = self.written & {storage_of(made), storage_of(val)}
        return made.dtype == val.dtype and not (is_cut_off or is_written)

    def _read_op(self, node: fx.Node, target: str, scope: Scope) -> None:
        refuse_counted(node, target, self._location(node, scope))
        check_numbers(node, self.symbols, self._location(node, scope))
        arguments = self.values.arguments(node, scope)
        if dict(arguments).get("sparse") is True:
            raise TraceError(
                "an embedding has sparse gradients, which ranks do not add up",
                where=self._location(node, scope),
                expected="gradients that are dense",
                fix="leave out sparse=True",
            )
        inputs = tuple(self.ledger.newest(name) for _, value in arguments for name in refs(value))
        name = self.ledger.unique(node.name)
        vals = node.meta["val"]
        is_many = isinstance(vals, (tuple, list))
        outputs: list[Value] = []
        differentiable = scope.grad_enabled and any(
            self.ledger.tensors[i].requires_grad for i in inputs
        )
        mask = mask_of(target, dict(arguments), self.ledger.tensors)
        self._bound_unbacked(vals, inputs, mask or name, picks_broadcast="masked_select" in target)
        for i, val in enumerate(vals if is_many else (vals,)):
            if not isinstance(val, torch.Tensor):
                outputs.append(None)
                continue
            out = self.ledger.unique(f"{name}_{i}") if is_many else name
            owner = scope.storages.setdefault(storage_of(val), out)
            storage = self.ledger.tensors[owner].storage if owner != out else out
            grad = differentiable and not _CUTS_GRADIENT.match(target)
            self.ledger.add(out, val, storage=storage, origin=TensorOrigin.OP, requires_grad=grad)
            outputs.append(Ref(out))
        scope.values[node] = tuple(outputs) if is_many else outputs[0]
        written = self._written(node, target, dict(arguments), scope)
        has_hidden_writes = bool(rule_of(target).updates)
        if differentiable and not has_hidden_writes:
            self.ledger.require_gradients(written)
        self.ops.append(
            Op(
                name=name,
                target=target,
                arguments=arguments,
                inputs=inputs,
                outputs=tuple(refs(tuple(outputs))),
                call=scope.call,
                grad_enabled=scope.grad_enabled,
                writes=written,
                spans=self._spans(node, scope),
            )
        )
        if not is_many and not has_hidden_writes:
            self.ledger.supersede(written, name)

    def _spans(self, node: fx.Node, scope: Scope) -> tuple[SourceSpan, ...]:
        return scope.spans_of(node) or (self.loss_at if scope.call == LOSS_CALL else ())

    def _location(self, node: fx.Node, scope: Scope) -> str:
        """Return `file:line` of an op, or ""."""
        return next(map(str, self._spans(node, scope)), "")

    def _bound_unbacked(
        self, vals: Any, inputs: tuple[str, ...], counter: str, *, picks_broadcast: bool
    ) -> None:
        """Bound data-dependent sizes by the number of elements of the mask, or of the first input.

        `counter` names the mask, if there is one. With `picks_broadcast`, the mask may be
        broadcast, and the larger of both numbers counts.
        """
        for val in vals if isinstance(vals, (tuple, list)) else (vals,):
            for size in val.shape if isinstance(val, torch.Tensor) and inputs else ():
                tensors = self.ledger.tensors
                counted = [tensors[counter if counter in tensors else inputs[0]].numel]
                if picks_broadcast:
                    counted.append(tensors[inputs[0]].numel)
                limit = max(counted)
                self.symbols.bound(size, limit, counter=counter)

    def _written(
        self, node: fx.Node, target: str, arguments: Mapping[str, Value], scope: Scope
    ) -> tuple[str, ...]:
        hidden = rule_of(target).updates
        if hidden and not (arguments.get("training") or arguments.get("use_input_stats")):
            hidden = ()
        keys = (*written_arguments(node), *hidden)
        written = tuple(name for key in keys for name in refs(arguments.get(key)))
        for name in {self.ledger.tensors[one].storage for one in written}:
            if self.ledger.tensors[name].origin is TensorOrigin.PARAMETER:
                raise weight_written(name, self._location(node, scope))
        return written

    def _read_region(self, node: fx.Node, scope: Scope) -> None:
        """Inline the nested graph of a no_grad or autocast region; raise for any other region."""
        target = str(node.target)
        position = next(i for i, a in enumerate(node.args) if region_graph(a) is not None)
        if "wrap_with_set_grad_enabled" in target:
            region = scope.inner(grad_enabled=scope.grad_enabled and bool(node.args[0]))
        elif "wrap_with_autocast" in target:
            region = scope.inner()
            is_enabled = node.args[2]
            if is_enabled and not self.autocast_at:
                self.autocast_at = self._first_location(node.args[position], scope)
        else:
            raise TraceError(
                f"the model uses {target}, which has no plain graph",
                where=self._location(node, scope),
                fix="write the control flow with torch.where, or unroll it",
            )
        graph = region_graph(node.args[position])
        assert graph is not None
        operands = operands_of(node)[position + 1 :]
        inside = [n for n in graph.nodes if n.op == "placeholder"]
        for placeholder, operand in zip(inside, operands, strict=True):
            self.values.bind(placeholder, self.values.value(operand, scope), region)
        self._read_all(graph.nodes, region)
        scope.call = region.call
        (returned,) = operands_of(graph.output_node())
        results = tuple(self.values.value(n, region) for n in returned)
        for result, val in zip(results, returned, strict=True):
            self.values.remember_storage(val, result, scope)
        scope.values[node] = results

    def _first_location(self, region: Any, scope: Scope) -> str:
        """Return where a region begins: at its first op, because the region's node has no line."""
        graph = region_graph(region)
        places = (self._location(node, scope) for node in (graph.nodes if graph else ()))
        return next(filter(None, places), scope.call)

    # --- calls -----------------------------------------------------------------------------------

    def _replay(self, node: fx.Node, scope: Scope) -> None:
        tensors, site = operands_of(node)
        template = self.exported.recording.calls[str(site)].template
        assert template is not None
        nodes = self.bodies[template.call]
        if leaves_tensors(nodes):
            raise CannotReplayError(template.call)
        spans = spans_of(nodes[0]), scope.spans_of(node)
        body = scope.inner(template=template.call, site=str(site), spans=spans)
        body.storages.clear()
        for inner, outer in zip(operands_of(nodes[0])[0], tensors, strict=True):
            self.values.bind(inner, self.values.value(outer, scope), body)
        self._read_all(nodes[1:-1], body)
        returned = iter(operands_of(nodes[-1])[0])
        fresh = []
        for leaf in template.leaves:
            if not isinstance(leaf, Plain):
                inner = next(returned)
                if isinstance(leaf, TensorForm):
                    fresh.append((inner, self.values.value(inner, body)))
        scope.values[node] = tuple(value for _, value in fresh)
        for user in node.users:
            if is_getitem(user):
                self.values.remember_storage(user, fresh[operands_of(user)[1]][1], scope)
