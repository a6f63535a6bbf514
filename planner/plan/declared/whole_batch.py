"""Keeps a batch whole whose rows meet: split, it would have another loss than on one device."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.findings.statistics import norm_of_rows
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import Constraints, Declared


def with_whole_batch(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints with dp=1 and one microbatch where rows meet and nobody says more.

    The tensor axis may split such a batch, for its ranks give each other what rows make of each
    other. The global batch must be known.
    """
    constraints = _with_whole_statistics(constraints, graph)
    if splits_batch(constraints):
        return constraints
    met = meeting_rows(graph)
    if met is None and graph.fixed_batch is None:
        return constraints
    if met is None:  # whether they meet cannot be seen where their number is a constant
        return replace(constraints, shares_rows=True)
    assert constraints.global_batch is not None
    whole = {"dp": ("data", 1), "microbatch": ("microbatch", constraints.global_batch)}
    own = tuple(
        Declared(
            place=f"pins.{name}",
            field=field,
            value=value,
            text=f"{name}={value}",
            origin=f"the rows of a batch meet in {met.name}",
        )
        for name, (field, value) in whole.items()
        if getattr(constraints, field) is None
    )
    return replace(
        constraints,
        data=1,
        microbatch=constraints.global_batch,
        shares_rows=True,
        declared=(*constraints.declared, *own),
    )


def _with_whole_statistics(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints with one microbatch where batch norms take statistics of the rows.

    Data ranks share theirs, but microbatches come one after the other: in several of them a model
    trains otherwise than on one device. Who pins a microbatch, or allows it by name, gets that.
    """
    norm = None if keeps_statistics_apart(constraints) else norm_of_rows(graph)
    if norm is None:
        return constraints
    own = Declared(
        place="choices.one_microbatch",
        field="one_microbatch",
        value=True,
        text="one microbatch on each data rank",
        origin=f"{norm.name} takes statistics of all rows; microbatch_statistics = true, or a pin "
        "of microbatch, allows more",
    )
    return replace(constraints, one_microbatch=True, declared=(*constraints.declared, own))


def keeps_statistics_apart(constraints: Constraints) -> bool:
    """Whether a person lets batch norms take the statistics of each microbatch by itself."""
    return constraints.statistics_apart or constraints.microbatch is not None


def splits_batch(constraints: Constraints) -> bool:
    """Whether a person says how the batch is split; one microbatch of all its rows is whole."""
    is_whole = constraints.microbatch in (None, constraints.global_batch)
    return not is_whole or constraints.data not in (None, 1)


def rows_at_once(constraints: Constraints) -> int | None:
    """Return the rows of a batch that nobody splits: a model that takes one number takes these.

    Whether its rows meet cannot be seen, so no number is given where the batch is split.
    """
    return None if splits_batch(constraints) else constraints.global_batch
