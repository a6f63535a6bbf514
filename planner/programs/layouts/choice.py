"""Chooses the layouts of all tensors on the tensor axis: the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autopar.planner.errors import InfeasibleError, TimeLimitError
from autopar.planner.graph.layouts import OpLayout, ParameterLayout
from autopar.planner.programs.layouts.building import (
    LayoutFrame,
    LayoutInput,
    frame_of,
    priced_problem,
)
from autopar.planner.programs.layouts.edges import crossing_tensors
from autopar.planner.programs.layouts.opened import printed_code
from autopar.planner.programs.layouts.problem import (
    Assignment,
    PrintedCode,
    Problem,
    printed_lines,
    totals,
)
from autopar.planner.programs.layouts.program import (
    LayoutModel,
    LayoutVariables,
    ProgramUnits,
)
from autopar.planner.programs.layouts.rules import Slots, check_rules
from autopar.planner.programs.solver import (
    Infeasible,
    SolverName,
    SolverReport,
    Unfinished,
    solve,
)

# The price of memory where time is minimised, and of time where memory is minimised: it decides
# between layouts that are equally fast, or equally small.
_TIE = 1e-6
MOST_NODES = 10_000  # of the solver's search, for one program; most need a few
# Points of the front count as the same if time and memory differ by less than this share.
_SAME = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How memory is counted: a rank's saved bytes and weight bytes, each times a factor.

    The factor of saved bytes stands for the microbatches in flight, that of weight bytes for the
    gradients and optimizer states. `bytes` are limits: for each, the front has the fastest layouts
    within it. Without limits, the front has up to `points` layouts, from the fastest to the
    smallest.
    """

    saved_factor: float = 1.0
    weight_factor: float = 1.0
    bytes: tuple[float, ...] | None = None
    points: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePrice:
    """The price of printed lines, and how time and memory count where lines have a price.

    A line costs so much that all lines of the best layouts without this price would cost `share` of
    a microbatch's time. Sums of gradients, once per step, cost 1 ÷ `microbatches` of their time.
    """

    share: float
    microbatches: int
    growth: float | None = None  # the most that bytes may grow, as a factor; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSolution:
    """A choice of layouts for a whole graph, and the cost of one microbatch.

    `layouts[c][i]` is for the op at position i of the first layer of class c, in that layer's axes
    (`own_layouts` returns those of other layers). `crossing` has the layout of each tensor that
    passes between layers; the layer that makes it converts it to this layout. `seconds` are forward
    and backward of all layers on one rank. `is_proved` is False if the solver stopped at its limit
    of nodes.
    """

    layouts: tuple[tuple[OpLayout, ...], ...]
    parameters: tuple[ParameterLayout, ...]
    crossing: tuple[ParameterLayout, ...]
    seconds: float
    saved_bytes: int
    weight_bytes: int
    report: SolverReport
    is_proved: bool

    @property
    def splits_nothing(self) -> bool:
        """Whether all ranks of the tensor axis would compute the same."""
        return not any(layout.axis for layouts in self.layouts for layout in layouts)


