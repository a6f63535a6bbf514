"""Lists the degrees that devices and constraints leave, and refuses constraints that leave none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, log

from autopar.planner.errors import InfeasibleError
from autopar.planner.findings.uneven_rows import may_be_uneven
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.conflict import conflict_text, minimal_conflict
from autopar.planner.plan.declared.constraints import CHOICES, Constraints, Declared, constraints_of
from autopar.planner.plan.search.space import divisors, uneven_microbatches_of

Degrees = tuple[int, int, int]  # pipeline, data, tensor
_MOST_TOLD = 6
ROWS = "batch"  # the axis of the rows, as people call it


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What a model says of its batch.

    `fixed` is the only number of rows of a microbatch that it takes, `fixed_at` the line that fixes
    it. Data ranks of one that `may_be_uneven` need not have as many rows each.
    """

    fixed: int | None = None
    fixed_at: str = ""
    may_be_uneven: bool = False

    @classmethod
    def of(cls, graph: Graph) -> BatchFacts:
        """Return those of a traced model."""
        return cls(
            fixed=graph.fixed_batch,
            fixed_at=graph.fixed_at,
            may_be_uneven=may_be_uneven(graph),
        )


NOTHING_SAID = BatchFacts()


def legal_degrees(
    devices: int, constraints: Constraints, batch: BatchFacts = NOTHING_SAID
) -> tuple[Degrees, ...]:
    """Return degrees whose product is the number of devices, and which the constraints allow."""
    triples = (
        (pipeline, devices // pipeline // tensor, tensor)
        for pipeline in divisors(devices)
        for tensor in divisors(devices // pipeline)
    )
    return tuple(
        degrees
        for degrees in triples
        if _is_allowed(degrees, constraints) and _takes_batch(degrees, constraints, batch)
    )


def _is_allowed(degrees: Degrees, constraints: Constraints) -> bool:
    pins = (constraints.pipeline, constraints.data, constraints.tensor)
    most = (constraints.max_pipeline, constraints.max_data, constraints.max_tensor)
    return (
        all(pin in (None, degree) for pin, degree in zip(pins, degrees, strict=True))
        and all(top is None or degree <= top for top, degree in zip(most, degrees, strict=True))
        and (constraints.shard is None or degrees[1] % constraints.shard == 0)
    )


def _takes_batch(degrees: Degrees, constraints: Constraints, batch: BatchFacts) -> bool:
    rows, pinned = constraints.global_batch, constraints.microbatch
    if rows is None or rows % _rows(degrees, constraints, batch) == 0:
        return True
    uneven = (
        uneven_microbatches_of(rows, degrees[1]) if may_share_unevenly(constraints, batch) else ()
    )
    return any(pinned in (None, max(each)) for each, _ in uneven)


def may_share_unevenly(constraints: Constraints, batch: BatchFacts) -> bool:
    """Whether data ranks may have unlike numbers of rows: code of split rows is for one number."""
    splits_rows = constraints.shares_rows or any(
        rule.axis == ROWS and rule.is_required for rule in constraints.splits
    )
    return batch.may_be_uneven and batch.fixed is None and not splits_rows


def _rows(degrees: Degrees, constraints: Constraints, batch: BatchFacts) -> int:
    """Return the rows that a global batch has to be a multiple of to be shared out evenly."""
    return degrees[1] * lcm(constraints.microbatch or 1, batch.fixed or 1)


def check_degrees(
    devices: int, constraints: Constraints, batch: BatchFacts = NOTHING_SAID
) -> tuple[Degrees, ...]:
    """Return the legal degrees; where there are none, raise an error that names what conflicts."""

    def is_feasible(declared: Sequence[Declared]) -> bool:
        return leave_degrees(declared, devices, batch)

    if is_feasible(constraints.declared):
        return legal_degrees(devices, constraints, batch)
    conflict = minimal_conflict(constraints.declared, is_feasible)
    raise _contradiction(devices, constraints, conflict, batch)


def leave_degrees(
    declared: Sequence[Declared], devices: int, batch: BatchFacts = NOTHING_SAID
) -> bool:
    """Whether some declarations together leave degrees, a microbatch and every other choice."""
    chosen = constraints_of(declared)
    has_microbatch = batch.fixed is None or chosen.microbatch in (None, batch.fixed)
    has_choices = bool(chosen.schedules and chosen.zero_levels)
    legal = legal_degrees(devices, chosen, batch)
    return has_microbatch and has_choices and bool(legal)


def _contradiction(
    devices: int,
    constraints: Constraints,
    conflict: tuple[Declared, ...],
    batch: BatchFacts,
) -> InfeasibleError:
    fields, why = {one.field for one in conflict}, _why(batch)
    found = f"on {devices} devices no plan satisfies {conflict_text(conflict)}"
    if fields <= CHOICES:
        return InfeasibleError(found, fix="no choice is left: allow one that both have")
    if fields == {"microbatch"}:
        fix = f"pin microbatch={batch.fixed}, or leave it open"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields and batch.fixed == constraints.global_batch:
        fix = "allow pipeline or tensor ranks: a batch that stays whole has no data ranks"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields:
        near = _nearest_batches(devices, conflict, batch)
        fix = f"the nearest global batch that fits is {near}"
        return InfeasibleError(f"{found}{why}", fix=fix)
    rest = constraints_of(one for one in constraints.declared if one not in conflict)
    legal = legal_degrees(devices, rest) or legal_degrees(devices, Constraints())
    wanted = (constraints.pipeline, constraints.data, constraints.tensor)
    return InfeasibleError(found, expected=f"legal are {_told(nearest_degrees(legal, wanted))}")


def _why(batch: BatchFacts) -> str:
    if batch.fixed is None:
        return ""
    place = f" at {batch.fixed_at}" if batch.fixed_at else ""
    return (
        f": the model fixes its batch to {batch.fixed}, the rows that it was traced with, because "
        f"its forward takes their number for a constant{place} (a loop over the rows, "
        "a root of their number, tolist())"
    )


def _told(legal: Sequence[Degrees]) -> str:
    more = f"; and {len(legal) - _MOST_TOLD} more" if len(legal) > _MOST_TOLD else ""
    return "; ".join(map(degrees_text, legal[:_MOST_TOLD])) + more


def _nearest_batches(devices: int, conflict: Sequence[Declared], batch: BatchFacts) -> str:
    """Return the batches next to the wanted one that the rest of a minimal conflict allows."""
    wanted = constraints_of(conflict).global_batch
    assert wanted is not None
    others = constraints_of(one for one in conflict if one.field != "global_batch")
    legal = legal_degrees(devices, others, batch)
    units = {_rows(degrees, others, batch) for degrees in legal}
    below = max(wanted // unit * unit for unit in units)
    above = min(-(-wanted // unit) * unit for unit in units)
    return f"{below} or {above}" if below else str(above)


def nearest_degrees(
    legal: Sequence[Degrees], wanted: tuple[int | None, ...]
) -> tuple[Degrees, ...]:
    """Return legal degrees, those first that keep the most of what was wanted."""

    def distance(degrees: Degrees) -> tuple[int, float]:
        pairs = [(have, want) for have, want in zip(degrees, wanted, strict=True) if want]
        changed = sum(have != want for have, want in pairs)
        return changed, sum(abs(log(have / want)) for have, want in pairs)

    return tuple(sorted(legal, key=distance))


def degrees_text(degrees: Degrees) -> str:
    """Return degrees as --pin takes them: "pp=1,dp=2,tp=4"."""
    return f"pp={degrees[0]},dp={degrees[1]},tp={degrees[2]}"
