"""The stage program: which consecutive layers go on which stage of a pipeline, and how they run.

A column is a possible stage (cut_bounds.py): layers, their modes, their seconds and bytes. A place
is a border between layers; all borders inside a run of equal layers are one place, because only the
number of layers matters there. Over the columns c of each stage p,

    z[c] ∈ {0,1}      stage p is the column c
    y[c] ∈ [0,1]      instead of z[c], if some mixes between these columns are not offered: blends
                      of the columns stand for them, and the optimum is only a bound
    u[i] ∈ {0,1}      with y: stage p is the interval i, to which these columns belong
    t[p,k]            seconds of stage p in action k (paths.py), transfers among them
    L, G, O ≥ 0       the longest chain, what is gathered before it, the slowest optimizer

    minimise  L + G + O

    one_column_per_stage        Σ_c z[c] = 1                                    for every p
    stages_follow_each_other    Σ z ending at a place = Σ z of the next stage beginning there
    runs_are_used_up            Σ_c layers of run r in c · z[c] = layers of r   for every r
    intervals_are_whole         Σ_c of i y[c] = u[i]
    times_are_of_columns        t[p,k] = Σ_c seconds of c in k · z[c]
    chains_are_no_longer        L ≥ Σ_p,k count[p,k] · t[p,k] + Σ reductions of the chain's rank · z
    gathers_come_first          G ≥ first gather of p − the time until p's first forward
    optimizers_end              O ≥ Σ_c of rank r optimizer seconds · z[c]
    memory_is_kept              Σ_c of rank r bytes at moment k · z[c] ≤ memory of r
    cuts_are_excluded           Σ_p (z or u) of a cut's stages ≤ stages − 1      for priced cuts

Every chain bounds a step from below, and so does the optimum. The optimum is the step of its
columns if their times are exact and their longest chain is among the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pulp

from autopar.planner.costs.schedules.paths import TRANSFER, Chain
from autopar.planner.costs.steps.memory import most_tensor_bytes
from autopar.planner.programs.solver import (
    Infeasible,
    SolverReport,
    Unfinished,
    branching_solver,
    default_solver,
    new_program,
    solve,
)
from autopar.planner.programs.stages.cut_bounds import Column
from autopar.planner.programs.stages.offers import fullest
from autopar.planner.programs.stages.question import BorderPlace, Content, Cut, StageQuestion

_FEW_COLUMNS = 400  # a program with no more columns is solved by the default solver
_CLOSE = 1e-7  # of the objective: the optimum is found up to this share
Term = tuple[pulp.LpVariable, float]
_Key = tuple[int, BorderPlace, BorderPlace, Content]  # an interval on a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The columns that the program chose, if any, and a lower bound of all cuts."""

    columns: tuple[Column, ...]
    bound_seconds: float
    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choice:
    """A column that can be chosen."""

    column: Column
    variable: pulp.LpVariable
    key: _Key  # of its interval

    @property
    def begins(self) -> BorderPlace:
        """The place of the border before its first layer."""
        return self.key[1]

    @property
    def ends(self) -> BorderPlace:
        """The place of the border after its last layer."""
        return self.key[2]