class LayoutProgram:
    """The layout program of a graph for one tensor degree; solved when results are asked for."""

    def __init__(
        self,
        asked: LayoutInput,
        budget: Budget,
        *,
        frame: LayoutFrame | None = None,
        most_nodes: int = MOST_NODES,
        solver: SolverName | None = None,
    ) -> None:
        check_rules(asked.rules, asked.graph, asked.axes, asked.layers)
        frame = frame or frame_of(asked)
        self._asked, self._slots = asked, frame.structure.slots
        self._problem = priced_problem(asked, frame)
        self._front = ParetoFront(
            self._problem,
            budget,
            frame.variables(self._problem),
            most_nodes=most_nodes,
            solver=solver,
        )
        self._counted: dict[tuple[int, bool], CountedLines] = {}

    def fastest(self) -> LayoutSolution:
        """Return the fastest layouts, regardless of memory."""
        return self._as_solution(self._front.fastest)

    def front(self) -> tuple[LayoutSolution, ...]:
        """Return the Pareto-optimal layouts, the fastest first."""
        return tuple(map(self._as_solution, self._front.points))

    def simpler(self, number: int, price: LinePrice, *, is_one_stage: bool) -> LayoutSolution:
        """Return layouts with fewer printed lines than point `number` of the front, if any.

        They are slower by less than the price of the lines that they save. Otherwise the result is
        the point itself.
        """
        near = self._front.points[number] if number else self._front.fastest
        lines = self._lines(price.microbatches, is_one_stage)
        return self._as_solution(self._front.simpler(near, lines, price))

    def _lines(self, microbatches: int, is_one_stage: bool) -> CountedLines:
        """Return the lines that a script prints, with one stage or with several."""
        key = microbatches, is_one_stage
        if key not in self._counted:
            asked, problem = self._asked, self._problem.in_steps_of(microbatches)
            self._counted[key] = CountedLines(
                problem,
                self._front.units,
                printed_code(asked.graph, asked.axes, asked.layers, problem, is_one_stage),
            )
        return self._counted[key]

    def _as_solution(self, point: SolvedPoint) -> LayoutSolution:
        return _solution(self._problem, point, self._asked, self._slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPoint:
    """A solved program: the choice, and its cost."""

    assignment: Assignment
    seconds: float
    saved_bytes: int
    weight_bytes: int
    counted_bytes: float
    report: SolverReport
    is_proved: bool


class CountedLines:
    """The printed lines of one problem, and the program in which they have a price."""

    def __init__(self, problem: Problem, units: ProgramUnits, code: PrintedCode) -> None:
        self.problem, self.code = problem, code
        self.model = LayoutModel(problem, units, LayoutVariables.of(problem), code)

    def of(self, assignment: Assignment) -> float:
        """Return the lines that an assignment prints."""
        return printed_lines(self.problem, self.code, assignment)


class ParetoFront:
    """Finds the Pareto front of a problem: solves it with several budgets, or prices of bytes."""

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        variables: LayoutVariables,
        *,
        most_nodes: int,
        solver: SolverName | None,
    ) -> None:
        self._problem, self._budget = problem, budget
        self._most_nodes, self._solver = most_nodes, solver
        self.units = _units(problem, budget)
        self.model = LayoutModel(problem, self.units, variables)

    @cached_property
    def fastest(self) -> SolvedPoint:
        """The fastest point; of equally fast ones the smallest."""
        return self._cheapest(second_price=1.0, byte_price=_TIE)

    @cached_property
    def points(self) -> tuple[SolvedPoint, ...]:
        """The front: the fastest first, without dominated and near-equal points.

        Without limits, the ends of the front are found first. Then bytes are priced by the slope of
        the line between two neighbours, which finds the point furthest below this line. Such a
        program has no budget constraint and is much easier; it only misses points above the line.
        """
        if self._budget.bytes is not None:
            found = [self._fastest(limit) for limit in self._budget.bytes]
            return _pareto([point for point in found if point is not None])
        front = [self.fastest]
        if self._budget.points > 1:
            front.append(self._cheapest(second_price=_TIE, byte_price=1.0))
        closed: set[tuple[float, float]] = set()
        while 1 < len(front) < self._budget.points:
            gap = _widest_gap([pair for pair in pairwise(front) if _ends(pair) not in closed])
            if gap is None:
                break
            closed.add(_ends(gap))
            point = self._between(*gap)
            if point is not None:
                front = sorted([*front, point], key=lambda p: (p.seconds, p.counted_bytes))
        return _pareto(front)

    def simpler(self, near: SolvedPoint, lines: CountedLines, price: LinePrice) -> SolvedPoint:
        """Return the best point if printed lines have a price; `near` if it is not simpler.

        All lines that `near` prints cost `price.share` of its seconds.
        """
        printed, cost = lines.of(near.assignment), totals(lines.problem, near.assignment)
        if not printed or cost is None:
            return near
        found = self._solved(
            lines.model,
            second_price=1.0,
            byte_price=_TIE,
            line_price=price.share * cost.seconds / printed / self.units.second_unit,
            budget_bytes=near.counted_bytes * price.growth if price.growth else None,
        )
        is_simpler = found is not None and lines.of(found.assignment) < printed
        return found if found is not None and is_simpler else near

    def _between(self, fast: SolvedPoint, small: SolvedPoint) -> SolvedPoint | None:
        """Return the point furthest below the line between two points, or None."""
        slope = (small.seconds - fast.seconds) / (fast.counted_bytes - small.counted_bytes)
        price = slope * self.units.byte_unit / self.units.second_unit
        point = self._cheapest(second_price=1.0, byte_price=price)
        is_new = all(
            abs(point.seconds - end.seconds) > _SAME * end.seconds
            or abs(point.counted_bytes - end.counted_bytes) > _SAME * end.counted_bytes
            for end in (fast, small)
        )
        return point if is_new else None

    def _fastest(self, budget_bytes: float) -> SolvedPoint | None:
        return self._solved(
            self.model, second_price=1.0, byte_price=_TIE, budget_bytes=budget_bytes
        )

    def _cheapest(self, *, second_price: float, byte_price: float) -> SolvedPoint:
        point = self._solved(self.model, second_price=second_price, byte_price=byte_price)
        if point is None:  # pins exclude the unsplit layouts
            raise InfeasibleError(
                "no layouts split everything that the rules require: some op's result would have a "
                "layout that cannot be converted to the one that the next op needs",
                fix="require fewer axes to be split, or name the modules that are meant",
            )
        return point

    def _solved(
        self,
        model: LayoutModel,
        *,
        second_price: float,
        byte_price: float,
        line_price: float = 0.0,
        budget_bytes: float | None = None,
    ) -> SolvedPoint | None:
        program = model.program(
            second_price=second_price,
            byte_price=byte_price,
            line_price=line_price,
            budget_bytes=budget_bytes,
        )
        outcome = solve(program, most_nodes=self._most_nodes, solver=self._solver)
        if isinstance(outcome, Infeasible):
            return None
        if isinstance(outcome, Unfinished) and outcome.objective is None:
            raise TimeLimitError(
                f"no layouts were found within {self._most_nodes:,} nodes of the integer program",
                fix="forbid some axes",
            )
        assignment = model.assignment()
        cost = totals(self._problem, assignment)
        assert cost is not None, "the program allows what its problem does not"
        units = self.units
        return SolvedPoint(
            assignment=assignment,
            seconds=cost.seconds,
            saved_bytes=cost.saved_bytes,
            weight_bytes=cost.weight_bytes,
            counted_bytes=units.saved_factor * cost.saved_bytes
            + units.weight_factor * cost.weight_bytes,
            report=outcome.report,
            is_proved=not isinstance(outcome, Unfinished),
        )


