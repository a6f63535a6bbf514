"""Finds layers that write to their inputs or cannot be recomputed, and buffers that count steps.

A layer that is recomputed or wrapped by `fully_shard` works on copies of the inputs that it writes
to, and returns copies of the results that other code writes to (runtime/model/parts.py). This is
right only if other code sees the layer's writes only in the layer's results.

Also finds attributes that the step of an optimizer or scheduler sets and the forward reads: printed
code would keep the traced value.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from autopar.planner.costs.layers.chunked_loss import NoChunks, chunked_loss
from autopar.planner.costs.ops.kept import keeps_anything
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.findings.loss import Follows, all_of_parts
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import (
    MODULE,
    GradientUse,
    ModuleCall,
    Op,
    TensorOrigin,
    objects,
    refs,
)
from autopar.planner.layers import Layer
from autopar.planner.model.functions import nested_code
from autopar.planner.precision import FUSED, Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

if TYPE_CHECKING:
    from torch import nn

_OF_A_MATRIX = re.compile(r"aten\.(linear|matmul|einsum|tensordot)\.")


def writing_calls(graph: Graph, calls: Iterable[str]) -> frozenset[str]:
    """Return the calls that must work on copies; raises if copies would change results."""
    if not any(True for _ in written(graph.ops, graph)):
        return frozenset()
    known = (call for call in calls if call in graph.calls)
    return frozenset(call for call in known if _Borders(graph, call).have_writes)


def written(ops: Iterable[Op], graph: Graph) -> Iterator[str]:
    """Yield the storages of activations and of the batch that ops write to.

    A scatter in the graph counts as a write: in the code it writes to a part of a tensor.
    """
    for op in ops:
        for name in op.inputs[:1] if kind_of(op) is OpKind.SCATTER else op.writes:
            storage = graph.tensors[name].storage
            if graph.tensors[storage].origin in (TensorOrigin.OP, TensorOrigin.INPUT):
                yield storage


class _Borders:
    """The writes of a call to its inputs, and those of later ops to its results."""

    def __init__(self, graph: Graph, call: str) -> None:
        self.graph, self.call = graph, graph.calls[call]
        self.own = graph.index.ops_in[call]
        self.after = graph.ops[graph.index.places[self.own[-1].name] + 1 :] if self.own else ()
        self.results = graph.tensors.keys() & set(refs(self.call.result))

    @property
    def have_writes(self) -> bool:
        """Whether there are writes of either kind; raises if copies would change results."""
        made = {name for op in self.own for name in op.outputs if self._storage(name) == name}
        given = frozenset(written(self.own, self.graph)) - made
        views = [
            name
            for name in self.results
            if self._storage(name) in made - {name}
            or (name in made and self._is_view_within(self.graph.index.made_by[name]))
        ]
        returned = frozenset(map(self._storage, views)).intersection(
            written(self.after, self.graph)
        )
        for storage in given:
            if self._is_seen(storage):
                self._refuse("writes into its input, and other code reads that afterwards")
        for storage in returned:
            if [self._storage(name) for name in self.results].count(storage) > 1:
                self._refuse("returns views of one tensor, and other code writes into one")
        return bool(given or returned)

    def _is_view_within(self, op: Op) -> bool:
        """Whether an op's result is a view of a matrix that torch makes within the op."""
        (result, *_) = op.outputs
        return bool(_OF_A_MATRIX.match(op.target)) and len(self.graph.tensors[result].shape) > 2

    def _is_seen(self, storage: str) -> bool:
        """Whether other code would miss the call's writes if these went to a copy."""
        given = self.graph.tensors.keys() & _given(self.call)
        if len([name for name in given if self._storage(name) == storage]) != 1:
            return True
        hidden = {name for op in self.own for name in op.outputs} - self.results
        known = set(self.results)
        for op in self.after:
            aliases = {name for name in op.inputs if self._storage(name) == storage}
            if aliases - known or not hidden.isdisjoint(op.inputs):
                return True
            known.update(op.outputs)
        return False

    def _storage(self, name: str) -> str:
        return self.graph.tensors[name].storage

    def _refuse(self, what: str) -> None:
        raise InputError(
            f"layer {self.call.path!r} {what}: with ZeRO-2, ZeRO-3 or recomputation, it works on "
            "a copy, so that some code would miss the writes",
            where=self.own[0].location,
            expected="a layer whose writes are needed only in its results",
            fix="write without += and inplace=True there, or plan with zero=1 and recompute none",
        )


