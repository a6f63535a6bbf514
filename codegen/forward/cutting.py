"""Cuts the ops of a graph into pipeline stages: what each runs, and what crosses between them.

Only tensors that need gradients cross a cut. What needs none (masks, rotary tables, positions) is
computed again from the batch by each stage that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.forward.calls import LOSS, ROOT, CallTree
from autopar.codegen.forward.changes import is_random
from autopar.codegen.forward.expressions import Held
from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.results import is_plain
from autopar.codegen.forward.split import Split
from autopar.planner.errors import InputError
from autopar.planner.graph import Op, refs
from autopar.planner.layouts import WHOLE, Kind, Layout


def stage_of_ops(split: Split, counts: Sequence[int]) -> dict[str, int]:
    """Return for each op the stage that runs it, from how many layers each stage has."""
    layers = split.layers.layers
    if sum(counts) != len(layers) or 0 in counts:
        raise InputError(
            f"the stages of the plan hold {sum(counts)} layers",
            expected=f"{len(layers)}, at least one in each",
            fix="plan again: the model has changed",
        )
    bounds = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return {op.name: stage for stage, layer in zip(bounds, layers, strict=True) for op in layer.ops}


def cut_calls(tree: CallTree, places: Mapping[str, int]) -> list[str]:
    """Return the calls that run in several stages: their code stands in the root's."""
    return [
        call
        for call, ops in tree.ops.items()
        if call not in (ROOT, LOSS)
        and len({places[op.name] for op in ops if _has_gradient(op, tree)}) > 1
    ]


def _has_gradient(op: Op, tree: CallTree) -> bool:
    return any(tree.graph.tensors[name].requires_grad for name in op.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one stage computes, in order, and the tensors at its two cuts."""

    ops: tuple[Op, ...]
    takes: tuple[Held, ...]
    gives: tuple[Held, ...]


class Cutter:
    """Finds what each stage of a plan runs."""

    def __init__(self, opening: Opening, places: Mapping[str, int], last: int) -> None:
        self.opening, self.places, self.last = opening, places, last
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.depends = self._dependent_on_gradients()
        self.returns_loss = self._returns_loss()
        self.writers = self._writers()
        self.needed = [self._needed(stage) for stage in range(last + 1)]
        self._check_random()
        self.cuts = [self._cut(stage) for stage in range(last)]  # behind each stage

    def _dependent_on_gradients(self) -> frozenset[str]:
        """Return the tensors that are computed from something that needs a gradient."""
        found = {t.name for t in self.graph.tensors.values() if t.requires_grad}
        found -= {p.name for p in self.graph.parameters}
        for op in self.graph.ops:
            if any(name in found for name in op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    def _writers(self) -> Mapping[str, Sequence[Op]]:
        """Return the ops that write to memory that the forward itself has made."""
        buffers = {buffer.name for buffer in self.graph.buffers}
        found: dict[str, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            for name in op.writes:
                storage = self.graph.tensors[name].storage
                if storage not in buffers and not self._is_dependent(op):
                    found[storage].append(op)
        return found

    def _returns_loss(self) -> bool:
        """Whether the last stage returns the loss: it must where the root's result is not plain."""
        has_own_loss = any(op.call == LOSS for op in self.graph.ops)
        plain = is_plain(self.graph.calls[ROOT].result)
        is_opened = LOSS in self.opening.opened or bool(self.split.weighed)
        return not (has_own_loss and plain) or is_opened

    def _results(self) -> tuple[str, ...]:
        if self.returns_loss:
            return (self.graph.loss,)
        return tuple(refs(self.graph.calls[ROOT].result))

    def _needed(self, stage: int) -> frozenset[str]:
        """Return the ops that a stage runs: its own with gradients, and what those need besides."""
        own = [
            op
            for op in self.graph.ops
            if self.places[op.name] == stage
            and (op.call != LOSS or self.returns_loss)
            and (self._is_dependent(op) or self._writes_buffer(op))
        ]
        needed = {op.name for op in own}
        results = self._results() if stage == self.last else ()
        todo = [name for op in own for name in op.inputs] + list(results)
        while todo:
            tensor = todo.pop()
            maker = self.tree.maker.get(tensor)
            if maker is None or maker.name in needed or self._is_dependent(maker):
                continue
            storage = self.graph.tensors[tensor].storage
            for op in (maker, *self.writers.get(storage, ())):
                if op.name not in needed:
                    needed.add(op.name)
                    todo += [*op.inputs, *op.writes]
        return frozenset(needed)

    def _check_random(self) -> None:
        """Refuse random numbers that several stages would draw, each its own."""
        for op in self.graph.ops:
            if is_random(op) and sum(op.name in stage for stage in self.needed) > 1:
                raise InputError(
                    f"{op.name} draws random numbers that several stages need",
                    where=op.location,
                    fix="draw them in the layer that uses them",
                )

    def _writes_buffer(self, op: Op) -> bool:
        tensors = self.graph.tensors
        buffers = {buffer.name for buffer in self.graph.buffers}
        return any(tensors[name].storage in buffers for name in op.writes)

    def _is_dependent(self, op: Op) -> bool:
        return any(name in self.depends for name in op.outputs)

    def _cut(self, stage: int) -> tuple[Held, ...]:
        """Return the values that cross behind a stage."""
        before = {
            name
            for op in self.graph.ops
            if self._is_dependent(op) and self.places[op.name] <= stage
            for name in op.outputs
        }
        later = [op for op in self.graph.ops if self._runs_after(op, stage)]
        used = {name for op in later for name in op.inputs} | set(self._results())
        crossing = [name for op in self.graph.ops for name in op.outputs if name in before & used]
        for name in crossing:
            if not self.graph.tensors[name].requires_grad:
                raise InputError(
                    f"{name} crosses a cut between stages but needs no gradient",
                    where=self.tree.maker[name].location,
                    expected="only tensors with gradients between the stages",
                    fix="plan with fewer stages, or compute it from the batch",
                )
        return tuple(Held(name, self._crossing_layout(name, later)) for name in crossing)

    def _runs_after(self, op: Op, stage: int) -> bool:
        return any(op.name in self.needed[later] for later in range(stage + 1, self.last + 1))

    def _crossing_layout(self, tensor: str, later: Sequence[Op]) -> Layout:
        """Return the layout in which a tensor crosses: partial sums are summed before."""
        made = self.split.made(tensor)
        if made.kind is not Kind.PARTIAL:
            return made
        needs = {
            self.split.need(op, i)
            for op in later
            for i, name in enumerate(op.inputs)
            if name == tensor
        }
        return needs.pop() if len(needs) == 1 else WHOLE

    def part(self, number: int) -> Part:
        """Return one stage."""
        return Part(
            ops=tuple(op for op in self.graph.ops if op.name in self.needed[number]),
            takes=self.cuts[number - 1] if number else (),
            gives=self.cuts[number] if number < self.last else (),
        )