class _CutProgram:
    """The possible cuts of layers into stages: common to the programs of time and of memory."""

    unit = 1.0  # of the objective

    def __init__(self, question: StageQuestion, columns: Sequence[Column]) -> None:
        self.question = question
        self.program = new_program("stages")
        self._places = question.places
        self.stages: list[list[_Choice]] = [[] for _ in range(question.shape.stages)]
        self._intervals: dict[_Key, pulp.LpVariable] = {}
        for number, column in enumerate(self._different(columns)):
            self.stages[column.stage].append(self._choice(number, column))
        self.size = sum(map(len, self.stages))
        self._one_column_per_stage()
        self._stages_follow_each_other()
        if question.merges_runs:
            self._runs_are_used_up()
        self._intervals_are_whole()

    def solve(self, *, most_nodes: int, gap: float = _CLOSE) -> Decision:
        """Solve the current program, to a relative gap."""
        branches = self.question.shape.stages_per_rank > 1 and self.size > _FEW_COLUMNS
        solver = branching_solver() if branches else default_solver()
        outcome = solve(self.program, most_nodes=most_nodes, solver=solver, gap=gap)
        if isinstance(outcome, Infeasible):
            return Decision(columns=(), bound_seconds=float("inf"), report=outcome.report)
        bound = (outcome.bound or 0.0) * self.unit
        if isinstance(outcome, Unfinished) and outcome.objective is None:
            return Decision(columns=(), bound_seconds=bound, report=outcome.report)
        return Decision(columns=tuple(self._chosen()), bound_seconds=bound, report=outcome.report)

    def _key(self, stage: int, first: int, stop: int) -> _Key:
        return stage, self._places[first], self._places[stop], self.question.classes[first:stop]

    def _choice(self, number: int, column: Column) -> _Choice:
        variable = self.program.add_variable(
            f"z_{number}", 0, 1, cat="Binary" if column.offer.others_are_worse else "Continuous"
        )
        key = self._key(column.stage, column.first, column.stop)
        return _Choice(column=column, variable=variable, key=key)

    def _one_column_per_stage(self) -> None:
        for stage, own in enumerate(self.stages):
            terms = [(one.variable, 1.0) for one in own]
            self._add(terms, "==", 1.0, f"one_column_of_stage_{stage}")

    def _stages_follow_each_other(self) -> None:
        for stage in range(len(self.stages) - 1):
            flow: defaultdict[object, list[Term]] = defaultdict(list)
            for one in self.stages[stage]:
                flow[one.ends].append((one.variable, 1.0))
            for one in self.stages[stage + 1]:
                flow[one.begins].append((one.variable, -1.0))
            for number, terms in enumerate(flow.values()):
                self._add(terms, "==", 0.0, f"stage_{stage}_and_the_next_at_{number}")

    def _runs_are_used_up(self) -> None:
        runs: defaultdict[int, list[Term]] = defaultdict(list)
        sizes: defaultdict[int, int] = defaultdict(int)
        numbers = self.question.run_numbers
        for number in numbers:
            sizes[number] += 1
        for own in self.stages:
            for one in own:
                inside = numbers[one.column.first : one.column.stop]
                for number, group in groupby(inside):
                    if sizes[number] > 1:
                        runs[number].append((one.variable, float(len(list(group)))))
        for number, terms in runs.items():
            self._add(terms, "==", float(sizes[number]), f"run_{number}_is_used_up")

    def _intervals_are_whole(self) -> None:
        for stage, own in enumerate(self.stages):
            loose: defaultdict[_Key, list[Term]] = defaultdict(list)
            for one in own:
                if not one.column.offer.others_are_worse:
                    loose[one.key].append((one.variable, 1.0))
            for key, terms in loose.items():
                number = len(self._intervals)
                self._intervals[key] = self.program.add_variable(
                    f"u_{stage}_{number}", cat="Binary"
                )
                terms.append((self._intervals[key], -1.0))
                self._add(terms, "==", 0.0, f"whole_{number}")

    def _different(self, columns: Iterable[Column]) -> Iterable[Column]:
        """Yield the columns, but only one of those that differ only by their position in a run."""
        seen = set()
        for one in columns:
            key = self._key(one.stage, one.first, one.stop), id(one.offer)
            if key not in seen:
                seen.add(key)
                yield one

    def _chosen(self) -> Iterable[Column]:
        """Yield the columns of the solution from the first stage to the last.

        A column stands for its equals in a run, so each is moved to where the one before it ends.
        """
        place = 0
        for own in self.stages:
            best = max(own, key=lambda one: float(one.variable.varValue or 0.0)).column
            length = best.stop - best.first
            yield Column(
                stage=best.stage,
                first=place,
                stop=place + length,
                offer=best.offer,
                times=best.times,
            )
            place += length

    def _add(self, terms: Sequence[Term], sense: str, right: float, name: str) -> None:
        expression = pulp.LpAffineExpression(list(terms))
        senses = {"<=": pulp.LpConstraintLE, "==": pulp.LpConstraintEQ}
        self.program += pulp.LpConstraint(expression, senses[sense], name, right)

    def _memory_rows(self) -> Iterator[tuple[int, int, list[Term]]]:
        """Yield rank, moment and bytes as fractions of the limit, for each possible peak."""
        constants, arrangement = self.question.constants, self.question.arrangement
        for rank, stages in enumerate(self.question.stages_of):
            limit = most_tensor_bytes(self.question.limit_bytes[rank], arrangement, constants)
            moments = self.question.moments[rank]
            held = [
                (one, one.column.offer.bytes_over_time(moments, place), stage)
                for place, stage in enumerate(stages)
                for one in self.stages[stage]
            ]
            for moment in fullest(moments):
                running = stages[int(moments.running[moment])]
                yield (
                    rank,
                    moment,
                    [
                        (
                            one.variable,
                            (own[moment] + (one.column.offer.work_bytes if at == running else 0.0))
                            / limit,
                        )
                        for one, own, at in held
                    ],
                )


