"""Finds the ops of each pipeline stage, and the tensors that stages send to each other.

Tensors computed from weights are sent. Others (masks, rotary tables, positions) are computed again
from the batch by each stage that uses them. If several stages need the same random numbers, these
are drawn once, and tensors computed from them are sent, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, CallTree, is_plain
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.codegen.text.expressions import LocalTensor
from autopar.planner.errors import InputError
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import Op, TensorOrigin, refs
from autopar.planner.layers import computed_once
from autopar.planner.rules.rule import is_random


def stage_of_ops(split: SplitGraph, counts: Sequence[int]) -> dict[str, int]:
    """Return the stage of each op, from the number of layers in each stage."""
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
    """Return the calls whose ops with gradients lie in several stages: they must be inlined."""
    return [
        call
        for call, ops in tree.ops.items()
        if call not in (ROOT, LOSS)
        and len({places[op.name] for op in ops if tree.graph.learns(op)}) > 1
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePiece:
    """The ops of one stage in order, and the tensors that it receives and sends."""

    ops: tuple[Op, ...]
    takes: tuple[LocalTensor, ...]
    gives: tuple[LocalTensor, ...]


class Cutter:
    """Finds the ops that each stage runs, and the tensors sent between stages."""

    def __init__(self, opening: Opening, places: Mapping[str, int], last: int) -> None:
        self.opening, self.places, self.last = opening, places, last
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.buffers = frozenset(buffer.name for buffer in self.graph.buffers)
        self.returns_loss = self._returns_loss()
        self.once = computed_once(self.graph, drawn=())
        self.needed = self._needed_by_stage()
        drawn = self._drawn_for_several()
        if drawn:
            self.once = computed_once(self.graph, drawn)
            self.needed = self._needed_by_stage()
        self._refuse_written_batch()
        self.last_runs = {op: stage for stage, ops in enumerate(self.needed) for op in ops}
        self.cuts = self._cuts()  # the tensors sent after each stage
        self._refuse_written_views()

    def _drawn_for_several(self) -> frozenset[str]:
        """Return the random tensors that several stages need: one stage draws them for all."""
        found = [
            op
            for op in self.graph.ops
            if is_random(op) and sum(op.name in stage for stage in self.needed) > 1
        ]
        for op in found:
            if op.writes:
                raise InputError(
                    f"{op.name} fills a tensor with random numbers that several stages need",
                    where=op.location,
                    fix="draw a new tensor (torch.rand), or draw in the layer that uses them",
                )
        return frozenset(name for op in found for name in op.outputs)

    def _refuse_written_batch(self) -> None:
        """Raise if several stages would run an op that writes to the batch."""
        tensors = self.graph.tensors
        for op in self.graph.ops:
            storages = self.graph.index.written_by(op)
            if any(tensors[name].origin is TensorOrigin.INPUT for name in storages) and (
                sum(op.name in stage for stage in self.needed) > 1
            ):
                raise InputError(
                    f"{op.name} writes to the batch, which several stages read",
                    where=op.location,
                    fix="make a new tensor (x = x + 1)",
                )

    def _refuse_written_views(self) -> None:
        """Raise if an op writes to memory that a stage receives under several names."""
        for number, takes in enumerate(self.cuts, start=1):
            received = Counter(self.graph.tensors[held.tensor].storage for held in takes)
            for op in self.part(number).ops:
                if any(received[storage] > 1 for storage in self.graph.index.written_by(op)):
                    raise InputError(
                        f"{op.name} writes to a tensor of which a stage receives views, too",
                        where=op.location,
                        fix="make a new tensor (x = x + 1)",
                    )

    def _returns_loss(self) -> bool:
        """Whether the last stage returns the loss.

        It does if the model computes the loss itself, if the loss must be printed, or if the root's
        result is not plain (a dataclass, say).
        """
        has_own_loss = any(map(self.opening.tree.is_of_loss, self.graph.ops))
        plain = is_plain(self.graph.calls[ROOT].result)
        is_opened = LOSS in self.opening.opened or bool(self.split.weighed)
        return not (has_own_loss and plain) or is_opened

    def _results(self) -> tuple[str, ...]:
        if self.returns_loss:
            return (self.graph.loss,)
        result = self.graph.calls[ROOT].result
        return tuple(name for name in refs(result) if name in self.graph.tensors)

    def _needed_by_stage(self) -> list[frozenset[str]]:
        """Return the ops that each stage runs: its own, and those that these need."""
        return [self._needed(stage, own) for stage, own in enumerate(self._own())]

    def _own(self) -> list[list[Op]]:
        """Return each stage's own ops: only this stage computes them, or they write a buffer."""
        found: list[list[Op]] = [[] for _ in range(self.last + 1)]
        for op in self.graph.ops:
            if (self.returns_loss or not self.opening.tree.is_of_loss(op)) and (
                self._runs_once(op) or self._writes_buffer(op)
            ):
                found[self.places[op.name]].append(op)
        return found

    def _needed(self, stage: int, own: Sequence[Op]) -> frozenset[str]:
        results = self._results() if stage == self.last else ()
        read = {name for op in own for name in (*op.inputs, *self._handed(op))}
        once = filter(self._runs_once, self.graph.ops)
        besides = self.graph.index.needed_for(read.union(results), without=once)
        return frozenset(op.name for op in (*own, *besides))

    def _handed(self, op: Op) -> Iterator[str]:
        """Yield the tensors passed to the call that runs an op, even those that are not read."""
        unit = self.opening.unit(op, ROOT)
        if unit is not None:
            record = self.graph.calls[unit]
            for value in (*record.arguments, *(value for _, value in record.keywords)):
                yield from (name for name in refs(value) if name in self.graph.tensors)

    def _given(self) -> Mapping[str, list[Op]]:
        """Return the ops of autograd Functions by the tensors that their backwards may read."""
        found = defaultdict[str, list[Op]](list)
        for op in self.graph.ops:
            unit = self.opening.unit(op, ROOT)
            if unit is not None and self.graph.calls[unit].is_function:
                for name in self._handed(op):
                    found[name].append(op)
        return found

    def _writes_buffer(self, op: Op) -> bool:
        return not self.buffers.isdisjoint(self.graph.index.written_by(op))

    def _runs_once(self, op: Op) -> bool:
        return any(name in self.once for name in op.outputs)

    def _cuts(self) -> list[tuple[LocalTensor, ...]]:
        """Return the values sent after each stage except the last, in the order of the ops."""
        results, given = set(self._results()), self._given()
        cuts: list[list[LocalTensor]] = [[] for _ in range(self.last)]
        for op in filter(self._runs_once, self.graph.ops):
            for name in op.outputs:
                readers = (*self.graph.index.readers[name], *given.get(name, ()))
                runs = [self.last_runs.get(reader.name, -1) for reader in readers]
                stop = self.last if name in results else max(runs, default=-1)
                for stage in range(self.places[op.name], stop):
                    later = [r for r in readers if self.last_runs.get(r.name, -1) > stage]
                    cuts[stage].append(LocalTensor(name, self._crossing_layout(name, later)))
        return [tuple(cut) for cut in cuts]

    def _crossing_layout(self, tensor: str, later: Sequence[Op]) -> Layout:
        """Return the layout in which a tensor is sent; partial sums are summed before."""
        made = self.split.made(tensor)
        if made.kind is not LayoutKind.PARTIAL:
            return made
        needs = {
            self.split.need(op, i)
            for op in later
            for i, name in enumerate(op.inputs)
            if name == tensor
        }
        return needs.pop() if len(needs) == 1 else WHOLE

    def part(self, number: int) -> StagePiece:
        """Return the ops of one stage, and the tensors that it receives and sends."""
        return StagePiece(
            ops=tuple(op for op in self.graph.ops if op.name in self.needed[number]),
            takes=self.cuts[number - 1] if number else (),
            gives=self.cuts[number] if number < self.last else (),
        )
