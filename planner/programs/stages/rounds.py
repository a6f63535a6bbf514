"""Bounds the rounds of a pipeline, and so the whole: what each takes at least, where it may lie.

A round is R consecutive stages, one per rank; with one stage per rank there is one round. Over all
ways to lay layers a … b − 1 on the stages of a round,

    T(a,b)   the least bottleneck    S(a,b)   the least Σ F    U(a,b)   the least longest step

are shortest paths, exact each. T and Σ F pull against each other; so T is divided into bands, and
with S_k the least Σ F of stages up to the top of band k, a round takes

    A · T + Σ F  ≥  TS(a,b)  =  min over bands k of  A · max(T(a,b), bottom of k) + S_k(a,b)

which is exact once every band holds one value. Only values that T can have in a plan below an aim
are divided, as a first bound with one band tells them. Rounds follow each other, so a path over
their boundaries bounds the objective, and with it what T and U of a round may be in such a plan:

    bound       =  min over 0 = a_0 < a_1 < … = n of  Σ over rounds  TS + C · U
    most for T  =  (aim − bound of all other rounds − S(a,b) − C · U(a,b)) / A
    most for U  =  (aim − bound of all other rounds − TS(a,b)) / C
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.bounds import Weights
from autopar.planner.programs.stages.options import NEVER, Ticks
from autopar.planner.programs.stages.problem import StageLimits

Floats = npt.NDArray[np.float64]
Band = tuple[int, int]  # the least value in it and the greatest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """The floors of one round [a, b]; a is 0 for a round that is the only one."""

    slowest: Ticks
    total: Ticks
    step: Ticks
    together: Floats  # TS, infinite where the stages do not fit
    band_top: Ticks  # of the band that gives TS

    def cost(self, weights: Weights) -> Floats:
        """Return TS + C · U."""
        return self.together + self.step * float(weights.step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """The floors of all rounds, and of those before and after a boundary."""

    weights: Weights
    rounds: tuple[Round, ...]
    before: tuple[Floats, ...]
    after: tuple[Floats, ...]
    least_slowest: float  # Σ T alone
    least_step: float  # Σ U alone

    @property
    def bound(self) -> float:
        """What all rounds take at least."""
        return float(self.before[-1][-1])

    def best(self) -> list[tuple[int, int]]:
        """Return first and stop of each round on the path that gives the bound."""
        first, path = 0, []
        for one, after in zip(self.rounds, self.after[1:], strict=True):
            stop = int(np.argmin(one.cost(self.weights)[first] + after))
            path.append((first, stop))
            first = stop
        return path

    def most_ticks(self, turn: int, aim: float) -> Floats:
        """Return what T may be in a plan below an aim, for an interval [first or 0, stop]."""
        one = self.rounds[turn]
        others = one.total + one.step * float(self.weights.step)
        return self._most(turn, aim, others, self.weights.bottleneck)

    def most_step_ticks(self, turn: int, aim: float) -> Floats:
        """Return what U may be in a plan below an aim, for an interval [first or 0, stop]."""
        return self._most(turn, aim, self.rounds[turn].together, self.weights.step)

    def range_of(self, turn: int, aim: float) -> tuple[float, float]:
        """Return the least and the most that T may be in a plan below an aim."""
        cost = self.rounds[turn].cost(self.weights)
        others = self.before[turn][: len(cost), None] + self.after[turn + 1][None, :]
        slowest = self.rounds[turn].slowest[others + cost < aim]
        if not slowest.size:
            return np.inf, -np.inf
        return float(slowest.min()), float(self.most_ticks(turn, aim).max())

    def _most(self, turn: int, aim: float, rest: Floats, weight: int) -> Floats:
        """Return the most over all rounds around an interval: begun by then, not ended before."""
        cost = self.rounds[turn].cost(self.weights)
        others = self.before[turn][: len(cost), None] + self.after[turn + 1][None, :]
        is_possible = others + cost < aim
        room = np.where(is_possible, aim - others - rest, -np.inf)
        most = room / weight if weight else np.where(is_possible, np.inf, -np.inf)
        begun = np.maximum.accumulate(most, axis=0)
        return np.maximum.accumulate(begun[:, ::-1], axis=1)[:, ::-1]


def bound_rounds(
    costs: Ticks, steps: Ticks, limits: StageLimits, *, bands: int, aim: float
) -> Rounds:
    """Return the bounds of all rounds for times [stage, first, length − 1], with so many bands.

    These divide the values that T can have in a plan below the aim, as one band bounds them.
    """
    turns, weights = limits.stages_per_rank, Weights.of(limits)
    if not bool(np.where(steps < NEVER, steps, 0).any()):
        steps = np.zeros_like(steps)
    split = np.split(costs, turns)
    pairs = zip(split, np.split(steps, turns), strict=True)
    rounds = _joined([_round(own, its, limits) for own, its in pairs], weights)
    if bands == 1 or not weights.bottleneck:
        return rounds
    ranges = [rounds.range_of(turn, aim) for turn in range(turns)]
    finer = [
        _finer(one, own, _bands(own, within, bands), weight=weights.bottleneck)
        for one, own, within in zip(rounds.rounds, split, ranges, strict=True)
    ]
    return _joined(finer, weights)


def _joined(rounds: Sequence[Round], weights: Weights) -> Rounds:
    each = [one.cost(weights) for one in rounds]
    return Rounds(
        weights=weights,
        rounds=tuple(rounds),
        before=_chained([cost.T for cost in each], at=0),
        after=_chained([*reversed(each)], at=-1)[::-1],
        least_slowest=float(_chained([one.slowest.T for one in rounds], at=0)[-1][-1]),
        least_step=float(_chained([one.step.T for one in rounds], at=0)[-1][-1]),
    )


def _round(costs: Ticks, steps: Ticks, limits: StageLimits) -> Round:
    """Return the floors of a round, all values of T in one band."""
    is_only = limits.stages_per_rank == 1
    slowest = _least(costs, np.maximum, is_only=is_only)
    total = _least(costs, np.add, is_only=is_only)
    step = _least(steps, np.maximum, is_only=is_only) if steps.any() else 0 * slowest
    together = float(Weights.of(limits).bottleneck) * slowest + total
    return Round(
        slowest=slowest,
        total=total,
        step=step,
        together=np.where(total < NEVER, together, np.inf),
        band_top=np.full_like(slowest, NEVER),
    )


def _finer(one: Round, costs: Ticks, bands: Sequence[Band], *, weight: int) -> Round:
    """Return the floors of a round with T and Σ F taken together band by band."""
    together, band_top = np.full(one.slowest.shape, np.inf), np.full_like(one.slowest, NEVER)
    for bottom, top in bands:
        total = one.total  # what it is where a band leaves nothing out
        if top < NEVER:
            within = np.where(costs <= top, costs, NEVER)
            total = _least(within, np.add, is_only=len(one.slowest) == 1)
        cost = float(weight) * np.maximum(one.slowest, bottom) + total
        is_better = (total < NEVER) & (cost < together)
        together = np.where(is_better, cost, together)
        band_top = np.where(is_better, top, band_top)
    return replace(one, together=together, band_top=band_top)


def _bands(costs: Ticks, within: tuple[float, float], bands: int) -> list[Band]:
    """Return bottom and top of bands that hold all values; those within a range are divided.

    What is below the range lies in the first band, what is above it in one that has no top.
    """
    values = np.unique(costs[costs < NEVER])
    low, high = within
    parts = np.array_split(values[(low <= values) & (values <= high)], bands)
    found = [(int(part[0]), int(part[-1])) for part in parts if len(part)]
    if found:
        found[0] = (int(values[0]), found[0][1])
    above = values[values > high]
    bottom = above[0] if len(above) else values[-1] if len(values) else 0
    return [*found, (int(bottom) if found else 0, NEVER)]


def _chained(costs: Sequence[Floats | Ticks], *, at: int) -> tuple[Floats, ...]:
    """Return least costs by boundary from one end on, after none, one, two … rounds."""
    least = np.full(max(costs[0].shape), np.inf)
    least[at] = 0.0
    chain = [least]
    for cost in costs:
        chain.append((cost + chain[-1][None, : cost.shape[1]]).min(axis=1))
    return tuple(chain)


def _least(costs: Ticks, join: np.ufunc, *, is_only: bool) -> Ticks:
    """Return [a, b] of the least join of one interval per stage from a to b."""
    count, longest = costs.shape[1:]
    starts = 1 if is_only else count + 1
    least = np.full((starts, count + 1), NEVER)
    np.fill_diagonal(least, 0)
    for stage in costs:
        further = np.full_like(least, NEVER)
        for length in range(1, longest + 1):
            ends, firsts = slice(length, None), slice(0, count + 1 - length)
            through = join(least[:, firsts], stage[firsts, length - 1])
            np.minimum(further[:, ends], through, out=further[:, ends])
        least = further
    return least
