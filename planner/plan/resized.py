"""Turns a plan into what its training is planned under again, on another number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.levels import cluster_from
from autopar.planner.cluster.sheet import known_fabrics
from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.conflict import minimal_conflict
from autopar.planner.plan.declared.constraints import Constraints, Declared, constraints_of
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.degrees import BatchFacts, leave_degrees, legal_degrees
from autopar.planner.plan.search.space import STAGES_PER_RANK

ORIGIN = "the plan"
# Of demands that do not fit together any more, the first of these is dropped. Data ranks come
# first: another number of them computes the same, and tensor and pipeline ranks save memory.
_DROPPED = (
    "data",
    "shard",
    "zero_levels",
    "stages_per_rank",
    "stages",
    "microbatch",
    "pipeline",
    "tensor",
)
_OF_A_CHOICE = ("deadline_seconds", "budget_usd")  # they choose a number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What holds on another number of devices, and what was declared and does not."""

    constraints: Constraints
    dropped: tuple[Declared, ...]


def resized_constraints(plan: Plan, devices: int) -> Resized:
    """Return what a plan was declared with, its global batch and its precision.

    Demands that leave no degrees on so many devices are dropped one by one, where they are of
    degrees. What else cannot be had there is left for the search to refuse.
    """
    arranged, batch = plan.arrangement, BatchFacts.of(plan.graph)
    same = {"global_batch": arranged.global_batch, "precision": arranged.precision.value}
    declared = (
        *plan.constraints,
        *(declare(place, value, origin=ORIGIN, where=place) for place, value in same.items()),
    )

    def is_feasible(some: Sequence[Declared]) -> bool:
        return _leave_a_plan(some, devices, batch)

    dropped = [one for one in declared if one.field in _OF_A_CHOICE]
    while not is_feasible(rest := [one for one in declared if one not in dropped]):
        conflict = minimal_conflict(rest, is_feasible)
        of_degrees = [one for one in conflict if one.field in _DROPPED]
        if not of_degrees:
            break
        dropped.append(min(of_degrees, key=lambda one: _DROPPED.index(one.field)))
    return Resized(constraints=constraints_of(rest), dropped=tuple(dropped))


def _leave_a_plan(declared: Sequence[Declared], devices: int, batch: BatchFacts) -> bool:
    """Whether some degrees also take the ZeRO levels and the stages that are declared."""
    if not leave_degrees(declared, devices, batch):
        return False
    chosen = constraints_of(declared)
    most = chosen.stages_per_rank or max(STAGES_PER_RANK)
    last = max((pin.stage for pin in chosen.stages), default=0)
    return any(
        (data > 1 or Zero.NONE in chosen.zero_levels)
        and (pipeline > 1 or chosen.stages_per_rank in (None, 1))
        and last < (pipeline * most if pipeline > 1 else 1)
        for pipeline, data, _ in legal_degrees(devices, chosen, batch)
    )


def machines_left(plan: Plan, devices: int, machines: int = 1) -> Cluster:
    """Return machines with so many devices of the plan's kind, joined as those of the plan are.

    If the plan is for one machine, the usual network of its devices joins several.
    """
    first = plan.cluster.nodes[0]
    if any(replace(node, devices=first.devices) != first for node in plan.cluster.nodes):
        raise InputError(
            "the plan is for unlike machines, and which of them is left is not known",
            fix=f"describe it in a cluster file: autopar plan {plan.model.spec} --cluster FILE …",
        )
    links = {level.name: level.units[0].link for level in plan.cluster.levels}
    return cluster_from(
        [replace(first, devices=devices // machines)] * machines,
        network=links.get("network", known_fabrics()[first.device.fabric]),
        origin=plan.cluster.origin,
    )
