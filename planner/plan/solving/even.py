"""Moves layers between the stages of one rank until they are as even as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.planner.plan.plan import PlannedStage

Stages = tuple[PlannedStage, ...]


def even_stages(stages: Stages, accepts: Callable[[Stages], bool]) -> Stages:
    """Return the stages after accepted moves, until no accepted move makes them more even."""
    while True:
        more_even = next(filter(accepts, _moves(stages)), None)
        if more_even is None:
            return stages
        stages = more_even


def _moves(stages: Stages) -> Iterator[Stages]:
    """Yield moves to a smaller stage of the same rank: half of the surplus, or one layer."""
    for i, one in enumerate(stages):
        for j, other in enumerate(stages):
            surplus = one.count - other.count
            if one.rank == other.rank and surplus > 1:
                yield from (_moved(stages, i, j, n) for n in dict.fromkeys((surplus // 2, 1)))


def _moved(stages: Stages, source: int, target: int, layers: int) -> Stages:
    """Return the stages after a move of layers; each layer keeps its mode."""
    modes = [mode for stage in stages for mode in stage.recompute]
    moved = {source: -layers, target: layers}
    counts = [stage.count + moved.get(number, 0) for number, stage in enumerate(stages)]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    return tuple(
        replace(stage, first=first, count=count, recompute=tuple(modes[first : first + count]))
        for stage, first, count in zip(stages, firsts, counts, strict=True)
    )
