"""Says which layers can run again in their backward, and which only as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.planner.costs.ops.kept import keeps_anything
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.findings.writing_layers import writing_calls, written
from autopar.planner.graph import Graph
from autopar.planner.layers import Layer
from autopar.planner.ops import MODULE, GradientUse, Op, objects
from autopar.planner.precision import FUSED
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindrance:
    """Why a layer cannot run again, and where in the model's code that shows."""

    why: str
    where: str = ""


_TWICE = "the model takes a gradient, through which the backward goes a second time"
Unable: TypeAlias = Mapping[Recompute, Hindrance]  # the modes that a layer cannot have, and why


def unable(layers: Sequence[Layer], graph: Graph) -> Iterator[Unable]:
    """Yield for each layer the modes in which it cannot be recomputed."""
    writers = {storage: op for op in reversed(graph.ops) for storage in written([op], graph)}
    taken = (one for one in graph.own_gradients if one.use is GradientUse.TAKEN)
    twice = [Hindrance(why=_TWICE, where=one.where) for one in taken]
    for layer in layers:
        hindrance = next(iter(twice), None) or _hindrance(layer, graph, writers)
        op = _recurrent(layer) or _writer_into_kept(layer, graph, writers)
        if hindrance is not None:
            yield {Recompute.SELECTIVE: hindrance, Recompute.FULL: hindrance}
        elif op is not None:
            why = f"{op.name} writes into the result of a product, which would be kept"
            yield {Recompute.SELECTIVE: Hindrance(why=why, where=op.location)}
        else:
            yield {}


def objects_given(layers: Iterable[Layer], graph: Graph) -> tuple[str, ...]:
    """Return the classes of what layers are given that is neither tensor nor module: caches, say.

    A layer that runs again finds them as they were, for which what they hold is kept till then.
    """
    calls = [graph.calls[layer.call] for layer in layers if layer.call in graph.calls]
    values = (v for call in calls for v in (*call.arguments, *(v for _, v in call.keywords)))
    given = {name for value in values for name in objects(value)}
    return tuple(sorted(name for name in given if not name.startswith(MODULE)))


def _hindrance(layer: Layer, graph: Graph, writers: Mapping[str, Op]) -> Hindrance | None:
    """Return why a layer cannot run twice, None if it can; `writers` are ops by what they write."""
    call = graph.calls.get(layer.call)
    if call is None or call.is_function or not call.path:
        return Hindrance(why="its code stands in the model's own forward, not in a module's")
    made = graph.index.storages(name for op in layer.ops for name in op.outputs)
    if writers.keys().isdisjoint((*made, *written(layer.ops, graph))):
        return None
    try:
        writing_calls(graph, [layer.call])
    except InputError as fault:
        return Hindrance(why=fault.found, where=fault.where)
    return None


def _recurrent(layer: Layer) -> Op | None:
    """Return an op that is several, which make gates in the place of their products."""
    return next((op for op in layer.ops if kind_of(op) is OpKind.RECURRENT), None)


def _writer_into_kept(layer: Layer, graph: Graph, writers: Mapping[str, Op]) -> Op | None:
    """Return an op that changes what selective recomputation keeps: a result of a contraction.

    What the last op keeps of its operands is the last that runs again: behind it there is no harm.
    """
    if not writers:
        return None
    ops = [op for op in layer.ops if layer.call in graph.index.around(op.call)]
    last = max((i for i, op in enumerate(ops) if keeps_anything(op, graph, FUSED)), default=0)
    kept = (name for op in ops[:last] if rule_of(op.target).contracts for name in op.outputs)
    return next((writers[name] for name in kept if name in writers), None)