def _given(call: ModuleCall) -> frozenset[str]:
    return frozenset(refs((*call.arguments, *(value for _, value in call.keywords))))


def steady_buffers(graph: Graph) -> tuple[str, ...]:
    """Return the buffers that the forward writes independently of rows.

    Each microbatch would write them again, so that a step count would run ahead. A batch norm's
    count is left out, because a batch norm takes the statistics of each microbatch.
    """
    of_parts = all_of_parts(graph)
    steady = {buffer.name for buffer in graph.buffers}
    written = set[str]()
    for op in graph.ops:
        own = written_buffers(op, graph)
        written |= own
        is_of_norm = op.call in graph.calls and graph.calls[op.call].is_batch_norm
        if is_of_norm or any(of_parts[name] is not Follows.ALIKE for name in op.inputs):
            steady -= own
    return tuple(one.name for one in graph.buffers if one.name in steady & written)


def written_buffers(op: Op, graph: Graph) -> set[str]:
    """Return the buffers that an op writes to."""
    storages = graph.index.written_by(op)
    return {name for name in storages if graph.tensors[name].origin is TensorOrigin.BUFFER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindrance:
    """Why a layer cannot be recomputed, and where the model's code shows it."""

    why: str
    where: str = ""


_SMALL = "it would compute gradients of the unscaled loss, and small ones would be 0 in fp16"
_TWICE = "the model computes a gradient, through which the backward runs a second time"
Unable: TypeAlias = Mapping[Recompute, Hindrance]  # the modes that a layer cannot have, and why


def unable(layers: Sequence[Layer], graph: Graph, *, precision: Precision) -> Iterator[Unable]:
    """Yield for each layer the recompute modes that it cannot have, and why."""
    writers = {storage: op for op in reversed(graph.ops) for storage in written([op], graph)}
    taken = (one for one in graph.own_gradients if one.use is GradientUse.TAKEN)
    twice = [Hindrance(why=_TWICE, where=one.where) for one in taken]
    small = [Hindrance(why=_SMALL)]
    for layer in layers:
        hindrance = next(iter(twice), None) or _hindrance(layer, graph, writers)
        own = (
            (mode, hindrance or _written_result(layer, graph, writers, mode))
            for mode in Recompute
            if mode.spares_device
        )
        found = _not_chunked(layer, graph, [*twice, *small] if precision.scales_loss else twice)
        yield found | {mode: why for mode, why in own if why is not None}


def _not_chunked(
    layer: Layer, graph: Graph, others: Sequence[Hindrance]
) -> dict[Recompute, Hindrance]:
    """Return why the loss cannot make a layer's logits in chunks; empty if it can."""
    chunked = chunked_loss(layer.ops, graph)
    if isinstance(chunked, NoChunks):
        return {Recompute.CHUNKED: Hindrance(why=chunked.why, where=chunked.where)}
    if layer.call != chunked.ops[0].call:
        return {Recompute.CHUNKED: Hindrance(why="it has more than the linear layer and the loss")}
    return dict.fromkeys([Recompute.CHUNKED], others[0]) if others else {}


def objects_given(layers: Iterable[Layer], graph: Graph) -> tuple[str, ...]:
    """Return the classes of layers' arguments that are objects, not tensors or modules.

    A recomputed layer gets such an object, for example a cache, in the state that it had before the
    layer's forward. So its contents of that time are kept until the recomputation.
    """
    calls = [graph.calls[layer.call] for layer in layers if layer.call in graph.calls]
    values = (v for call in calls for v in (*call.arguments, *(v for _, v in call.keywords)))
    given = {name for value in values for name in objects(value)}
    return tuple(sorted(name for name in given if not name.startswith(MODULE)))


def _hindrance(layer: Layer, graph: Graph, writers: Mapping[str, Op]) -> Hindrance | None:
    """Return why a layer cannot be recomputed, or None.

    `writers` maps a storage to the first op that writes to it.
    """
    call = graph.calls.get(layer.call)
    if call is None or call.is_function or not call.path:
        return Hindrance(why="its code is in the model's own forward, not in a module's")
    made = graph.index.storages(name for op in layer.ops for name in op.outputs)
    if writers.keys().isdisjoint((*made, *written(layer.ops, graph))):
        return None
    try:
        writing_calls(graph, [layer.call])
    except InputError as fault:
        return Hindrance(why=fault.found, where=fault.where)
    return None


def _written_result(
    layer: Layer, graph: Graph, writers: Mapping[str, Op], mode: Recompute
) -> Hindrance | None:
    """Return why a layer cannot have a mode: an op writes into a result that the mode saves."""
    if mode.saved_ops is None:
        return None
    # kernels of an LSTM, GRU or RNN overwrite products with gates
    recurrent = (op for op in layer.ops if kind_of(op) is OpKind.RECURRENT)
    op = next(recurrent, None) or _writer_into_saved(layer, graph, writers, mode)
    if op is None:
        return None
    why = f"{op.name} writes into the result of an op, which {mode} recomputation would save"
    return Hindrance(why=why, where=op.location)


def _writer_into_saved(
    layer: Layer, graph: Graph, writers: Mapping[str, Op], mode: Recompute
) -> Op | None:
    """Return an op that writes into a result which a mode saves, or None.

    The recomputation ends with the last op that saves a tensor for the backward, so writes into
    results of later ops do no harm.
    """
    if not writers:
        return None
    ops = [op for op in layer.ops if layer.call in graph.index.around(op.call)]
    last = max((i for i, op in enumerate(ops) if keeps_anything(op, graph, FUSED)), default=0)
    saved = (name for op in ops[:last] if mode.saves(op, FUSED) for name in op.outputs)
    return next((writers[name] for name in saved if name in writers), None)


def check_stepped_state(path: Path, model: nn.Module | None, step: Callable[[], Any]) -> None:
    """Run a step, undo its changes, and raise if the forward or the loss reads what it changed.

    A step can change such state if the optimizer holds the model, or the file holds the optimizer.
    """
    from autopar.planner.model.outside import state_scope  # imported here: torch takes seconds

    outside = state_scope(path, model)
    before = outside.snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()
        changed = before.changes_to(outside.snapshot())
    finally:
        before.put_back()
    read = _names_read(outside.files)
    for place in changed:
        if read.issuperset(re.findall(r"(?:^|\.)(\w+)", place.partition(" of ")[0])):
            raise InputError(
                f"the optimizer's or the scheduler's step sets {place}, which the forward or the "
                "loss reads: the script would keep one value",
                where=str(path),
                expected="what changes in training to be a buffer of the model",
                fix="count steps in a buffer that forward writes (self.steps += 1), and compute "
                "the value from it",
            )


def _names_read(files: tuple[ModuleType, ...]) -> set[str]:
    """Return the names used in the code of modules, the loss, and functions that these call."""
    waiting = [function for file in files for function in _run_in_a_step(file)]
    met, names = set[CodeType](), set[str]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in met:
            continue
        met.add(function.__code__)
        for code in nested_code(function.__code__):
            names |= {*code.co_names, *code.co_freevars}
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        waiting += [one for one in called if isinstance(one, FunctionType)]
    return names


def _run_in_a_step(file: ModuleType) -> Iterator[FunctionType]:
    from torch import nn

    for name, value in vars(file).items():
        if name == "loss" and isinstance(value, FunctionType):
            yield value
        if isinstance(value, type) and issubclass(value, nn.Module):
            methods = (one for key, one in vars(value).items() if key != "__init__")
            yield from (one for one in methods if isinstance(one, FunctionType))