def _units(problem: Problem, budget: Budget) -> ProgramUnits:
    """Return units of seconds and bytes in which the program's numbers are near one."""
    seconds = [c.seconds for node in problem.nodes for c in node.choices if c.seconds > 0]
    sizes = [s for keep in problem.keeps for s in keep.saved_bytes.values() if s > 0]
    sizes += [s for source in problem.sources for s in source.weight_bytes if s > 0]
    return ProgramUnits(
        second_unit=sum(seconds) / len(seconds) if seconds else 1.0,
        byte_unit=sum(sizes) / len(sizes) if sizes else 1.0,
        saved_factor=budget.saved_factor,
        weight_factor=budget.weight_factor,
    )


def _widest_gap(
    pairs: Sequence[tuple[SolvedPoint, SolvedPoint]],
) -> tuple[SolvedPoint, SolvedPoint] | None:
    """Return the neighbours furthest apart in memory, or None if all are close."""
    far = [
        (fast, small)
        for fast, small in pairs
        if small.counted_bytes < (1 - _SAME) * fast.counted_bytes
        and fast.seconds < (1 - _SAME) * small.seconds
    ]
    return max(far, key=lambda pair: pair[0].counted_bytes / pair[1].counted_bytes, default=None)


def _ends(pair: tuple[SolvedPoint, SolvedPoint]) -> tuple[float, float]:
    return pair[0].seconds, pair[1].seconds


def _pareto(points: Sequence[SolvedPoint]) -> tuple[SolvedPoint, ...]:
    """Return points from the fastest on, each of them clearly smaller than all before it."""
    front: list[SolvedPoint] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.counted_bytes)):
        if not front or point.counted_bytes < (1 - _SAME) * front[-1].counted_bytes:
            front.append(point)
    return tuple(front)


def _solution(
    problem: Problem, point: SolvedPoint, asked: LayoutInput, slots: Slots
) -> LayoutSolution:
    classes: list[list[OpLayout]] = [[] for _ in asked.layers.classes]
    for node, choice in zip(problem.nodes, point.assignment.choices, strict=True):
        classes[node.layer_class].append(node.choices[choice].strategy)
    at_slot = {
        slots.tensors[source.tensor]: source.layouts[layout]
        for source, layout in zip(problem.sources, point.assignment.layouts, strict=True)
        if layout >= 0
    }
    graph = asked.graph
    weights = [*(p.name for p in graph.parameters), *(b.name for b in graph.buffers)]

    def own(names: Iterable[str]) -> tuple[ParameterLayout, ...]:
        found = ((name, at_slot.get(slots.tensors[name])) for name in names)
        return tuple(
            ParameterLayout(name=name, layout=slots.own(layout, name, asked.axes))
            for name, layout in found
            if layout is not None
        )

    return LayoutSolution(
        layouts=tuple(map(tuple, classes)),
        parameters=own(name for name in weights if name in asked.graph.tensors),
        crossing=own(sorted(crossing_tensors(asked.layers))),
        seconds=point.seconds,
        saved_bytes=point.saved_bytes,
        weight_bytes=point.weight_bytes,
        report=point.report,
        is_proved=point.is_proved,
    )
