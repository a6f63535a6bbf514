"""Turns a search's outcome into a Plan: the choice, its proof, the runners-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.planner.cluster.cluster import Cluster, content_hash
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.prediction import Prediction
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.plan import FORMAT, Model, Plan, PlannedMachines, Proof, RunnerUp
from autopar.planner.plan.search.best_first import Outcome
from autopar.planner.plan.solving.candidate import Candidate
from autopar.planner.plan.solving.costing import PriceBook
from autopar.planner.plan.telling.explanation import StepPart, class_layouts, part_seconds
from autopar.planner.plan.telling.words import recompute_words
from autopar.planner.programs.solver import default_solver
from autopar.version import __version__

MOST_SHOWN = 4
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counters of a search."""

    enumerated: int
    solved: int
    infeasible: int
    programs: int
    seconds: float


def assemble(
    outcome: Outcome[Item, Candidate],
    best: Candidate,
    *,
    costing: PriceBook,
    model: Model,
    constraints: Constraints,
    limits: Mapping[str, int],
    counts: Counts,
) -> Plan:
    """Return the plan of the chosen candidate, with the fastest one if that is another."""
    fastest = outcome.found[0].leaf
    cluster = costing.cluster_of(best.arrangement)
    solution = costing.solution(best.inside)
    is_split = best.arrangement.tensor > 1
    parameters = solution.parameters if is_split else ()
    subject = costing.subject
    is_fastest = best.prediction.step_seconds <= fastest.prediction.step_seconds
    return Plan(
        format=FORMAT,
        autopar=__version__,
        model=model,
        machines=machines_of(cluster, limits),
        objective=constraints.objective.value,
        constraints=constraints.declared,
        arrangement=replace(best.arrangement, order=0),
        stages=best.stages,
        classes=class_layouts(solution.layouts, parameters, subject.axes, subject.layers),
        layouts=solution.layouts,
        parameters=parameters,
        crossing=solution.crossing if is_split else (),
        prediction=best.prediction,
        proof=_proof(outcome, counts),
        fastest=None if is_fastest else _beside(fastest, best),
        runners_up=tuple(_beside(one, best) for one in _distinct(outcome, best)),
        cluster=cluster,
        graph=subject.graph,
    )


def machines_of(cluster: Cluster, limits: Mapping[str, int]) -> PlannedMachines:
    """Return the summary of a cluster; if devices are unlike, the memory is the smallest one's."""
    smallest = min((node.device for node in cluster.nodes), key=lambda one: one.memory_bytes)
    names = dict.fromkeys(node.device.name for node in cluster.nodes)
    return PlannedMachines(
        devices=cluster.size,
        nodes=len(cluster.nodes),
        device=" + ".join(names),
        memory_bytes=smallest.memory_bytes,
        limit_bytes=min(limits.values()),
        usd_per_hour=cluster.usd_per_hour,
        backend=cluster.nodes[0].link.backend.value,
        content_hash=content_hash(cluster),
        limits=tuple((name, limits[name]) for name in names) if len(names) > 1 else (),
    )


def _proof(outcome: Outcome[Item, Candidate], counts: Counts) -> Proof:
    return Proof(
        enumerated=counts.enumerated,
        pruned=counts.enumerated - counts.solved - counts.infeasible,
        solved=counts.solved,
        infeasible=counts.infeasible,
        programs=counts.programs,
        solver=default_solver().value,
        bound_seconds=outcome.bound,
        gap=outcome.gap,
        search_seconds=counts.seconds,
        is_complete=outcome.is_complete,
    )


def _distinct(outcome: Outcome[Item, Candidate], best: Candidate) -> list[Candidate]:
    """Return the best other candidates, one of each kind (`kind_of`)."""
    fastest, *others = (found.leaf for found in outcome.found)
    seen = {kind_of(best), kind_of(fastest)}
    listed: list[Candidate] = []
    for other in others:
        if kind_of(other) not in seen and len(listed) < MOST_SHOWN:
            seen.add(kind_of(other))
            listed.append(other)
    return listed


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """Return what listed plans must differ in: degrees, ZeRO level, schedule, stages per rank."""
    one = candidate.arrangement
    return one.pipeline, one.data, one.tensor, one.zero, one.schedule, one.stages_per_rank


def _beside(candidate: Candidate, best: Candidate) -> RunnerUp:
    return runner_up(candidate, _difference(candidate.prediction, best.prediction))


def runner_up(plan: Candidate | Plan, difference: str) -> RunnerUp:
    """Return another plan as plan.json lists it, with how it differs from the chosen one."""
    prediction = plan.prediction
    return RunnerUp(
        arrangement=replace(plan.arrangement, order=0),
        recompute=recompute_words(plan.stages),
        step_seconds=prediction.step_seconds,
        mfu=prediction.mfu,
        device_bytes=prediction.peak_memory.device_bytes,
        communication_seconds=part_seconds(prediction, StepPart.COMMUNICATION),
        idle_seconds=part_seconds(prediction, StepPart.BUBBLE),
        difference=difference,
    )


def _difference(other: Prediction, best: Prediction) -> str:
    """Say which term most makes a plan slower (or faster) than the best, and the saved memory."""
    ours = {term.name: term.seconds for term in best.terms}
    theirs = {term.name: term.seconds for term in other.terms}
    more = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in ours | theirs}
    longer = other.step_seconds - best.step_seconds
    name = (min if longer < 0 else max)(more, key=lambda term: more[term])
    parts = []
    if longer < 0 or more[name] > 0:
        parts.append(_signed(more[name], name))
        rest = longer - more[name]
        parts += [_signed(rest, "elsewhere")] * (abs(rest) > _MINOR * abs(more[name]))
    saved = best.peak_memory.device_bytes - other.peak_memory.device_bytes
    parts += [f"{bytes_text(saved)} less memory"] * (saved > 0)
    return ", ".join(parts)


_MINOR = 0.05  # of the largest difference: a smaller sum of all others is not told


def _signed(seconds: float, term: str) -> str:
    return f"{'+' if seconds > 0 else '-'}{seconds_text(abs(seconds))} {term}"
