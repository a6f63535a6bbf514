"""Solves one arrangement: which layers go on which stage, in which layouts and recompute modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.planner.costs.prediction import Arrangement, LayerCost, Prediction, Recompute, Zero
from autopar.planner.costs.schedules.pipeline import rank_of
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import context_bytes
from autopar.planner.costs.steps.step import predict
from autopar.planner.plan.plan import Stage
from autopar.planner.plan.solving.costing import Costing, Inside
from autopar.planner.plan.solving.questions import CLOSE_BYTES, Demands, Questions, Rows, inside_of
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stages.choice import NoStages, StageAnswer, StagePlan, choose_stages
from autopar.planner.programs.stages.memory import least_memory_bytes, with_memory
from autopar.planner.programs.stages.problem import LayerChoices

_MOST_TRIES = 4  # to meet the memory limit where the program saw less than the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solved arrangement."""

    arrangement: Arrangement
    solution: int
    stages: tuple[Stage, ...]
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of an arrangement; with no candidate, the bytes that every stage would need more.

    None bytes: no memory helps. Layouts are left out where they cannot lead to the best plan.
    """

    candidate: Candidate | None
    shortfall_bytes: int | None
    report: SolverReport
    leaves_out: bool = False


NOTHING = Answer(candidate=None, shortfall_bytes=None, report=NOTHING_SOLVED)
LEFT_OUT = replace(NOTHING, leaves_out=True)


def _nothing(_: int) -> float:
    """Nothing is known of any solution."""
    return 0.0


def _never(_: int, _seconds: float) -> bool:
    """Nothing is known of any solution, whatever the seconds."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Solves and predicts candidates."""

    questions: Questions
    model_flops: int

    def under(self, demands: Demands) -> Judge:
        """Return the judge under other demands."""
        return replace(self, questions=replace(self.questions, demands=demands))

    @property
    def costing(self) -> Costing:
        """What layers cost."""
        return self.questions.costing

    @property
    def demands(self) -> Demands:
        """What every candidate has to respect."""
        return self.questions.demands

    @property
    def constants(self) -> FrameworkConstants:
        """What the framework adds."""
        return self.questions.constants

    def solve(
        self,
        arrangement: Arrangement,
        *,
        least: Callable[[int], float] = _nothing,
        excludes: Callable[[int, float], bool] = _never,
        known_seconds: float = float("inf"),
    ) -> Answer:
        """Return the fastest candidate of an arrangement.

        Where the fastest layouts fit without computing anything again, no others are faster;
        only where memory presses, the slower ones that need less of it are tried too, unless what
        they come to at `least` is no better than what was found, here or before. Nor is any solved
        that `excludes` a plan below that.
        """
        answers: list[Answer] = []
        best: Candidate | None = None
        for number in self._in_turn(arrangement, least):
            found_seconds = best.prediction.step_seconds if best else known_seconds
            if least(number) >= min(found_seconds, known_seconds):
                is_too_large = least(number) == float("inf")  # no memory suffices
                answers.append(NOTHING if is_too_large else LEFT_OUT)
                continue
            if known_seconds < float("inf") and excludes(number, min(found_seconds, known_seconds)):
                answers.append(LEFT_OUT)
                continue
            answers.append(self._solve(arrangement, number))
            found = [one.candidate for one in answers if one.candidate]
            best = min(found, key=lambda c: c.prediction.step_seconds, default=None)
            if number == 0 and best and not recomputes(best):
                break
        return _together(answers, best)

    def _in_turn(self, arrangement: Arrangement, least: Callable[[int], float]) -> Iterator[int]:
        """Yield the layout solutions: the fastest, then the others if they are asked for."""
        yield 0
        solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
        yield from sorted(range(1, len(solutions)), key=least)

    def solve_smallest(self, arrangement: Arrangement) -> Answer:
        """Return the candidate that needs least memory on its fullest rank, if that fits."""
        solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
        answers = [
            LEFT_OUT
            if self._wastes_ranks(arrangement, number)
            else self._thriftiest(arrangement, number)
            for number in range(len(solutions))
        ]
        found = [one.candidate for one in answers if one.candidate]
        best = min(found, key=lambda c: c.prediction.peak_memory.device_bytes, default=None)
        return _together(answers, best)

    def _solve(self, arrangement: Arrangement, solution: int) -> Answer:
        """Solve for one layout solution; what the prediction finds too big is asked for again.

        What the program sees is a little off the prediction, so where memory just does not suffice
        the thriftiest plan decides.
        """
        if self._wastes_ranks(arrangement, solution):
            return LEFT_OUT
        rows = self.questions.rows(arrangement, solution)
        choices = self.questions.choices(arrangement, solution, rows)
        spare, report = 0, NOTHING_SOLVED
        for _ in range(_MOST_TRIES):
            answer = self._stages(arrangement, rows, choices, spare)
            if isinstance(answer, NoStages):
                short = answer.shortfall_bytes
                if short is None or (not spare and short > CLOSE_BYTES):
                    return Answer(candidate=None, shortfall_bytes=short, report=report)
                break
            report += answer.report
            if not isinstance(answer, StagePlan):
                return Answer(candidate=None, shortfall_bytes=None, report=report)
            candidate = self._predicted(arrangement, solution, rows, answer)
            over = self._excess(candidate)
            if over <= 0:
                return Answer(candidate=candidate, shortfall_bytes=0, report=report)
            spare += over
        last = self._thriftiest(arrangement, solution)
        return replace(last, report=report + last.report)

    def _wastes_ranks(self, arrangement: Arrangement, solution: int) -> bool:
        """Whether fewer devices would do what the ranks of a tensor axis do, each all of it."""
        if arrangement.tensor == 1 or self.demands.may_waste_ranks:
            return False
        return self.costing.solution(inside_of(arrangement, solution)).splits_nothing

    def _stages(
        self,
        arrangement: Arrangement,
        rows: Rows,
        choices: LayerChoices,
        spare: int,
    ) -> StageAnswer:
        """Choose the stages within what each pipeline rank may use, less what is spared."""
        held = spare + context_bytes(arrangement, self.constants)
        memory = [limit - held for limit in self.questions.limit_bytes(arrangement)]
        if min(memory) <= 0:
            return NoStages(shortfall_bytes=1 - min(memory))
        return choose_stages(choices, self.questions.limits(arrangement, rows, memory))

    def _thriftiest(self, arrangement: Arrangement, solution: int) -> Answer:
        """Return the candidate that needs least of its fullest rank, or what it is short of."""
        rows = self.questions.rows(arrangement, solution)
        choices = self.questions.choices(arrangement, solution, rows)
        nothing = self.questions.limits(arrangement, rows, [0] * arrangement.pipeline)
        least = least_memory_bytes(choices, nothing)
        if least is None:
            return NOTHING
        answer = choose_stages(choices, with_memory(nothing, least))
        if not isinstance(answer, StagePlan):
            report = NOTHING_SOLVED if isinstance(answer, NoStages) else answer.report
            return Answer(candidate=None, shortfall_bytes=None, report=report)
        candidate = self._predicted(arrangement, solution, rows, answer)
        over = self._excess(candidate)
        return Answer(
            candidate=candidate if over <= 0 else None,
            shortfall_bytes=max(0, over),
            report=answer.report,
        )

    def _predicted(
        self,
        arrangement: Arrangement,
        solution: int,
        rows: Rows,
        answer: StagePlan,
    ) -> Candidate:
        stages, costs = [], []
        for number, planned in enumerate(answer.stages):
            rank = rank_of(arrangement.schedule, number, arrangement.pipeline)
            modes = tuple(map(Recompute, planned.options))
            stages.append(
                Stage(
                    rank=rank,
                    first=planned.first,
                    count=planned.stop - planned.first,
                    recompute=modes,
                )
            )
            own = rows[rank][planned.first : planned.stop]
            costs.append([one[mode] for one, mode in zip(own, modes, strict=True)])
        tuned = self._tuned(arrangement, inside_of(arrangement, solution), costs)
        return Candidate(
            arrangement=tuned[0], solution=solution, stages=tuple(stages), prediction=tuned[1]
        )

    def _tuned(
        self, arrangement: Arrangement, inside: Inside, costs: Sequence[Sequence[LayerCost]]
    ) -> tuple[Arrangement, Prediction]:
        """Return the arrangement with the bucket size of the shortest step, and its prediction."""
        has_buckets = arrangement.data > 1 and arrangement.zero < Zero.GRADIENTS
        sizes = self.demands.bucket_bytes if has_buckets else self.demands.bucket_bytes[:1]
        tied = self.costing.tied_gradient_bytes(inside)
        tried = []
        for size in sizes:
            own = replace(arrangement, bucket_bytes=size)
            prediction = predict(
                costs,
                own,
                self.costing.cluster_of(own),
                constants=self.constants,
                model_flops=self.model_flops,
                tied_gradient_bytes=tied,
            )
            tried.append((own, prediction))
        return min(tried, key=lambda pair: pair[1].step_seconds)

    def _excess(self, candidate: Candidate) -> int:
        """Return by how much the fullest rank is beyond its limit; 0 or less if none is."""
        limits = self.questions.limit_bytes(candidate.arrangement)
        return max(
            predicted.memory.device_bytes - limits[stage.rank]
            for stage, predicted in zip(candidate.stages, candidate.prediction.stages, strict=True)
        )


def _together(answers: Sequence[Answer], best: Candidate | None) -> Answer:
    """Return what came of all layouts of an arrangement."""
    short = [one.shortfall_bytes for one in answers if one.shortfall_bytes is not None]
    return Answer(
        candidate=best,
        shortfall_bytes=min(short, default=None),
        report=sum((one.report for one in answers), NOTHING_SOLVED),
        leaves_out=any(one.leaves_out for one in answers),
    )


def recomputes(candidate: Candidate) -> bool:
    """Whether any layer is computed again."""
    return any(mode is not Recompute.NONE for stage in candidate.stages for mode in stage.recompute)
