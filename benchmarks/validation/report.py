"""Turns outcomes into scores: in total, per table, and the ranking of layouts within groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.validation.outcome import Outcome, Skipped
from benchmarks.validation.scoring import Score, kendall_tau, score

SMALLEST_GROUP = 5  # layouts; τ of fewer says little: one swapped pair of four is 0.67


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs of one model on the same devices, and how well their order is predicted."""

    name: str
    count: int
    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The scores of one table, or of all of them."""

    name: str
    predicted: int
    skipped: int
    time: Score | None
    memory: Score | None
    groups: tuple[Group, ...]

    @property
    def least_tau(self) -> float | None:
        """Kendall's τ of the worst group."""
        return min((group.tau for group in self.groups), default=None)

    @property
    def median_tau(self) -> float | None:
        """The median of Kendall's τ over the groups."""
        return median(group.tau for group in self.groups) if self.groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why rows of a table were skipped, and how many."""

    table: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All scores."""

    total: Section
    sections: tuple[Section, ...]
    reasons: tuple[Reason, ...]
    groups: tuple[Group, ...]


def report_of(outcomes: Sequence[Outcome], skipped: Sequence[Skipped]) -> Report:
    """Return the scores of some predictions."""
    tables = dict.fromkeys(
        [*(one.row.table for one in outcomes), *(one.row.table for one in skipped)]
    )
    sections = tuple(
        _section(
            table,
            [one for one in outcomes if one.row.table == table],
            sum(one.row.table == table for one in skipped),
        )
        for table in sorted(tables)
    )
    reasons = Counter((one.row.table, one.reason) for one in skipped)
    total = _section("all tables", outcomes, len(skipped))
    return Report(
        total=total,
        sections=sections,
        reasons=tuple(
            Reason(table=table, reason=reason, count=count)
            for (table, reason), count in sorted(reasons.items())
        ),
        groups=total.groups,
    )


def _section(name: str, outcomes: Sequence[Outcome], skipped: int) -> Section:
    remembered = [one for one in outcomes if one.measured_bytes]
    return Section(
        name=name,
        predicted=len(outcomes),
        skipped=skipped,
        time=score(
            [one.predicted_seconds for one in outcomes], [one.measured_seconds for one in outcomes]
        )
        if outcomes
        else None,
        memory=score(
            [float(one.predicted_bytes) for one in remembered],
            [one.measured_bytes or 0.0 for one in remembered],
        )
        if remembered
        else None,
        groups=_groups(outcomes),
    )


def _groups(outcomes: Sequence[Outcome]) -> tuple[Group, ...]:
    members: dict[Hashable, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        members[_model_and_devices(one)].append(one)
    return tuple(
        Group(
            name=_name(group[0]),
            count=len(group),
            tau=kendall_tau(
                [one.predicted_seconds for one in group], [one.measured_seconds for one in group]
            ),
        )
        for group in members.values()
        if len(group) >= SMALLEST_GROUP
    )


def _model_and_devices(outcome: Outcome) -> Hashable:
    row = outcome.row
    shape = (row.layers, row.hidden, row.heads, row.seq_len)
    return row.table, row.model_name, shape, row.gpu, row.gpus, row.dtype


def _name(outcome: Outcome) -> str:
    row = outcome.row
    return f"{row.table}: {row.model_name} on {row.gpus} {row.gpu}"
