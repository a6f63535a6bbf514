"""The stage program: which consecutive layers go on which pipeline stage, and how each is run.

A stage is an interval of layers; what its layers cost at best within its memory is known before the
program is made (stage_options, stage_intervals), and so are the intervals that no better plan than
the best known could use (stage_search): those are left out. Over what remains:

    z[p,i,j] ∈ {0,1}    stage p runs the layers i … j − 1 (as mix k, where times trade off)
    T[c] ≥ 0            the slowest stage of round c (one round if every rank has one stage)
    U[c] ≥ 0            the most that a stage of round c does once per step

    minimise  (m·v − 1) · Σ T  +  Σ F · z  +  v · Σ U        (m microbatches, v stages per rank)

    one_interval_per_stage       Σ_ij z[p,i,j] = 1
    stages_follow_each_other     Σ_i z[p,i,b] = Σ_j z[p+1,b,j]
    bottleneck_covers_stages     T[c] ≥ Σ_ij F_p(i,j) · z[p,i,j]          for every p of round c
    step_covers_stages           U[c] ≥ Σ_ij S_p(i,j) · z[p,i,j]          for every p of round c

That stage 0 begins with the first layer and the last ends with the last is a matter of columns.
Where the bounds meet the best plan known, nothing is left to decide and no program is made.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pulp

from autopar.planner.programs.solver import (
    Infeasible,
    SolverName,
    SolverReport,
    TimedOut,
    is_chosen,
    new_program,
    solve,
)
from autopar.planner.programs.stages.bounds import Weights
from autopar.planner.programs.stages.intervals import Interval, IntervalTable
from autopar.planner.programs.stages.problem import StageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """An interval that the program may choose, with its times in the unit of the program."""

    interval: Interval
    time: float
    step_time: float
    variable: pulp.LpVariable


Columns = tuple[tuple[Column, ...], ...]  # by stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan that the program chose, empty if none, and what no plan can beat, in ticks.

    Proved: no better plan exists among the intervals given, or none at all.
    """

    plan: tuple[Interval, ...]
    bound: float
    is_proved: bool
    report: SolverReport


def decide(
    intervals: Sequence[Interval],
    table: IntervalTable,
    limits: StageLimits,
    *,
    time_limit_seconds: float,
    solver: SolverName | None,
) -> Decision:
    """Solve the program over some intervals and read the plan back."""
    unit = float(max(max(table.ticks[at.place], table.steps[at.place]) for at in intervals)) or 1.0
    columns = _columns(intervals, table, limits, unit)
    program = stage_program(columns, limits)
    outcome = solve(program, time_limit_seconds=time_limit_seconds, solver=solver)
    bound = outcome.bound if isinstance(outcome, TimedOut) else None
    has_values = not isinstance(outcome, Infeasible) and outcome.objective is not None
    return Decision(
        plan=_chosen(columns) if has_values else (),
        bound=(bound or 0.0) * unit,
        is_proved=not isinstance(outcome, TimedOut),
        report=outcome.report,
    )


def _chosen(columns: Columns) -> tuple[Interval, ...]:
    return tuple(c.interval for stage in columns for c in stage if is_chosen(c.variable))


def stage_program(columns: Columns, limits: StageLimits) -> pulp.LpProblem:
    """Return the program over some columns."""
    program = new_program("stages")
    bottlenecks = [pulp.LpVariable(f"T_{c}", 0) for c in range(limits.stages_per_rank)]
    steps = [pulp.LpVariable(f"U_{c}", 0) for c in range(limits.stages_per_rank)]
    one_interval_per_stage(program, columns)
    stages_follow_each_other(program, columns)
    bottleneck_covers_stages(program, columns, bottlenecks, limits=limits)
    step_covers_stages(program, columns, steps, limits=limits)
    weights = Weights.of(limits)
    times = [(c.variable, c.time) for stage in columns for c in stage]
    slowest = [(bottleneck, weights.bottleneck) for bottleneck in bottlenecks]
    once = [(step, weights.step) for step in steps]
    program.setObjective(_sum([*slowest, *times, *once]))
    return program


def one_interval_per_stage(program: pulp.LpProblem, columns: Columns) -> None:
    """Σ_ij z[p,i,j] = 1."""
    for p, stage in enumerate(columns):
        program += _sum((c.variable, 1) for c in stage) == 1, f"one_interval_of_stage_{p}"


def stages_follow_each_other(program: pulp.LpProblem, columns: Columns) -> None:
    """Σ_i z[p,i,b] = Σ_j z[p+1,b,j]."""
    for p in range(len(columns) - 1):
        flow = defaultdict(list)
        for c in columns[p]:
            flow[c.interval.stop].append((c.variable, 1))
        for c in columns[p + 1]:
            flow[c.interval.first].append((c.variable, -1))
        for boundary, terms in flow.items():
            program += _sum(terms) == 0, f"stage_{p}_ends_at_{boundary}_where_the_next_begins"


def bottleneck_covers_stages(
    program: pulp.LpProblem,
    columns: Columns,
    bottlenecks: Sequence[pulp.LpVariable],
    *,
    limits: StageLimits,
) -> None:
    """T[c] ≥ Σ_ij F_p(i,j) · z[p,i,j] for every stage p of round c."""
    for p, stage in enumerate(columns):
        bottleneck = (bottlenecks[limits.round_of(p)], -1)
        times = ((c.variable, c.time) for c in stage)
        program += _sum([bottleneck, *times]) <= 0, f"bottleneck_covers_stage_{p}"


def step_covers_stages(
    program: pulp.LpProblem,
    columns: Columns,
    steps: Sequence[pulp.LpVariable],
    *,
    limits: StageLimits,
) -> None:
    """U[c] ≥ Σ_ij S_p(i,j) · z[p,i,j] for every stage p of round c."""
    for p, stage in enumerate(columns):
        step = (steps[limits.round_of(p)], -1)
        times = ((c.variable, c.step_time) for c in stage)
        program += _sum([step, *times]) <= 0, f"step_covers_stage_{p}"


Term = tuple[pulp.LpVariable, float]


def _sum(terms: Iterable[Term]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(list(terms))


def _columns(
    intervals: Sequence[Interval], table: IntervalTable, limits: StageLimits, unit: float
) -> Columns:
    columns: list[list[Column]] = [[] for _ in limits.stages]
    for at in intervals:
        column = Column(
            interval=at,
            time=float(table.ticks[at.place]) / unit,
            step_time=float(table.steps[at.place]) / unit,
            variable=pulp.LpVariable(f"z_{at.stage}_{at.first}_{at.stop}_{at.mix}", cat="Binary"),
        )
        columns[at.stage].append(column)
    return tuple(map(tuple, columns))
