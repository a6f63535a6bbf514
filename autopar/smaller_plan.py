"""Plans a smaller model of the same file under the degrees of a plan, to try its kind of script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.codegen.subject import check_unchanged, model_spec
from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import InfeasibleError, InputError
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.smaller import arrangement_constraints, whole_constraints
from autopar.planner.plan.telling.split_lines import class_layouts
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planning import make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """The plan of a smaller model, and what the larger one splits that it does not split so."""

    plan: Plan
    unlike: tuple[str, ...]


def smaller_plan(plan: Plan, folder: Path, arguments: Sequence[str]) -> Smaller:
    """Return a plan of the same degrees for the model with some arguments in place of its own.

    Its modules are split and recomputed as the plan's are where sizes allow that.
    """
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))
    given = (argument.partition("=") for argument in arguments)
    chosen = dict(plan.model.arguments) | {key: value for key, _, value in given}
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)

    def planned(constraints: Constraints) -> Plan:
        texts = [f"{key}={value}" for key, value in chosen.items()]
        return make_plan(spec, texts, plan.cluster, constraints, time_limit_seconds=None)

    def planned_by_degrees() -> Plan:
        try:
            return planned(arrangement_constraints(plan))
        except InfeasibleError as error:
            raise _refusal(plan, arguments, error) from None

    try:
        found = planned(whole_constraints(plan, axes, layers))
    except (InputError, InfeasibleError):  # a smaller one may lack a module or an axis
        found = planned_by_degrees()
    return Smaller(plan=found, unlike=tuple(sorted(_splits(plan) - _splits(found))))


def _refusal(plan: Plan, arguments: Sequence[str], error: InfeasibleError) -> InfeasibleError:
    arranged = plan.arrangement
    sizes = f", and sizes that {arranged.tensor} divides" if arranged.tensor > 1 else ""
    return InfeasibleError(
        f"{plan.model.name} with {', '.join(arguments)} cannot be arranged as the plan is "
        f"({arrangement_words(arranged)}): {error.found}",
        fix=f"give it layers for {arranged.pipeline * arranged.stages_per_rank} stages{sizes}",
    )


def _splits(plan: Plan) -> set[str]:
    """Return what is split along what, equal layers told once."""
    axes = infer_axes(plan.graph)
    return {
        f"{one.op} of {line.name}{'.' * bool(one.module)}{one.module} along {one.axis}"
        for line in class_layouts(plan, axes, find_layers(plan.graph, axes))
        for one in line.splits
    }
