"""Finds which ops of a layer keep which memory for the backward, and in which layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from autopar.planner.layouts import Kind, Layout
from autopar.planner.programs.layouts.pricing import Pricer
from autopar.planner.programs.layouts.problem import Keep, Node

BytesOf = Callable[[str, Layout], int]
_Held = tuple[int, str, tuple[Layout, ...]]  # node, its tensor, the layout in each choice


def keeps_of(nodes: Sequence[Node], pricer: Pricer, memory_bytes: BytesOf) -> Iterator[Keep]:
    """Yield each memory that the ops of a layer keep, with those that hold it.

    An op keeps its input as it needs it: after a gather, the gathered copy.
    """
    held: dict[tuple[int, str], list[_Held]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for name in pricer.kept(node.op).seen:
            root = pricer.memory.root(name)
            held[node.layer_class, root].append((i, name, _layouts(node, name)))
    for holders in held.values():
        yield _keep(holders, nodes[holders[0][0]].count, memory_bytes)


def _keep(holders: Sequence[_Held], count: int, memory_bytes: BytesOf) -> Keep:
    sizes: dict[str, int] = {}
    for _, name, layouts in holders:
        for layout in layouts:
            sizes.setdefault(_form(layout), memory_bytes(name, layout))
    return Keep(
        holders=tuple(node for node, _, _ in holders),
        forms=tuple(tuple(map(_form, layouts)) for _, _, layouts in holders),
        saved_bytes=sizes,
        count=count,
    )


def _layouts(node: Node, name: str) -> tuple[Layout, ...]:
    """Return the layout of an op's input (else output) in each of its choices."""
    if name in node.op.inputs:
        place = node.op.inputs.index(name)
        return tuple(choice.needs[place] for choice in node.choices)
    place = node.op.outputs.index(name)
    return tuple(choice.gives[place] for choice in node.choices)


def _form(layout: Layout) -> str:
    return layout.axis if layout.kind is Kind.SPLIT else ""
