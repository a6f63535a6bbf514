"""The integer program of the layouts, in PuLP.

    x[v,c] ∈ {0,1}     op v runs as its choice c
    u[e,l] ∈ {0,1}     slot e (a parameter, or a tensor that passes between layers) has layout l
    z[d,i,k,l] ≥ 0     consumer i of demand d (the use of a tensor by the ops of one layer) needs
                       layout l of the tensor, which is made in layout k
    w[d,k,l] ≥ 0       demand d converts the tensor from layout k to layout l
    h[g,f] ≥ 0         tensor g, kept for the backward, is in memory in form f (whole, or a shard)
    o[k] ∈ {0,1}       Python class k of the model is opened: the script prints its forward

    Families of constraints, each a function below:
    one choice         Σ_c x[v,c] = 1,  Σ_l u[e,l] = 1
    conversions        Σ_k z[d,i,k,l] = Σ_(c needs l) x[v,c] of the consumer v,
                       Σ_l z[d,i,k,l] = p[e,k],  z[d,i,k,l] ≤ w[d,k,l]
                       where p[e,k] is 1 if source e is in layout k: Σ_(c gives k) x[v,c] of the
                       op v that makes e, or u[e,k] if e is a slot;
                       if the tensor leaves the layer, its slot counts as a consumer that needs
                       the slot's layout; a single consumer's z is w
    holding            h[g,f] ≥ Σ_(c in form f) x[v,c] for each holder v
    alike              Σ_(c in a group) x[v,c] = Σ_(c in the matching group) x[v',c]
                       for two nodes at the same position of similar layers: both take a choice
                       of their group, or neither does
    changed code       Σ_(c changes code) x[v,c] ≤ Σ_(k has that code) o[k]
    converting code    Σ_(k ≠ l) z[d,i,k,l] ≤ Σ_(k may convert e for i) o[k]
                       (changed and converting code: only if printed lines have a price)
    budget             saved and weight bytes ≤ budget

    minimise  Σ x·compute + Σ w·conversion + Σ u·gradient sums (+ a price per byte, for ties)
              (+ a price per printed line: of opened classes, conversions, parameters not whole)

A conversion is paid once per tensor, layer and layout, however many consumers share it. The z make
the relaxation nearly always integral: a program with w alone took four times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pulp

from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.programs.layouts.problem import Assignment, Demand, PrintedCode, Problem
from autopar.planner.programs.solver import chosen, new_program

Sum: TypeAlias = Any  # pulp.LpAffineExpression, which has no types
_Term = tuple[pulp.LpVariable, float]
_Conversions = dict[tuple[Layout, Layout], pulp.LpVariable]  # by the layouts before and after


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramUnits:
    """The units of seconds and bytes in the program, and the factors of saved and weight bytes.

    The objective is second_price · seconds / second_unit + byte_price · bytes / byte_unit +
    line_price · lines, where bytes = saved_factor · saved + weight_factor · weights.
    """

    second_unit: float
    byte_unit: float
    saved_factor: float
    weight_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutVariables:
    """The variables and constraints of problems that differ in their prices alone."""

    problem: Problem  # one of these problems
    program: pulp.LpProblem = field(default_factory=lambda: new_program("layouts"))
    x: list[list[pulp.LpVariable]] = field(default_factory=list)
    u: list[list[pulp.LpVariable]] = field(default_factory=list)
    w: list[_Conversions] = field(default_factory=list)
    z: list[list[_Conversions]] = field(default_factory=list)
    h: list[dict[str, pulp.LpVariable]] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem) -> LayoutVariables:
        """Return the variables and constraints of a problem."""
        model = cls(problem=problem)
        _make_choices(model)
        _require_one_choice(model)
        _require_conversions(model)
        _require_holding(model)
        _require_alike(model)
        return model

    def require(self, constraint: pulp.LpConstraint, name: str) -> None:
        """Add a constraint."""
        self.program.addConstraint(constraint, name)


class LayoutModel:
    """The program of one problem; it is solved with several budgets and prices.

    Printed lines count only if `code` is given; then no other model may use the variables.
    """

    def __init__(
        self,
        problem: Problem,
        units: ProgramUnits,
        variables: LayoutVariables,
        code: PrintedCode | None = None,
    ) -> None:
        self._problem, self._units, self._model = problem, units, variables
        lines: list[_Term] = []
        if code is not None:
            opened = [_binary(variables.program, f"o_{k}") for k in range(len(code.lines))]
            _require_changed_code(self._model, code, opened)
            _require_converting_code(self._model, code, opened)
            lines = list(_lines(self._model, code, opened))
        self._seconds = _sum(_seconds(self._model, problem, units))
        self._bytes = _sum(_bytes(self._model, problem, units))
        self._lines = _sum(lines)

    def program(
        self,
        *,
        second_price: float,
        byte_price: float,
        line_price: float = 0.0,
        budget_bytes: float | None = None,
    ) -> pulp.LpProblem:
        """Return the program with these prices in its objective, and under this budget."""
        program = self._model.program
        paid = second_price * self._seconds + byte_price * self._bytes + line_price * self._lines
        program.setObjective(paid)
        program.constraints.pop("budget", None)
        if budget_bytes is not None:
            _require_budget(self._model, self._bytes, budget_bytes / self._units.byte_unit)
        return program

    def assignment(self) -> Assignment:
        """Return the choices of the solved program."""
        return Assignment(
            choices=tuple(chosen(own)[0] for own in self._model.x),
            layouts=tuple(chosen(own)[0] if own else -1 for own in self._model.u),
        )


def _make_choices(model: LayoutVariables) -> None:
    """Make x and u."""
    for v, node in enumerate(model.problem.nodes):
        model.x.append([_binary(model.program, f"x_{v}_{c}") for c in range(len(node.choices))])
    for e, source in enumerate(model.problem.sources):
        model.u.append([_binary(model.program, f"u_{e}_{i}") for i in range(len(source.layouts))])


def _seconds(model: LayoutVariables, problem: Problem, units: ProgramUnits) -> Iterator[_Term]:
    """Yield what variables add to the seconds of a microbatch."""
    unit = units.second_unit
    for node, choices in zip(problem.nodes, model.x, strict=True):
        for variable, choice in zip(choices, node.choices, strict=True):
            yield variable, node.count * (choice.seconds / unit)
    for demand, made in zip(problem.demands, model.w, strict=True):
        for ends, variable in made.items():
            yield variable, demand.count * (demand.seconds[ends] / unit)
    for source, own in zip(problem.sources, model.u, strict=True):
        yield from zip(own, (seconds / unit for seconds in source.seconds), strict=True)


def _bytes(model: LayoutVariables, problem: Problem, units: ProgramUnits) -> Iterator[_Term]:
    """Yield what variables add to the bytes in memory."""
    saved, unit = units.saved_factor, units.byte_unit
    for node, own in zip(problem.nodes, model.x, strict=True):
        for variable, choice in zip(own, node.choices, strict=True):
            yield variable, node.count * saved * choice.saved_bytes / unit
    for source, own in zip(problem.sources, model.u, strict=True):
        for variable, size in zip(own, source.weight_bytes, strict=True):
            yield variable, units.weight_factor * size / unit
    for keep, held in zip(problem.keeps, model.h, strict=True):
        for form, variable in held.items():
            yield variable, keep.count * saved * keep.saved_bytes[form] / unit


def _require_one_choice(model: LayoutVariables) -> None:
    """Σ_c x[v,c] = 1,  Σ_l u[e,l] = 1."""
    for v, own in enumerate(model.x):
        model.require(pulp.lpSum(own) == 1, f"one_choice_{v}")
    for e, own in enumerate(model.u):
        if own:
            model.require(pulp.lpSum(own) == 1, f"one_layout_{e}")


def _require_conversions(model: LayoutVariables) -> None:
    """Σ_k z[d,i,k,l] = Σ_(c needs l) x[v,c],  Σ_l z[d,i,k,l] = p[e,k],  z[d,i,k,l] ≤ w[d,k,l]."""
    for d, demand in enumerate(model.problem.demands):
        produced, needed = _produced_by(model, demand.source), _needed(model, demand)
        wanted = list(dict.fromkeys(layout for own in needed for layout in own))
        made = _conversions(model, f"w_{d}", demand, (produced, wanted))
        flows = [made]
        if len(needed) > 1:
            flows = [
                _conversions(model, f"z_{d}_{i}", demand, (produced, own))
                for i, own in enumerate(needed)
            ]
        model.w.append(made)
        model.z.append(flows)
        for i, (flow, own) in enumerate(zip(flows, needed, strict=True)):
            taken = _grouped([start for start, _ in flow], flow.values())
            got = _grouped([end for _, end in flow], flow.values())
            for j, (layout, need) in enumerate(own.items()):
                model.require(got.get(layout, _ones(())) == need, f"need_{d}_{i}_{j}")
            for k, (layout, given) in enumerate(produced.items()):
                model.require(taken.get(layout, _ones(())) == given, f"source_{d}_{i}_{k}")
            for n, (ends, z) in enumerate(flow.items() if flow is not made else ()):
                model.require(z <= made[ends], f"shared_{d}_{i}_{n}")


def _conversions(
    model: LayoutVariables, name: str, demand: Demand, layouts: Sequence[Iterable[Layout]]
) -> _Conversions:
    produced, needed = layouts
    return {
        (start, end): model.program.add_variable(f"{name}_{i}_{j}", 0, 1)
        for i, start in enumerate(produced)
        for j, end in enumerate(needed)
        if (start, end) in demand.seconds
    }


def _require_holding(model: LayoutVariables) -> None:
    """h[g,f] ≥ Σ_(c in form f) x[v,c] for each holder v."""
    for g, keep in enumerate(model.problem.keeps):
        numbered = enumerate(keep.saved_bytes)
        model.h.append(
            {form: model.program.add_variable(f"h_{g}_{f}", 0, 1) for f, form in numbered}
        )
        for f, (form, held) in enumerate(model.h[-1].items()):
            for i, (node, forms) in enumerate(zip(keep.holders, keep.forms, strict=True)):
                own = [
                    x for x, own_form in zip(model.x[node], forms, strict=True) if own_form == form
                ]
                if own:
                    model.require(held >= pulp.lpSum(own), f"holding_{g}_{f}_{i}")


def _require_alike(model: LayoutVariables) -> None:
    """Σ_(c in a group) x[v,c] = Σ_(c in the matching group) x[v',c]."""
    for number, alike in enumerate(model.problem.alike):
        (i, mine), (j, theirs) = alike.first, alike.second
        first = pulp.lpSum(model.x[i][c] for c in mine)
        second = pulp.lpSum(model.x[j][c] for c in theirs)
        model.require(first == second, f"alike_{number}")


def _lines(
    model: LayoutVariables, code: PrintedCode, opened: list[pulp.LpVariable]
) -> Iterator[_Term]:
    """Yield what variables add to the printed lines."""
    yield from zip(opened, code.lines, strict=True)
    for one in code.changed:
        yield from ((model.x[one.node][choice], one.lines) for choice in one.choices)
    for d, made in enumerate(model.w):
        yield from ((w, code.conversion_lines(d, *ends)) for ends, w in made.items())
    for source, own, lines in zip(model.problem.sources, model.u, code.slot_lines, strict=True):
        pairs = zip(source.layouts, own, strict=bool(own))
        yield from ((variable, lines) for layout, variable in pairs if layout != WHOLE)


def _require_changed_code(
    model: LayoutVariables, code: PrintedCode, opened: list[pulp.LpVariable]
) -> None:
    """Σ_(c changes code) x[v,c] ≤ Σ_(k has that code) o[k]."""
    for number, one in enumerate(code.changed):
        changing = pulp.lpSum(model.x[one.node][choice] for choice in one.choices)
        has = pulp.lpSum(opened[k] for k in one.classes)
        model.require(changing <= has, f"changed_{number}")


def _require_converting_code(
    model: LayoutVariables, code: PrintedCode, opened: list[pulp.LpVariable]
) -> None:
    """Σ_(k ≠ l) z[d,i,k,l] ≤ Σ_(k may convert e for i) o[k]."""
    for number, one in enumerate(code.converting):
        flow = model.z[one.demand][one.consumer]
        converted = pulp.lpSum(z for (start, end), z in flow.items() if start != end)
        has = pulp.lpSum(opened[k] for k in one.classes)
        model.require(converted <= has, f"converting_{number}")


def _require_budget(model: LayoutVariables, size: Sum, budget: float) -> None:
    """Saved and weight bytes ≤ budget."""
    model.require(size <= budget, "budget")


def _produced_by(model: LayoutVariables, e: int) -> dict[Layout, Sum]:
    """Return p[e,l] for each layout l: a sum that is 1 if source e is in this layout, else 0."""
    source = model.problem.sources[e]
    if source.producer is None:
        return _grouped(list(source.layouts), model.u[e])
    node, place = source.producer
    choices = model.problem.nodes[node].choices
    return _grouped([choice.gives[place] for choice in choices], model.x[node])


def _needed(model: LayoutVariables, demand: Demand) -> list[dict[Layout, Sum]]:
    """Return, for each consumer and layout, a sum that is 1 if the consumer needs this layout.

    Without consumers, the tensor is the loss, which has to be whole.
    """
    nodes = model.problem.nodes
    found = [
        _grouped([choice.needs[place] for choice in nodes[node].choices], model.x[node])
        for node, place in demand.consumers
    ]
    if demand.crosses >= 0:
        found.append(_produced_by(model, demand.crosses))
    return found or [{WHOLE: pulp.LpAffineExpression(constant=1)}]


def _grouped(layouts: Iterable[Layout], variables: Iterable[pulp.LpVariable]) -> dict[Layout, Sum]:
    groups: dict[Layout, list[pulp.LpVariable]] = defaultdict(list)
    for layout, variable in zip(layouts, variables, strict=True):
        groups[layout].append(variable)
    return {layout: _ones(own) for layout, own in groups.items()}


def _ones(variables: Iterable[pulp.LpVariable]) -> Sum:
    """Return the sum of distinct variables, as pulp.lpSum does, which takes longer."""
    return pulp.LpAffineExpression(dict.fromkeys(variables, 1))


def _binary(program: pulp.LpProblem, name: str) -> pulp.LpVariable:
    return program.add_variable(name, cat=pulp.LpBinary)


def _sum(terms: Iterable[_Term]) -> Sum:
    return pulp.LpAffineExpression([(variable, factor) for variable, factor in terms if factor])