class StageProgram(_CutProgram):
    """The program of the shortest step; each priced cut adds rows to it."""

    def __init__(
        self,
        question: StageQuestion,
        columns: Sequence[Column],
        *,
        unit_seconds: float,
    ) -> None:
        super().__init__(question, columns)
        self.unit = unit_seconds
        self._chains: set[object] = set()
        self._excluded = self._asked = 0
        self.longest = self.program.add_variable("L", 0)
        self.gathers = self.program.add_variable("G", 0)
        self.optimizers = self.program.add_variable("O", 0)
        self.program.setObjective(
            pulp.LpAffineExpression([(self.longest, 1), (self.gathers, 1), (self.optimizers, 1)])
        )
        self.times = self._times_are_of_columns()
        self._gathers_come_first()
        self._optimizers_end()
        if question.shape.stages_per_rank > 1:
            self._memory_is_kept()

    def add_chain(self, chain: Chain) -> None:
        """Add chains_are_no_longer: L ≥ Σ count · t + Σ reductions of its last rank · z."""
        if chain.key in self._chains:
            return
        self._chains.add(chain.key)
        terms: list[Term] = [(self.longest, -1.0)]
        for stage, counts in enumerate(chain.counts):
            terms += [
                (self.times[stage][kind], float(count))
                for kind, count in enumerate(counts)
                if count
            ]
        if chain.rank is not None:
            for stage in self.question.stages_of[chain.rank]:
                terms += self._seconds(
                    (one, one.column.offer.least_reduction_seconds) for one in self.stages[stage]
                )
        self._add(terms, "<=", 0.0, f"chain_{len(self._chains)}")

    def exclude(self, cut: Cut) -> None:
        """Add cuts_are_excluded: Σ z of the cut's intervals ≤ stages − 1."""
        terms: list[Term] = []
        for stage, own in enumerate(self.stages):
            key = self._key(stage, cut[stage], cut[stage + 1])
            if key in self._intervals:
                terms.append((self._intervals[key], 1.0))
            else:
                terms += [(one.variable, 1.0) for one in own if one.key == key]
        self._excluded += 1
        self._add(terms, "<=", len(self.stages) - 1.0, f"excluded_{self._excluded}")

    def below(self, seconds: float) -> None:
        """Allow only steps that take at most some seconds."""
        terms = [(self.longest, 1.0), (self.gathers, 1.0), (self.optimizers, 1.0)]
        self._asked += 1
        self._add(terms, "<=", seconds / self.unit, f"below_the_best_{self._asked}")

    def _times_are_of_columns(self) -> list[list[pulp.LpVariable]]:
        table = []
        for stage, own in enumerate(self.stages):
            row = [
                self.program.add_variable(f"t_{stage}_{kind}", 0) for kind in range(TRANSFER + 1)
            ]
            for kind, total in enumerate(row):
                terms = self._seconds((one, float(one.column.times[kind])) for one in own)
                self._add([*terms, (total, -1.0)], "==", 0.0, f"time_{stage}_{kind}")
            table.append(row)
        return table

    def _gathers_come_first(self) -> None:
        before: list[Term] = []  # what passes before the stage's first forward
        first: list[list[Term]] = []  # the same, before the first forward of each rank
        for stage, own in enumerate(self.stages):
            if stage < self.question.shape.ranks:
                first.append(before)
            gathers = [(one, one.column.offer.first_gather_seconds) for one in own]
            if any(seconds for _, seconds in gathers):
                waited = first[self.question.ranks[stage]]
                terms = [(self.gathers, -1.0), *self._seconds(gathers), *waited]
                self._add(terms, "<=", 0.0, f"gather_of_stage_{stage}")
            before = [*before, (self.times[stage][0], -1.0), (self.times[stage][TRANSFER], -1.0)]

    def _optimizers_end(self) -> None:
        for rank, stages in enumerate(self.question.stages_of):
            terms: list[Term] = [(self.optimizers, -1.0)]
            for stage in stages:
                terms += self._seconds(
                    (one, one.column.offer.optimizer_seconds) for one in self.stages[stage]
                )
            self._add(terms, "<=", 0.0, f"optimizer_of_rank_{rank}")

    def _memory_is_kept(self) -> None:
        """Add memory_is_kept for each rank, at each moment that may be its peak."""
        slack = 64.0 / min(self.question.limit_bytes)  # allows for rounding
        for rank, moment, terms in self._memory_rows():
            self._add(terms, "<=", 1.0 + slack, f"memory_of_{rank}_at_{moment}")

    def _seconds(self, pairs: Iterable[tuple[_Choice, float]]) -> list[Term]:
        return [(one.variable, seconds / self.unit) for one, seconds in pairs if seconds]


class MemoryProgram(_CutProgram):
    """The program of the least memory: M ≥ bytes of each rank at each moment, as fractions."""

    def __init__(self, question: StageQuestion, columns: Sequence[Column]) -> None:
        super().__init__(question, columns)
        most = self.program.add_variable("M", 0)
        self.program.setObjective(pulp.LpAffineExpression([(most, 1)]))
        for rank, moment, terms in self._memory_rows():
            self._add([*terms, (most, -1.0)], "<=", 0.0, f"memory_of_{rank}_at_{moment}")
