"""Lays the borders of stages: evenly, near to where they are wanted, and one layer further."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.programs.stages.question import Cut, StageQuestion


def least_seconds(question: StageQuestion) -> Floats:
    """Return what each layer takes at least, in any mode on any rank."""
    kinds = dict.fromkeys(question.kinds)
    least = [
        min(
            cost.forward_seconds + cost.backward_seconds
            for kind in kinds
            for cost in question.layer(kind, number).values()
        )
        for number in range(len(question.examples))
    ]
    return np.array([least[number] for number in question.classes])


def even_cut(question: StageQuestion) -> Cut:
    """Return a cut whose stages take about the same, where they may meet; or none."""
    stages = question.shape.stages
    sums = np.concatenate([[0.0], np.cumsum(least_seconds(question))])
    wanted = sums[-1] * np.arange(1, stages) / stages
    return nearest_cut(question, np.interp(wanted, sums, np.arange(len(sums))).tolist())


def nearest_cut(question: StageQuestion, borders: Sequence[float]) -> Cut:
    """Return the cut whose borders lie nearest to some, where stages may meet; or none."""
    cut = [0]
    for stage, wanted in enumerate(borders, start=1):
        first, last = question.windows[stage]
        places = [
            place for place in range(max(first, cut[-1] + 1), last + 1) if question.is_border[place]
        ]
        if not places:
            return ()
        cut.append(min(places, key=lambda place: abs(place - wanted)))
    return (*cut, len(question.classes))


def moved_cuts(question: StageQuestion, cut: Cut) -> Iterator[Cut]:
    """Yield the cuts in which one border lies a layer off."""
    for border in range(1, len(cut) - 1):
        first, last = question.windows[border]
        for place in (cut[border] - 1, cut[border] + 1):
            is_between = cut[border - 1] < place < cut[border + 1]
            if is_between and first <= place <= last and question.is_border[place]:
                yield (*cut[:border], place, *cut[border + 1 :])
