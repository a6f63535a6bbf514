"""Tells what becomes of a loss whose batch is split among ranks or into microbatches."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.findings.counting import counted_by
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.findings.statistics import norm_of_rows
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.declared.whole_batch import keeps_statistics_apart, splits_batch
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.meaning import (
    is_nearly,
    named,
    nearly_a_mean,
    parts_apart,
    rows_meet,
    statistics_apart,
)

_FIXES = {  # by how many things a mean counts: 0 of a term, 1 of a mask or targets, 2 of weights
    0: "",
    1: "let the batch tell what counts, or ",
    2: "give it the weights of the classes as numbers (torch.tensor([…])), or ",
}


def note_rows(graph: Graph, constraints: Constraints) -> None:
    """Say before a plan is searched what is known of its rows."""
    if graph.fixed_batch is not None:
        place = f" at {graph.fixed_at} or in what is called there" if graph.fixed_at else ""
        tell_note(
            f"the model takes its number of rows for a constant{place}, so it was traced for "
            f"{graph.fixed_batch} rows, and every microbatch has so many. Whether rows meet "
            "cannot be seen."
        )
    _note_expected(graph)
    met = meeting_rows(graph)
    if met is None:
        _note_statistics(graph, constraints)
    nearly = nearly_a_mean(graph) if met is None else None
    if nearly is not None:
        tell_note(
            f"{is_nearly(nearly)}: a batch that is split takes the mean of what its parts have "
            f"there, each by itself. For the loss of one process, "
            f"{_FIXES[len(counted_by(nearly, graph))]}pin dp=1 and a microbatch of all rows."
        )
    if met is not None and splits_batch(constraints):
        tell_note(
            f"{rows_meet(met)}: by the pins each microbatch of each data rank compares its own "
            "rows only. For the loss of one process, pin neither: tensor ranks may share the rows."
        )
    elif met is not None:
        tell_note(
            f"{rows_meet(met)}, so the batch stays whole, in one microbatch of one data rank. "
            "Tensor ranks may share its rows: they tell each other what all rows need. To compare "
            "the rows of each part only, pin dp or microbatch."
        )


def _note_expected(graph: Graph) -> None:
    """Say with how many rows experts are priced, of which no plan knows who gets how many."""
    parted = {one.counted_by: one.expected for one in graph.tensors.values() if one.expected != 1.0}
    if not parted:
        return
    shares = sorted({f"{share:.1%}" for share in parted.values()})
    where = next(op.location for op in graph.ops if parted.keys() & set(op.outputs))
    tell_note(
        f"{len(parted)} masks part rows among experts (the first at {where}): each expert is "
        f"priced with its even share of them, {' or '.join(shares)}. Where one gets more, its "
        "layer takes longer and holds more than predicted."
    )


def _note_statistics(graph: Graph, constraints: Constraints) -> None:
    """Say why a model with batch norms has one microbatch; of a pinned one its plan tells."""
    norm = None if keeps_statistics_apart(constraints) else norm_of_rows(graph)
    if norm is None:
        return
    tell_note(
        f"{named(norm)} takes statistics of all rows, so each data rank has one microbatch of all "
        "of its rows, and shares their statistics with the others. For several microbatches, each "
        "by its own statistics: microbatch_statistics = true in [choices] of a constraints file, "
        "or pin microbatch."
    )


def note_parts_apart(plan: Plan) -> None:
    """Say of a script that trains otherwise than one process if the loss of parts is the reason."""
    for why in (parts_apart(plan), statistics_apart(plan)):
        if why:
            tell_note(why)
