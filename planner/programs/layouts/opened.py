"""Finds the classes that a script opens for given layouts, and estimates the lines it prints.

A class is opened if the plan changes its code: an op's arguments contain a size of which a rank has
a part, a rank draws its own random numbers, or a tensor is converted between two ops. PyTorch's
small modules are printed inline in the class that calls them. Lines are estimated from the author's
code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import LOSS_CALL, Op, TensorOrigin, Value
from autopar.planner.layers import Layers
from autopar.planner.programs.layouts.problem import (
    ChangedCode,
    ConvertingCode,
    Demand,
    LayoutNode,
    PrintedCode,
    Problem,
)
from autopar.planner.rules.rule import OpKind, SplitForm, is_random
from autopar.planner.rules.signature import Leaf
from autopar.planner.rules.table import kind_of, rule_of


def argument(op: Op, name: str) -> Value:
    """Return an argument of an op, or None."""
    return next((value for key, value in op.arguments if key == name), None)


def is_split(layout: Layout) -> bool:
    """Whether a layout is a split."""
    return layout.kind is LayoutKind.SPLIT


def changes_code(op: Op, layout: OpLayout, graph: Graph, axes: GraphAxes) -> bool:
    """Whether a layout changes how a script writes an op, apart from conversions."""
    return (
        split_form(op, layout, axes) is not None
        or _has_local_size(op, layout, graph, axes)
        or has_local_groups(op, layout, axes)
    )


def split_form(op: Op, layout: OpLayout, axes: GraphAxes) -> SplitForm | None:
    """Return the form in which ranks run a split op; None if they run the op itself."""
    return rule_of(op.target).form_along(axes.ops[op.name].signature, layout.letter)


def has_local_groups(op: Op, layout: OpLayout, axes: GraphAxes) -> bool:
    """Whether the groups of a convolution or norm are split, so that a rank has fewer."""
    channels = layout.needs[0] if layout.needs else None
    if channels is None or not is_split(channels) or channels.dim != 1:
        return False
    if argument(op, "num_groups") is not None:
        return True
    # Channels may be split inside every group instead; then a rank has all groups.
    groups = axes.ops[op.name].signature.letters.get("g")
    is_of_groups = isinstance(groups, Leaf) and layout.letter == groups.name
    return kind_of(op) is OpKind.CONVOLUTION and is_of_groups


def size_in_arguments(op: Op, layout: OpLayout) -> Value:
    """Return the argument with the size of the dim along which an op's result is split, or None."""
    made = layout.gives[0]
    if kind_of(op) is OpKind.REPEAT:
        if not is_split(made) or is_split(layout.needs[0]):
            return None
        given = argument(op, "repeats")
        return given[made.dim] if isinstance(given, tuple) else given
    if not (name := rule_of(op.target).sizes):
        return None
    sizes = argument(op, name)
    if not is_split(made) or not isinstance(sizes, tuple) or sizes[made.dim] == -1:
        return None
    return sizes[made.dim]


def _has_local_size(op: Op, layout: OpLayout, graph: Graph, axes: GraphAxes) -> bool:
    rule = rule_of(op.target)
    if rule.sizes or rule.kind is OpKind.REPEAT:
        is_of_rows = layout.gives[0].axis in axes.of_rows
        return size_in_arguments(op, layout) is not None and not is_of_rows
    if rule.cuts:
        need, dim = layout.needs[0], argument(op, "dim")
        rank = len(graph.tensors[op.inputs[0]].shape)
        return is_split(need) and isinstance(dim, int) and dim % rank == need.dim
    return False


# Numbers of lines. An opened class has a `class` and a `def` line, an attribute and docstrings.
_CLASS_LINES = 9.0
_CONVERSION_LINES = 2.0  # with the comment above it
_FUNCTION_LINES = 5.0  # of a function call with the weights and sizes that its module had
_DRAWING_LINES = 1.0  # `with split_randomness(self.tensor):`
_WEIGHT_LINES = 1.0  # in the list of split and replicated weights
_OWN_LINES = 3.0  # to convert a weight: a function call replaces its module


