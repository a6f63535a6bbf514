"""Turns a plan into the facts that other training tools ask for: blocks, modes, splits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.graph.layouts import Layout, LayoutKind
from autopar.planner.layers import Layers, find_layers, residence
from autopar.planner.plan.plan import Plan, RunnerUp
from autopar.planner.plan.telling.words import arrangement_words, degrees_words
from autopar.planner.precision import Precision

_NUMBERED = re.compile(r"(?P<list>(?:.*\.)?)(?P<number>\d+)")
_PLAIN = str.maketrans({"·": "+", "×": "x"})  # comments of scripts are ASCII
_SEQUENCE = "seq"  # the name of the axis along a row's positions


ToolSettings = Mapping[str, bool | int | float | str | tuple[tuple[str, ...], ...]]
# A tool's files by name, and their sections by name: "" for settings at the top of a file.
ToolFiles = Mapping[str, Mapping[str, ToolSettings]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStage:
    """A stage as tools count it: its blocks, and other layers before and after the first block.

    `modes` are the recompute modes of the blocks.
    """

    blocks: tuple[int, ...]
    modes: tuple[Recompute, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """The facts of a plan that other training tools ask for."""

    title: str
    block_class: str  # of the first block, "" without blocks
    arrangement: Arrangement
    nodes: int
    stages: tuple[BlockStage, ...]
    between: tuple[str, ...]  # layers between two blocks
    modes_outside: tuple[tuple[str, Recompute], ...]  # of layers outside the blocks
    saves_on_host: bool  # whether blocks save tensors in host memory
    whole_weights: tuple[str, ...]  # matrices that tensor ranks do not split
    crossing: tuple[str, ...]  # the split axes of activations between blocks; "" for whole ones
    known: tuple[RunnerUp, ...]  # other plans, whose step times are known

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """The recompute mode of each block."""
        return tuple(mode for stage in self.stages for mode in stage.modes)

    @property
    def splits_sequence(self) -> bool:
        """Whether tensor ranks have parts of the sequence between the blocks."""
        return set(self.crossing) == {_SEQUENCE}

    @property
    def replicas(self) -> int:
        """The number of copies of the model over all data ranks; `shard` ranks share one."""
        return self.arrangement.data // self.shard

    @property
    def shard(self) -> int:
        """The number of data ranks that share one copy of what ZeRO divides; 1 without ZeRO."""
        return self.arrangement.shard if self.arrangement.zero.divides_optimizer else 1


def half_flags(precision: Precision) -> Mapping[str, bool]:
    """Return the flags bf16 and fp16."""
    scales = precision.scales_loss
    return {"bf16": precision.is_half and not scales, "fp16": precision.is_half and scales}


def some(names: Sequence[str]) -> str:
    """Return names, shortened: "a, b and 4 more"."""
    shown, more = ", ".join(names[:2]), len(names) - 2
    return f"{shown} and {more} more" if more > 0 else shown


def tool_facts(plan: Plan) -> ToolFacts:
    """Return the facts of a plan."""
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)
    numbers = _block_numbers([layer.call for layer in layers.layers])
    blocks = [place for place, number in enumerate(numbers) if number is not None]
    first, last = (blocks[0], blocks[-1]) if blocks else (len(numbers), len(numbers))
    calls = [layer.call or "the model's own code" for layer in layers.layers]
    outside = [place for place, number in enumerate(numbers) if number is None]
    modes = plan.layer_modes
    return ToolFacts(
        title=f"{plan.model.name}: {arrangement_words(plan.arrangement)}".translate(_PLAIN),
        block_class=_class_of(layers, first),
        arrangement=plan.arrangement,
        nodes=plan.machines.nodes,
        stages=tuple(_stages(plan, numbers, calls)),
        between=tuple(calls[place] for place in outside if first < place < last),
        modes_outside=tuple((calls[place], modes[place]) for place in outside),
        saves_on_host=any(modes[place].is_on_host for place in blocks),
        whole_weights=tuple(_whole_weights(plan)),
        crossing=tuple(
            axes.names.get(one.axis, "") for one in _between_blocks(plan, layers, numbers)
        ),
        known=(*plan.runners_up, *([plan.fastest] if plan.fastest else [])),
    )


def _block_numbers(calls: Sequence[str]) -> list[int | None]:
    """Return the number of each layer among the model's blocks, or None for other layers.

    The blocks are the layers of the longest module list.
    """
    found = [_NUMBERED.fullmatch(call) for call in calls]
    lists = Counter(one["list"] for one in found if one)
    chosen = lists.most_common(1)[0][0] if lists else ""
    places = [place for place, one in enumerate(found) if one and one["list"] == chosen]
    numbers = {place: number for number, place in enumerate(places)}
    return [numbers.get(place) for place in range(len(calls))]


def _class_of(layers: Layers, place: int) -> str:
    return next((one.name for one in layers.classes if place in one.layers), "")


def _stages(
    plan: Plan, numbers: Sequence[int | None], calls: Sequence[str]
) -> Iterator[BlockStage]:
    """Yield the stages in the order of the model."""
    modes, first_block = plan.layer_modes, numbers.index(0) if 0 in numbers else len(numbers)
    for stage in sorted(plan.stages, key=lambda one: one.first):
        places = range(stage.first, stage.first + stage.count)
        own = [(number, modes[place]) for place in places if (number := numbers[place]) is not None]
        outside = [place for place in places if numbers[place] is None]
        yield BlockStage(
            blocks=tuple(number for number, _ in own),
            modes=tuple(mode.on_device for _, mode in own),
            before=tuple(calls[place] for place in outside if place < first_block),
            after=tuple(calls[place] for place in outside if place > first_block),
        )


def _whole_weights(plan: Plan) -> Iterator[str]:
    """Yield the matrices that are whole on every tensor rank."""
    for one in plan.parameters:
        is_matrix = len(plan.graph.tensors[one.name].shape) > 1
        if is_matrix and one.layout.kind is not LayoutKind.SPLIT:
            yield one.name


def _between_blocks(plan: Plan, layers: Layers, numbers: Sequence[int | None]) -> Iterator[Layout]:
    """Yield the layouts of the tensors that one block passes to the next."""
    layouts = {one.name: one.layout for one in plan.crossing}
    for place, cut in enumerate(residence(plan.graph, layers).cuts[:-1]):
        if numbers[place] is not None and numbers[place + 1] is not None:
            yield from (layouts[name] for name in cut if name in layouts)


def price(facts: ToolFacts, **wanted: object) -> str:
    """Return words on the step time of a known plan whose arrangement has these values, or ""."""
    for one in facts.known:
        if all(getattr(one.arrangement, name) == value for name, value in wanted.items()):
            words = degrees_words(one.arrangement).replace(" · ", " + ")
            return f" (a plan with it, {words}, takes {seconds_text(one.step_seconds)} a step)"
    return ""
