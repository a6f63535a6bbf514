"""The cheapest layouts of a small model by trying all of them, layer by layer and edge by edge.

It shares nothing with the program but the strategies, the conversions and the costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.graph.layouts import REPLICATED, WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.programs.layouts.building import ONCE_PER_STEP
from autopar.planner.programs.layouts.edges import Conversions
from autopar.planner.programs.layouts.rules import find_slots
from autopar.planner.programs.layouts.strategies import strategies
from tests.planner.programs.layouts.random_pricer import RandomPricer
from tests.planner.programs.layouts.small_graphs import SmallModel

Cost = tuple[float, int]  # seconds, bytes


class BruteForce:
    """All layouts of one model on some ranks."""

    def __init__(self, model: SmallModel, pricer: RandomPricer, *, degree: int) -> None:
        self.model, self.pricer, self.degree = model, pricer, degree
        self.graph, self.layers = model.graph, model.layers
        self.slots = find_slots(model.graph, model.axes, model.layers)
        self.conversions = Conversions(model.graph, model.axes, batch=pricer.batch)
        self.first = [self.layers.layers[c.layers[0]] for c in self.layers.classes]
        self.known: dict[tuple[str, Layout, Layout], float | None] = {}
        self.found = {
            op.name: strategies(op, model.graph, model.axes, degree=degree, batch=pricer.batch)
            for op in model.graph.ops
        }

        # every layout that some strategy of some op gives or needs at a slot
        self.possible: dict[str, set[Layout]] = defaultdict(set)
        for op in model.graph.ops:
            for strategy in self.found[op.name]:
                ends = zip(
                    (*op.inputs, *op.outputs), (*strategy.needs, *strategy.gives), strict=True
                )
                for name, layout in ends:
                    self.possible[self.slots.tensors[name]].add(self.slots.common(layout))

    def count(self) -> int:
        """How many combinations of strategies there are."""
        total = 1
        for op in (op for layer in self.first for op in layer.ops):
            total *= len(self.found[op.name])
        return total

    def all(self) -> Iterator[Cost]:
        """Yield seconds and bytes of every solution that can be the best under some budget."""
        ops = [op for layer in self.first for op in layer.ops]
        for picked in product(*(range(len(self.found[op.name])) for op in ops)):
            yield from self._costs(dict(zip((op.name for op in ops), picked, strict=True)))

    def _costs(self, picked: dict[str, int]) -> Iterator[Cost]:
        """Lay the picked strategies over every layer; then choose every slot's layout by itself."""
        seconds, size = 0.0, 0
        # what is asked of each slot: (tensor, "from" or "to" the slot, the other layout)
        asked: dict[str, list[tuple[str, bool, Layout]]] = defaultdict(list)
        for layer in self.layers.layers:
            own = [
                self._strategy(layer.layer_class, i, op, picked) for i, op in enumerate(layer.ops)
            ]
            outside = [other for other in self.layers.layers if other is not layer]
            edges = self._edges(
                list(layer.ops), own, {n for o in outside for op in o.ops for n in op.inputs}, asked
            )
            if edges is None:
                return
            seconds += edges
            kept: set[tuple[str, str]] = set()
            for op, strategy in zip(layer.ops, own, strict=True):
                split = self._split(strategy)
                price = self.pricer.cost(op, split)
                seconds += price.forward_seconds + price.backward_seconds
                kept_here = self.pricer.kept(op)
                size += kept_here.own_bytes(split)
                layouts = dict(
                    zip(
                        (*op.inputs[::-1], *op.outputs),
                        (*strategy.needs[::-1], *strategy.gives),
                        strict=True,
                    )
                )
                for name in kept_here.names:
                    if (name, layouts[name].axis) not in kept:
                        kept.add((name, layouts[name].axis))
                        size += self.pricer.memory_bytes(name, layouts[name], self.degree)
        options: list[Cost] = [(seconds, size)]
        for slot, questions in asked.items():
            own_options = list(self._slot_options(slot, questions))
            options = _undominated([(a + c, b + d) for a, b in options for c, d in own_options])
        yield from options

    def _strategy(self, layer_class: int, i: int, op: Op, picked: dict[str, int]) -> OpLayout:
        return self.found[op.name][picked[self.first[layer_class].ops[i].name]]

    def _split(self, strategy: OpLayout) -> OpSplit | None:
        if not strategy.axis:
            return None
        return OpSplit(letter=strategy.letter, axis=strategy.axis, degree=self.degree)

    def _edges(
        self, ops: list[Op], own: list[OpLayout], elsewhere: set[str],
        asked: dict[str, list[tuple[str, bool, Layout]]],
    ) -> float | None:  # fmt: skip
        """Return the conversions inside one layer; what meets a slot is asked of it later."""
        made = {
            n: g
            for op, s in zip(ops, own, strict=True)
            for n, g in zip(op.outputs, s.gives, strict=True)
        }
        wanted: dict[str, set[Layout]] = defaultdict(set)
        for op, strategy in zip(ops, own, strict=True):
            for name, need in zip(op.inputs, strategy.needs, strict=True):
                wanted[name].add(need)
        if self.graph.loss in made:
            wanted[self.graph.loss].add(WHOLE)
        seconds = 0.0
        for name, needs in wanted.items():
            for need in sorted(needs, key=str):
                if name in made:
                    cost = self._conversion(name, made[name], need)
                    if cost is None:
                        return None
                    seconds += cost
                else:
                    asked[self.slots.tensors[name]].append((name, False, self.slots.common(need)))
        for name in made.keys() & elsewhere:
            # what an op of this layer got already is not converted once more
            also = {self.slots.common(need) for need in wanted.get(name, set())}
            assert not also, "blocks use their own results, or give them away"
            asked[self.slots.tensors[name]].append((name, True, self.slots.common(made[name])))
        return seconds

    def _slot_options(self, slot: str, questions: list[tuple[str, bool, Layout]]) -> Iterator[Cost]:
        members = [n for n, s in self.slots.tensors.items() if s == slot]
        weights = [n for n in members if self.graph.tensors[n].origin is TensorOrigin.PARAMETER]
        if any(self.graph.tensors[n].origin is TensorOrigin.INPUT for n in members):
            layouts = {WHOLE}
        else:
            layouts = self.possible[slot]
            if weights:
                layouts = {x for x in layouts if x.kind is LayoutKind.SPLIT} | {WHOLE, REPLICATED}
        for layout in sorted(layouts, key=str):
            cost = self._slot_cost(layout, questions, weights)
            if cost is not None:
                yield cost

    def _slot_cost(
        self, layout: Layout, questions: list[tuple[str, bool, Layout]], weights: list[str]
    ) -> Cost | None:
        seconds = 0.0
        for name, is_to, other in questions:
            pair = (other, layout) if is_to else (layout, other)
            cost = self._conversion(name, *(self.slots.own(x, name, self.model.axes) for x in pair))
            if cost is None:
                return None
            seconds += cost
        if weights and layout == REPLICATED:
            sums = sum(self._conversion(n, WHOLE, REPLICATED) or 0.0 for n in weights)
            seconds += sums * ONCE_PER_STEP
        return seconds, sum(self.pricer.tensor_bytes(n, layout, self.degree) for n in weights)

    def _conversion(self, name: str, before: Layout, after: Layout) -> float | None:
        key = name, before, after
        if key not in self.known:
            self.known[key] = None
            if self.conversions.allow(name, before, after):
                shape = GroupShape(ranks=self.degree, crossings=())
                self.known[key] = sum(
                    self.pricer.conversion_seconds(name, before, after, self.degree, shape)
                )
        return self.known[key]


def _undominated(options: list[Cost]) -> list[Cost]:
    """Return the fastest for each size, as long as larger ones are faster."""
    best: list[Cost] = []
    for option in sorted(options, key=lambda o: (o[1], o[0])):
        if not best or option[0] < best[-1][0]:
            best.append(option)
    return best
