"""Says by what a mean counts that is not over all of a batch, and whether the batch alone tells it.

A part of a batch has the weight of its own such count in the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.planner.findings.row_numbers import counts_rows
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin, Ref
from autopar.planner.rules.random_ops import is_random
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.shapes import elementwise
from autopar.planner.rules.table import kind_of, rule_of

_MEAN = 1  # of losses, as ATen counts reductions


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What is divided, and by which number that the batch alone tells.

    `counts` are made of rows, `steps` are the ops that make the divisor of these numbers:
    `clamp(min=1)`, say.
    """

    counted: str
    divisor: str
    counts: tuple[str, ...]
    steps: tuple[Op, ...]


def is_class(graph: Graph, target: Ref) -> bool:
    """Whether a loss over classes is given one of them for each row, not a share of every one."""
    return graph.tensors[target.tensor].is_whole_numbered


def counted_by(op: Op, graph: Graph) -> tuple[str, ...]:
    """Return by what a mean counts, () where it is over all of the batch or no mean.

    That are the targets of a loss over classes, with the weights of these, or the mask that picked
    what the mean is over.
    """
    arguments = dict(op.arguments)
    is_mean = arguments.get("reduction") == _MEAN or kind_of(op) is OpKind.MEAN
    if not is_mean:
        return ()
    if kind_of(op).is_class_loss:
        target, weight = op.argument("target"), op.argument("weight")
        assert isinstance(target, Ref)
        has_classes = is_class(graph, target)
        given = (target, weight) if has_classes else ()
        return tuple(one.tensor for one in given if isinstance(one, Ref))
    made = (graph.tensors[name] for name in op.outputs)
    if any(one.counted_by for one in made):
        return ()
    return tuple(sorted({graph.tensors[name].counted_by for name in op.inputs} - {""}))


def counts_untold(op: Op, graph: Graph) -> bool:
    """Whether a mean counts by what the model alone holds or draws: each part has its own there."""
    names = counted_by(op, graph)
    if not names or is_told(graph, names):
        return False
    if kind_of(op).is_class_loss and len(names) == 1:
        return _ignores(op, graph, names[0])
    return True


def is_told(graph: Graph, names: Iterable[str]) -> bool:
    """Whether the batch alone tells what a mean counts by."""
    tensors = [graph.tensors.get(name) for name in names]
    is_known = all(one is not None and one.counted_by != one.name for one in tensors)
    return is_known and steps_from_batch(graph, names) is not None


def _ignores(op: Op, graph: Graph, target: str) -> bool:
    """Whether targets are made with the class that a loss leaves out."""
    ignored = op.argument("ignore_index")
    return any(
        not isinstance(value, bool) and value == ignored
        for step in graph.index.needed_for([target])
        for _, value in step.arguments
    )


def division_of(graph: Graph, op: Op) -> Division | None:
    """Return what an op divides by a number that the batch alone tells, None where it does not.

    Of a sum over rows (`(x * mask).sum() / mask.sum()`) it makes a mean.
    """
    if kind_of(op) is not OpKind.DIVISION:
        return None
    above, below = op.argument("self"), op.argument("other")
    is_number = not graph.tensors[op.outputs[0]].shape
    if not (is_number and isinstance(above, Ref) and isinstance(below, Ref)):
        return None
    if graph.tensors[below.tensor].requires_grad or steps_from_batch(graph, [below.tensor]) is None:
        return None
    steps, counts = _made_of_numbers(graph, below.tensor)
    return Division(counted=above.tensor, divisor=below.tensor, counts=counts, steps=steps)


def _made_of_numbers(graph: Graph, name: str) -> tuple[tuple[Op, ...], tuple[str, ...]]:
    """Return the ops that make a number of other numbers, in order, and those made of rows.

    What is the same for every batch is made anew as well.
    """
    of_batch = {out for op in graph.index.reached_from(graph.inputs) for out in op.outputs}
    waiting, steps, counts = [name], dict[str, Op](), dict[str, None]()
    while waiting:
        one = waiting.pop()
        maker = graph.index.made_by.get(one)
        if maker is None:
            continue
        if one not in of_batch or _is_of_numbers(maker, graph):
            steps[maker.name] = maker
            waiting += maker.inputs
        else:
            counts[one] = None
    places = graph.index.places
    return tuple(sorted(steps.values(), key=lambda op: places[op.name])), tuple(counts)


def _is_of_numbers(op: Op, graph: Graph) -> bool:
    """Whether an op makes a number of numbers, whatever rows there are, as many of many."""
    is_for_each = rule_of(op.target).shape is elementwise and not counts_rows(op)
    return is_for_each and not op.writes and not any(graph.tensors[i].shape for i in op.inputs)


def steps_from_batch(graph: Graph, targets: Iterable[str]) -> tuple[Op, ...] | None:
    """Return the ops that make tensors from the batch alone.

    None where a parameter, a buffer or what was drawn at random is in them.
    """
    needed = set(targets)
    steps = graph.index.needed_for(needed)
    needed |= {name for op in steps for name in op.inputs}
    origins = {graph.tensors[name].origin for name in needed}
    is_own = origins & {Origin.PARAMETER, Origin.BUFFER} or any(map(is_random, steps))
    return None if is_own else steps