def printed_code(
    graph: Graph, axes: GraphAxes, layers: Layers, problem: Problem, is_one_stage: bool
) -> PrintedCode:
    """Return the lines that a script prints for each choice.

    With several stages, a script prints the classes around layers in any case: they cost nothing.
    """
    return _Reader(graph, axes, layers, problem).code(is_one_stage=is_one_stage)


class _Reader:
    def __init__(self, graph: Graph, axes: GraphAxes, layers: Layers, problem: Problem) -> None:
        self.graph, self.axes, self.layers, self.problem = graph, axes, layers, problem
        self.numbers = {name: number for number, name in enumerate(self.calls_of)}
        self.weights = frozenset(
            one.name for one in graph.tensors.values() if one.origin is TensorOrigin.PARAMETER
        )

    def code(self, *, is_one_stage: bool) -> PrintedCode:
        demands, sources = self.problem.demands, self.problem.sources
        around = frozenset() if is_one_stage else self._around_layers()
        return PrintedCode(
            lines=tuple(
                0.0 if name in around else self._class_lines(calls)
                for name, calls in self.calls_of.items()
            ),
            changed=tuple(self._changed()),
            converting=tuple(
                one
                for number, demand in enumerate(demands)
                for one in self._converting(number, demand)
            ),
            demand_lines=tuple(
                _CONVERSION_LINES if self._is_computed(one.tensor) else _OWN_LINES
                for one in demands
            ),
            slot_lines=tuple(
                _WEIGHT_LINES if one.tensor in self.weights else 0.0 for one in sources
            ),
        )

    # --- classes

    @cached_property
    def children(self) -> Mapping[str, Sequence[str]]:
        """The calls directly in each call."""
        found: dict[str, list[str]] = defaultdict(list)
        for key, call in self.graph.calls.items():
            if call.parent is not None:
                found[call.parent].append(key)
        return found

    @cached_property
    def calls_of(self) -> Mapping[str, Sequence[str]]:
        """The calls of each class that may be opened; the loss function counts as a class."""
        found: dict[str, list[str]] = defaultdict(list)
        for call in (LOSS_CALL, *self.graph.calls):
            if call not in self.small:
                found[self._class_name(call)].append(call)
        return found

    @cached_property
    def own_ops(self) -> Mapping[str, Sequence[Op]]:
        """The ops that each call prints if it is opened."""
        found: dict[str, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            found[self._chain(op.call)[-1]].append(op)
        return found

    def _class_name(self, call: str) -> str:
        return call if call == LOSS_CALL else self.graph.calls[call].class_name

    @cached_property
    def small(self) -> frozenset[str]:
        """The calls printed inline in their callers: of Sequential, and of PyTorch's small modules.

        A small module has no children, and its ops have the spans of the author's expression that
        calls it.
        """
        ops_in = self.graph.index.ops_in
        return frozenset(
            key
            for key, call in self.graph.calls.items()
            if call.parent is not None
            and (
                call.class_name == "Sequential"
                if self.children.get(key)
                else call.spans and all(op.spans == call.spans for op in ops_in.get(key, ()))
            )
        )

    def _chain(self, call: str) -> tuple[str, ...]:
        """Return what may be opened around an op: the loss function, then calls from outside in."""
        around = reversed(self.graph.index.around(call))
        return (LOSS_CALL, *(one for one in around if one not in self.small))

    def _class_lines(self, calls: Sequence[str]) -> float:
        """Return the lines of an opened class.

        It has a statement for each line of the author, and a line for each class of its modules.
        """
        statements = {op.location for op in self.own_ops.get(calls[0], ())}
        called = [one for one in self.children.get(calls[0], ()) if one not in self.small]
        return _CLASS_LINES + len(statements) + len(set(map(self._class_name, called)))

    def _around_layers(self) -> frozenset[str]:
        """Return the classes of the calls around layers; stages are cut from these."""
        index = self.graph.index
        outer = (call for layer in self.layers.layers for call in index.around(layer.call)[1:])
        return frozenset(map(self._class_name, outer))

    # --- what opens them

    def _changed(self) -> Iterator[ChangedCode]:
        for number, node in enumerate(self.problem.nodes):
            chain = self._chain(node.op.call)
            for lines, places in self._changing(node).items():
                yield ChangedCode(
                    node=number, choices=places, classes=self._classes(chain[-1:]), lines=lines
                )
            if is_random(node.op) and (drawing := self._drawing(node)):
                yield ChangedCode(
                    node=number, choices=drawing, classes=self._classes(chain), lines=_DRAWING_LINES
                )

    def _changing(self, node: LayoutNode) -> Mapping[float, tuple[int, ...]]:
        """Return the choices that change an op's code, by the number of additional lines."""
        found: dict[float, tuple[int, ...]] = {}
        for place, choice in enumerate(node.choices):
            layout = choice.strategy
            if self._changes(node.op, layout):
                form = split_form(node.op, layout, self.axes)
                is_function = form is not None and bool(form.function)
                lines = _FUNCTION_LINES if is_function or node.op.call in self.small else 0.0
                found[lines] = (*found.get(lines, ()), place)
        return found

    def _changes(self, op: Op, layout: OpLayout) -> bool:
        """Whether a layout changes an op's code, or splits a tensor of an op that has sizes."""
        parts = any(map(is_split, (*layout.needs, *layout.gives)))
        has_sizes = bool(rule_of(op.target).sizes) and parts
        return has_sizes or changes_code(op, layout, self.graph, self.axes)

    def _drawing(self, node: LayoutNode) -> tuple[int, ...]:
        """Return the choices for which each rank draws its own random numbers."""
        choices = enumerate(node.choices)
        return tuple(place for place, choice in choices if any(map(is_split, choice.gives)))

    def _classes(self, calls: Sequence[str]) -> tuple[int, ...]:
        """Return the classes of calls; the loss function is opened only if nothing else can be."""
        usable = [call for call in calls if call != LOSS_CALL] or calls
        return tuple(dict.fromkeys(self.numbers[self._class_name(call)] for call in usable))

    def _is_computed(self, tensor: str) -> bool:
        return self.graph.tensors[tensor].origin in (TensorOrigin.OP, TensorOrigin.INPUT)

    def _converting(self, number: int, demand: Demand) -> Iterator[ConvertingCode]:
        """Yield the classes that may convert a tensor, for each op or next layer that needs it."""
        users = [self._chain(self.problem.nodes[node].op.call) for node, _ in demand.consumers]
        is_alone = len(users) + (demand.crosses >= 0) <= 1
        for place, user in enumerate(users):
            calls = user[-1:]
            if self._is_computed(demand.tensor):
                calls = self._between(self._maker(demand.tensor, user), user, is_alone=is_alone)
            yield ConvertingCode(demand=number, consumer=place, classes=self._classes(calls))
        if demand.crosses >= 0 or not users:
            maker = self._maker(demand.tensor, ())
            calls = maker if demand.crosses >= 0 else maker[-1:]
            yield ConvertingCode(demand=number, consumer=len(users), classes=self._classes(calls))

    def _maker(self, tensor: str, user: tuple[str, ...]) -> tuple[str, ...]:
        """Return the calls around the op that makes a tensor; for an input, only the outermost."""
        made_by = self.graph.index.made_by
        return self._chain(made_by[tensor].call) if tensor in made_by else user[:2]

    def _between(
        self, maker: tuple[str, ...], user: tuple[str, ...], *, is_alone: bool
    ) -> tuple[str, ...]:
        """Return the calls in which a tensor may be converted on its way from maker to user.

        These are the user's calls, from the innermost that is around both. Calls around the maker
        alone are added only if the tensor has no other user.
        """
        shared = sum(1 for _ in _common(maker, user))
        return (*user[shared - 1 :], *(maker[shared:] if is_alone else ()))


def _common(one: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return
        yield mine
