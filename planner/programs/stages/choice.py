"""Chooses the stages of one arrangement: bounds, prices, improves, until bound and best meet.

    GPipe, 1F1B        shortest paths bound all cuts, and close most intervals (floors.py)
    other schedules    a program of divisible layers bounds all cuts (divisible.py)
    a cut              the one of the bound, priced exactly, its borders moved while that helps
    program            the cut of the least bound that is left, again and again (chooser.py)

Where bound and best do not meet within the effort, the bound says how much better a cut might be.
"""

from __future__ import annotations

import math
from itertools import accumulate, islice

import numpy as np

from autopar.planner.costs.schedules.paths import Chains, first_chains
from autopar.planner.programs.stages.borders import even_cut, least_seconds, nearest_cut
from autopar.planner.programs.stages.chooser import Chooser, Effort, StageAnswer
from autopar.planner.programs.stages.columns import Column
from autopar.planner.programs.stages.divisible import Divided
from autopar.planner.programs.stages.floors import Floors, floors_of
from autopar.planner.programs.stages.question import StageQuestion

QUICK = Effort(moves=0, cuts=0, program_seconds=2.0, gap=1.0, most_columns=0)
THOROUGH = Effort(moves=8, cuts=4, program_seconds=2.0, gap=5e-3, most_columns=1_000)
EXACT = Effort(moves=8, cuts=60, program_seconds=5.0, gap=1e-7, most_columns=1_000)

_MOST_INTERVALS = 100  # of parts: a program of more, with rows for memory, branches for long


def choose_stages(
    question: StageQuestion, *, cutoff_seconds: float = math.inf, effort: Effort = EXACT
) -> StageAnswer:
    """Return the best cut of the layers into stages, with its modes, and the bound."""
    chains = Chains(first_chains(question.arrangement.schedule, question.shape))
    chooser = Chooser(question, effort, chains)
    chooser.ask(cutoff_seconds, effort)
    return answered(chooser)


def answered(chooser: Chooser) -> StageAnswer:
    """Return the answer to what a chooser is asked."""
    question = chooser.question
    if any(first > last for first, last in question.windows):
        return chooser.answer(math.inf)
    if question.shape.stages == 1:
        return _whole(chooser)
    is_closed = question.arrangement.schedule.has_closed_form
    return _along_paths(chooser) if is_closed else _of_parts(chooser)


def _whole(chooser: Chooser) -> StageAnswer:
    """Return the best way to run all layers as one stage."""
    answer = chooser.price((0, len(chooser.question.classes)))
    if answer.best is None:
        return chooser.answer(math.inf)
    if answer.is_whole:
        return chooser.answer(answer.best.seconds)
    every, exact = chooser.question.shape.microbatches, answer.best.offers[0]
    others = answer.best.seconds - every * float(exact.times[:2].sum())
    others -= max(one.reduction_seconds for one in exact.prices)
    return chooser.answer(
        min(
            every * float(one.least_times[:2].sum()) + one.least_reduction_seconds + others
            for one in chooser.columns.offers.of(0, chooser.question.classes)
        )
    )


def _of_parts(chooser: Chooser) -> StageAnswer:
    """Return the best cut where a rank may have several stages, which share its memory."""
    question, effort = chooser.question, chooser.effort
    divided = _divided(chooser)
    bound = divided.bound_seconds + chooser.once
    if bound == math.inf or bound >= chooser.aim:
        return chooser.answer(min(bound, chooser.top))
    starts = [even_cut(question)]
    if divided.lengths:
        starts.append(nearest_cut(question, [*accumulate(divided.lengths)][:-1]))
    for cut in starts[: 1 + effort.moves]:
        chooser.improve(cut, most_moves=effort.moves)
    if not effort.cuts:
        return chooser.answer(min(bound, chooser.top))
    longest = _longest_that_matters(chooser, 1)
    if longest * question.shape.stages > _MOST_INTERVALS:
        return chooser.answer(min(bound, chooser.top), is_final=True)
    different = question.different_intervals(longest)
    intervals = list(islice(different, _MOST_INTERVALS + 1))
    is_small = len(intervals) <= _MOST_INTERVALS
    if is_small:
        bound = max(bound, chooser.by_program(chooser.columns.of_all(intervals)))
    return chooser.answer(min(bound, chooser.top), is_final=not is_small)


def _divided(chooser: Chooser) -> Divided:
    """Return what no cut beats where layers are divisible."""
    return chooser.divisible.solve(
        enough_seconds=chooser.aim - chooser.once,
        time_limit_seconds=chooser.effort.program_seconds,
        hasty=not chooser.effort.moves,
    )


def _along_paths(chooser: Chooser) -> StageAnswer:
    """Return the best cut where each rank has one stage and its memory for itself."""
    question = chooser.question
    count, stages = len(question.classes), question.shape.stages
    longest = min(count - stages + 1, 1 + -(-4 * count // (3 * stages)))
    while True:
        columns = chooser.columns.of_all(question.different_intervals(longest))
        floors = _floors(chooser, columns) if columns else None
        if floors is not None and floors.cut:
            chooser.improve(floors.cut, most_moves=len(floors.cut))
        needed = _longest_that_matters(chooser, longest)
        if needed <= longest:
            break
        longest = needed if chooser.aim < math.inf else min(needed, 2 * longest)
    if floors is None or floors.seconds == math.inf:
        return chooser.answer(math.inf)
    if floors.seconds >= chooser.aim:
        return chooser.answer(chooser.top)
    if not chooser.effort.most_columns:
        return chooser.answer(floors.seconds)
    is_open = (floors.of_columns < chooser.aim).tolist()
    columns = [one for one, own in zip(columns, is_open, strict=True) if own]
    return chooser.answer(max(floors.seconds, chooser.by_program(columns)))


def _floors(chooser: Chooser, columns: list[Column]) -> Floors:
    """Return the bounds of whole steps."""
    question = chooser.question
    floors = floors_of(question, columns, chooser.columns.transfers)
    stage = np.array([one.stage for one in columns])
    updating = np.array([one.offer.optimizer_seconds for one in columns])
    reducing = np.array([one.offer.least_reduction_seconds for one in columns])
    stages = range(question.shape.stages)
    least = max(float(updating[stage == p].min(initial=math.inf)) for p in stages)
    first = float(reducing[stage == 0].min(initial=math.inf))
    behind = np.where(stage == 0, reducing, first)
    return Floors(
        seconds=floors.seconds + first + least + chooser.once,
        of_columns=floors.of_columns + behind + np.maximum(updating, least) + chooser.once,
        cut=floors.cut,
    )


def _longest_that_matters(chooser: Chooser, longest: int) -> int:
    """Return the most layers of a stage in a cut below the aim.

    A rank with a stage of more than that, and one layer or more on each of its others, is busy for
    longer alone.
    """
    question = chooser.question
    most = len(question.classes) - question.shape.stages + 1
    if chooser.aim == math.inf:
        return most
    least = least_seconds(question)
    sums = np.concatenate([[0.0], np.cumsum(least)])
    others = (question.shape.stages_per_rank - 1) * float(least.min())
    room = (chooser.aim - chooser.once) / question.shape.microbatches - others
    for length in range(longest, most):
        if float((sums[length + 1 :] - sums[: -length - 1]).min()) >= room:
            return length
    return most
