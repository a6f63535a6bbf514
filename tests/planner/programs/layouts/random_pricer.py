"""A pricer with random costs, the same for the same question: it makes odd layouts best."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import Layout, LayoutKind
from autopar.planner.graph.ops import Extent, Op, TensorOrigin, refs
from autopar.planner.programs.layouts.rules import Slots
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomCost:
    """Seconds out of the hat."""

    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKept:
    """What the rules say is kept; no masks."""

    names: tuple[str, ...]

    def own_bytes(self, split: OpSplit | None) -> int:
        return 0 if split is None else 1


class StorageMemory:
    """Memory as the trace shows it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def root(self, name: str) -> str:
        return self.graph.tensors[name].storage


class RandomPricer:
    """Costs in [0, 1): of ops by strategy, of conversions by tensor and layouts.

    Ops and tensors at the same place of equal layers cost the same.
    """

    def __init__(
        self, graph: Graph, slots: Slots, *, batch: int, seed: int, conversion: float = 0.3
    ) -> None:
        self.slots = slots
        self.known: dict[tuple[object, ...], float] = {}
        self.graph, self.batch, self.seed, self.conversion = graph, batch, seed, conversion
        self.memory = StorageMemory(graph)

    def cost(self, op: Op, split: OpSplit | None) -> RandomCost:
        slot = self.slots.tensors[op.outputs[0]]
        way = (split.letter, self.slots.axes[split.axis]) if split else ()
        return RandomCost(
            forward_seconds=self._random("f", op.target, slot, way),
            backward_seconds=self._random("b", op.target, slot, way),
        )

    def kept(self, op: Op) -> RandomKept:
        given = dict(op.arguments)
        names = [n for entry in rule_of(op.target).saves for n in refs(given.get(entry.what))]
        seen = [n for n in dict.fromkeys(names) if self.graph.tensors[n].origin is TensorOrigin.OP]
        return RandomKept(names=tuple(seen))

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        size = _numel(self.graph.tensors[name].shape, self.batch)
        return -(-size // degree) if layout.kind is LayoutKind.SPLIT else size

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        return self.tensor_bytes(name, layout, degree)

    def conversion_seconds(
        self, tensor: str, produced: Layout, needed: Layout, degree: int, shape: GroupShape
    ) -> tuple[float, float]:
        del degree, shape
        if produced == needed:
            return 0.0, 0.0
        pair = (str(self.slots.common(produced)), str(self.slots.common(needed)))
        price = self.conversion * self._random(self.slots.tensors[tensor], *pair)
        return price, price / 2

    def _random(self, *question: object) -> float:
        if question not in self.known:
            self.known[question] = Random(f"{self.seed} {question}").random()
        return self.known[question]


def _numel(shape: tuple[Extent, ...], batch: int) -> int:
    total = 1
    for size in shape:
        total *= size.at(batch)
    return total
