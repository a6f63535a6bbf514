"""Lists the degrees that devices and constraints leave, and refuses constraints that leave none."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, log

from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.declared.conflict import conflict_text, minimal_conflict
from autopar.planner.plan.declared.constraints import CHOICES, Constraints, Declared, constraints_of
from autopar.planner.plan.search.space import divisors

Degrees = tuple[int, int, int]  # pipeline, data, tensor
_MOST_TOLD = 6


def legal_degrees(
    devices: int, constraints: Constraints, *, fixed_batch: int | None = None
) -> tuple[Degrees, ...]:
    """Return the degrees whose product is the number of devices, and which the constraints allow.

    `fixed_batch` is the only microbatch of a model that fixes its batch.
    """
    triples = (
        (pipeline, devices // pipeline // tensor, tensor)
        for pipeline in divisors(devices)
        for tensor in divisors(devices // pipeline)
    )
    return tuple(
        degrees
        for degrees in triples
        if _is_allowed(degrees, constraints)
        and _takes_batch(degrees, constraints, fixed_batch=fixed_batch)
    )


def _is_allowed(degrees: Degrees, constraints: Constraints) -> bool:
    pins = (constraints.pipeline, constraints.data, constraints.tensor)
    most = (constraints.max_pipeline, constraints.max_data, constraints.max_tensor)
    return (
        all(pin in (None, degree) for pin, degree in zip(pins, degrees, strict=True))
        and all(top is None or degree <= top for top, degree in zip(most, degrees, strict=True))
        and (constraints.shard is None or degrees[1] % constraints.shard == 0)
    )


def _takes_batch(degrees: Degrees, constraints: Constraints, *, fixed_batch: int | None) -> bool:
    batch = constraints.global_batch
    return batch is None or batch % _rows(degrees, constraints, fixed_batch=fixed_batch) == 0


def _rows(degrees: Degrees, constraints: Constraints, *, fixed_batch: int | None) -> int:
    """Return the rows that the global batch must be a multiple of."""
    return degrees[1] * lcm(constraints.microbatch or 1, fixed_batch or 1)


def check_degrees(
    devices: int,
    constraints: Constraints,
    *,
    fixed_batch: int | None = None,
    fixed_at: str = "",
) -> tuple[Degrees, ...]:
    """Return the legal degrees; where there are none, raise an error that names what conflicts.

    `fixed_at` is where a model fixes its batch.
    """

    def is_feasible(declared: Sequence[Declared]) -> bool:
        return leave_degrees(declared, devices, fixed_batch=fixed_batch)

    if is_feasible(constraints.declared):
        return legal_degrees(devices, constraints, fixed_batch=fixed_batch)
    conflict = minimal_conflict(constraints.declared, is_feasible)
    why = "" if fixed_batch is None else _why(fixed_batch, fixed_at)
    raise _contradiction(devices, constraints, conflict, fixed_batch=fixed_batch, why=why)


def leave_degrees(
    declared: Sequence[Declared], devices: int, *, fixed_batch: int | None = None
) -> bool:
    """Whether some declarations together leave degrees, a microbatch and every other choice."""
    chosen = constraints_of(declared)
    has_microbatch = fixed_batch is None or chosen.microbatch in (None, fixed_batch)
    has_choices = bool(chosen.schedules and chosen.zero_levels)
    legal = legal_degrees(devices, chosen, fixed_batch=fixed_batch)
    return has_microbatch and has_choices and bool(legal)


def _contradiction(
    devices: int,
    constraints: Constraints,
    conflict: tuple[Declared, ...],
    *,
    fixed_batch: int | None,
    why: str,
) -> InfeasibleError:
    fields = {one.field for one in conflict}
    found = f"on {devices} devices no plan satisfies {conflict_text(conflict)}"
    if fields <= CHOICES:
        return InfeasibleError(found, fix="no choice is left: allow one that both have")
    if fields == {"microbatch"}:
        fix = f"pin microbatch={fixed_batch}, or leave it open"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields and fixed_batch == constraints.global_batch:
        fix = "allow pipeline or tensor ranks: a batch that stays whole has no data ranks"
        return InfeasibleError(f"{found}{why}", fix=fix)
    if "global_batch" in fields:
        near = _nearest_batches(devices, conflict, fixed_batch=fixed_batch)
        fix = f"the nearest global batch that fits is {near}"
        return InfeasibleError(f"{found}{why}", fix=fix)
    rest = constraints_of(one for one in constraints.declared if one not in conflict)
    legal = legal_degrees(devices, rest) or legal_degrees(devices, Constraints())
    wanted = (constraints.pipeline, constraints.data, constraints.tensor)
    return InfeasibleError(found, expected=f"legal are {_told(nearest_degrees(legal, wanted))}")


def _why(fixed_batch: int, fixed_at: str) -> str:
    place = f" at {fixed_at}" if fixed_at else ""
    return (
        f": the model fixes its batch to {fixed_batch}, the rows that it was traced with, because "
        f"its forward takes their number for a constant{place} (a loop over the rows, "
        "a root of their number, tolist())"
    )


def _told(legal: Sequence[Degrees]) -> str:
    more = f"; and {len(legal) - _MOST_TOLD} more" if len(legal) > _MOST_TOLD else ""
    return "; ".join(map(degrees_text, legal[:_MOST_TOLD])) + more


def _nearest_batches(devices: int, conflict: Sequence[Declared], *, fixed_batch: int | None) -> str:
    """Return the batches next to the wanted one that the rest of a minimal conflict allows."""
    wanted = constraints_of(conflict).global_batch
    assert wanted is not None
    others = constraints_of(one for one in conflict if one.field != "global_batch")
    legal = legal_degrees(devices, others, fixed_batch=fixed_batch)
    units = {_rows(degrees, others, fixed_batch=fixed_batch) for degrees in legal}
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
