"""Solves one arrangement: which layers go on which stage, in which layouts and recompute modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autopar.planner.cluster.device import Device
from autopar.planner.costs.framework import FrameworkConstants
from autopar.planner.costs.memory import (
    context_bytes,
    layer_state_bytes,
    layer_unsharded_bytes,
)
from autopar.planner.costs.pipeline import rank_of
from autopar.planner.costs.prediction import Arrangement, LayerCost, Prediction, Recompute, Zero
from autopar.planner.costs.rank_groups import rank_groups
from autopar.planner.costs.schedule import ScheduleKind, in_flight_microbatches
from autopar.planner.costs.step import pipeline_shape, predict
from autopar.planner.plan.costing import Costing, Inside, Modes
from autopar.planner.plan.plan import Stage
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stage_memory import least_memory_bytes, with_memory
from autopar.planner.programs.stage_plan import NoStages, StageAnswer, StagePlan, choose_stages
from autopar.planner.programs.stage_problem import (
    Cut,
    LayerChoices,
    LayerOption,
    LayerRun,
    Pin,
    StageLimit,
    StageLimits,
)

_MOST_TRIES = 4  # to meet the memory limit where the program saw less than the prediction
CLOSE_BYTES = 2**20  # short of which the prediction is asked too: the program rounds up


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What every candidate has to respect, beside its arrangement."""

    limit_bytes: Mapping[str, int]  # of each device by name
    modes: tuple[frozenset[Recompute], ...]  # that each layer may use
    pins: tuple[Pin, ...]
    bucket_bytes: tuple[int, ...]


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

    None bytes: no memory helps.
    """

    candidate: Candidate | None
    shortfall_bytes: int | None
    report: SolverReport


def _nothing(_: int) -> float:
    """Nothing is known of any solution."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Solves and predicts candidates."""

    costing: Costing
    demands: Demands
    constants: FrameworkConstants
    model_flops: int
    _known: dict[object, LayerChoices] = field(init=False, default_factory=dict, compare=False)

    def solve(
        self,
        arrangement: Arrangement,
        *,
        least: Callable[[int], float] = _nothing,
        known_seconds: float = float("inf"),
    ) -> Answer:
        """Return the fastest candidate of an arrangement.

        Where the fastest layouts fit without computing anything again, no others are faster;
        only where memory presses, the slower ones that need less of it are tried too, unless what
        they come to at `least` is no better than what was found, here or before.
        """
        first = self._solve(arrangement, 0)
        if first.candidate and not recomputes(first.candidate):
            return first
        solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
        answers, best = [first], first.candidate
        for number in sorted(range(1, len(solutions)), key=least):
            found_seconds = best.prediction.step_seconds if best else known_seconds
            if least(number) >= min(found_seconds, known_seconds):
                break
            answers.append(self._solve(arrangement, number))
            found = [one.candidate for one in answers if one.candidate]
            best = min(found, key=lambda c: c.prediction.step_seconds, default=None)
        report = sum((one.report for one in answers), NOTHING_SOLVED)
        short = [one.shortfall_bytes for one in answers if one.shortfall_bytes is not None]
        return Answer(candidate=best, shortfall_bytes=min(short, default=None), report=report)

    def solve_smallest(self, arrangement: Arrangement) -> Answer:
        """Return the candidate that needs least memory on its fullest rank, if that fits."""
        solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
        answers = [self._thriftiest(arrangement, number) for number in range(len(solutions))]
        report = sum((one.report for one in answers), NOTHING_SOLVED)
        found = [one.candidate for one in answers if one.candidate]
        short = [one.shortfall_bytes for one in answers if one.shortfall_bytes is not None]
        best = min(found, key=lambda c: c.prediction.peak_memory.device_bytes, default=None)
        return Answer(candidate=best, shortfall_bytes=min(short, default=None), report=report)

    def _solve(self, arrangement: Arrangement, solution: int) -> Answer:
        """Solve for one layout solution; what the prediction finds too big is asked for again.

        What the program sees is a little off the prediction, so where memory just does not suffice
        the thriftiest plan decides.
        """
        rows = self._rows(arrangement, solution)
        choices = self._choices(arrangement, solution, rows)
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

    def _stages(
        self,
        arrangement: Arrangement,
        rows: Mapping[Device, Sequence[Modes]],
        choices: LayerChoices,
        spare: int,
    ) -> StageAnswer:
        """Choose the stages within what is allowed of each device, less what is spared."""
        held = spare + context_bytes(arrangement, self.constants)
        memory = {name: limit - held for name, limit in self.demands.limit_bytes.items()}
        if min(memory.values()) <= 0:
            return NoStages(shortfall_bytes=1 - min(memory.values()))
        return choose_stages(choices, self._limits(arrangement, rows, memory))

    def _thriftiest(self, arrangement: Arrangement, solution: int) -> Answer:
        """Return the candidate that needs least of its fullest rank, or what it is short of."""
        rows = self._rows(arrangement, solution)
        choices = self._choices(arrangement, solution, rows)
        nothing = self._limits(arrangement, rows, dict.fromkeys(self.demands.limit_bytes, 0))
        least = least_memory_bytes(choices, nothing)
        if least is None:
            return Answer(candidate=None, shortfall_bytes=None, report=NOTHING_SOLVED)
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

    def asked(self, arrangement: Arrangement, solution: int) -> tuple[LayerChoices, StageLimits]:
        """Return what the stage program is asked but for the cuts, with the most memory it gets."""
        rows = self._rows(arrangement, solution)
        memory = dict.fromkeys(self.demands.limit_bytes, max(0, self.most_bytes(arrangement)))
        choices = self._uncut_choices(arrangement, solution, rows)
        return choices, self._limits(arrangement, rows, memory)

    def most_bytes(self, arrangement: Arrangement) -> int:
        """Return what any rank may hold beside what libraries take, a little more than allowed."""
        most = max(self.demands.limit_bytes.values())
        return most - context_bytes(arrangement, self.constants) + CLOSE_BYTES

    def _rows(self, arrangement: Arrangement, solution: int) -> Mapping[Device, tuple[Modes, ...]]:
        inside = inside_of(arrangement, solution)
        devices = dict.fromkeys(self._devices(arrangement))
        return {device: self.costing.rows(inside, device) for device in devices}

    def _devices(self, arrangement: Arrangement) -> tuple[Device, ...]:
        """Return the device of each pipeline rank: the first of its ranks, as the prediction."""
        devices = self.costing.cluster.devices
        width = arrangement.tensor * arrangement.data
        return tuple(devices[rank * width] for rank in range(arrangement.pipeline))

    def _choices(
        self, arrangement: Arrangement, solution: int, rows: Mapping[Device, tuple[Modes, ...]]
    ) -> LayerChoices:
        uncut = self._uncut_choices(arrangement, solution, rows)
        cuts = self._cuts(arrangement, next(iter(rows.values())))
        return replace(uncut, cuts=cuts) if cuts else uncut

    def _uncut_choices(
        self, arrangement: Arrangement, solution: int, rows: Mapping[Device, tuple[Modes, ...]]
    ) -> LayerChoices:
        """Return the layers' options, the same for all arrangements that divide the state alike."""
        division = arrangement.zero, arrangement.shard if arrangement.zero else 1
        key = inside_of(arrangement, solution), division, tuple(rows)
        if key not in self._known:
            self._known[key] = self._made_choices(arrangement, rows)
        return self._known[key]

    def _made_choices(
        self, arrangement: Arrangement, rows: Mapping[Device, tuple[Modes, ...]]
    ) -> LayerChoices:
        first = next(iter(rows.values()))
        allowed = self.demands.modes
        keys = [(id(modes), allowed[place]) for place, modes in enumerate(first)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        places = [keys.index(key) for key in numbers]
        return LayerChoices(
            options=tuple(
                tuple(
                    tuple(self._options(arrangement, own[place], self.demands.modes[place]))
                    for place in places
                )
                for own in rows.values()
            ),
            runs=tuple(
                LayerRun(layer_class=numbers[key], count=len(list(group)))
                for key, group in groupby(keys)
            ),
            pins=self.demands.pins,
        )

    def _options(
        self, arrangement: Arrangement, modes: Modes, allowed: frozenset[Recompute]
    ) -> Iterator[LayerOption]:
        """Yield one option for each recompute mode, without those that equal a simpler one."""
        margin = 1.0 + self.constants.margin
        unsharded = layer_unsharded_bytes(modes[Recompute.NONE], arrangement)
        seen: set[tuple[float, int, int]] = set()
        for mode in Recompute:
            cost = modes[mode]
            amounts = (cost.backward_seconds, cost.saved_bytes, cost.transient_bytes)
            if mode not in allowed or amounts in seen:
                continue
            seen.add(amounts)
            yield LayerOption(
                name=mode.value,
                seconds=cost.forward_seconds + cost.backward_seconds,
                fixed_bytes=int(layer_state_bytes(cost, arrangement) * margin) + 1,
                saved_bytes=int(cost.saved_bytes * margin) + 1,
                transient_bytes=int((cost.transient_bytes + unsharded) * margin) + 1,
            )

    def _cuts(self, arrangement: Arrangement, row: Sequence[Modes]) -> tuple[Cut, ...]:
        if arrangement.pipeline == 1:
            return ()
        groups = rank_groups(self.costing.cluster, arrangement)
        known: dict[int, float] = {}
        cuts = []
        for modes in row[:-1]:
            size = modes[Recompute.NONE].output_bytes
            seconds = known.setdefault(size, groups.transfer_seconds(size))
            cuts.append(Cut(beginning_seconds=seconds, ending_seconds=seconds))
        return tuple(cuts)

    def _limits(
        self,
        arrangement: Arrangement,
        rows: Mapping[Device, Sequence[Modes]],
        memory: Mapping[str, int],
    ) -> StageLimits:
        """Return what each stage may use: so much memory on each kind of device."""
        devices, classes = self._devices(arrangement), list(rows)
        shape = pipeline_shape(arrangement)
        stages = []
        for stage in range(shape.stages):
            device = devices[rank_of(arrangement.schedule, stage, arrangement.pipeline)]
            in_flight = (
                in_flight_microbatches(arrangement.schedule, stage, shape)
                if arrangement.pipeline > 1
                else 1
            )
            stages.append(
                StageLimit(
                    memory_bytes=memory[device.name],
                    in_flight=in_flight,
                    device_class=classes.index(device),
                )
            )
        return StageLimits(
            stages=tuple(stages),
            microbatches=arrangement.microbatches,
            stages_per_rank=arrangement.stages_per_rank,
            is_v_shaped=arrangement.schedule is ScheduleKind.ZERO_BUBBLE_V,
        )

    def _predicted(
        self,
        arrangement: Arrangement,
        solution: int,
        rows: Mapping[Device, Sequence[Modes]],
        answer: StagePlan,
    ) -> Candidate:
        devices = self._devices(arrangement)
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
            own = rows[devices[rank]][planned.first : planned.stop]
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
                self.costing.cluster,
                constants=self.constants,
                model_flops=self.model_flops,
                tied_gradient_bytes=tied,
            )
            tried.append((own, prediction))
        return min(tried, key=lambda pair: pair[1].step_seconds)

    def _excess(self, candidate: Candidate) -> int:
        """Return by how much the fullest rank is beyond its limit; 0 or less if none is."""
        devices = self._devices(candidate.arrangement)
        return max(
            predicted.memory.device_bytes - self.demands.limit_bytes[devices[stage.rank].name]
            for stage, predicted in zip(candidate.stages, candidate.prediction.stages, strict=True)
        )


def recomputes(candidate: Candidate) -> bool:
    """Whether any layer is computed again."""
    return any(mode is not Recompute.NONE for stage in candidate.stages for mode in stage.recompute)


def inside_of(arrangement: Arrangement, solution: int) -> Inside:
    """Return what the inside of the layers depends on."""
    return Inside(
        tensor=arrangement.tensor,
        microbatch=arrangement.microbatch,
        solution=solution,
        is_one_stage=arrangement.pipeline == 1,
    )
