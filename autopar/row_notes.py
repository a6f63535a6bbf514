"""Tells what becomes of a loss whose batch is split among ranks or into microbatches."""

from __future__ import annotations

from autopar.console import tell_note
from autopar.planner.findings.counting import counted_by
from autopar.planner.findings.loss_of_parts import Follows, loss_of_parts
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.graph import Graph, Op
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.declared.whole_batch import splits_batch
from autopar.planner.plan.plan import Plan

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
    nearly = _nearly(graph) if met is None else None
    if nearly is not None:
        tell_note(
            f"{_is_nearly(nearly)}: a batch that is split takes the mean of what its parts have "
            f"there, each by itself. For the loss of one process, "
            f"{_FIXES[len(counted_by(nearly, graph))]}pin dp=1 and a microbatch of all rows."
        )
    if met is not None and splits_batch(constraints):
        tell_note(
            f"{_meet(met)}: by the pins each microbatch of each data rank compares its own rows "
            "only. For the loss of one process, pin neither: tensor ranks may share the rows."
        )
    elif met is not None:
        tell_note(
            f"{_meet(met)}, so the batch stays whole, in one microbatch of one data rank. Tensor "
            "ranks may share its rows: they tell each other what all rows need. To compare the "
            "rows of each part only, pin dp or microbatch."
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


def note_parts_apart(plan: Plan) -> None:
    """Say of a script that trains otherwise than one process if the loss of parts is the reason."""
    if plan.arrangement.data == plan.arrangement.microbatches == 1:
        return
    met = meeting_rows(plan.graph)
    nearly = _nearly(plan.graph)
    why = _meet(met) if met is not None else _is_nearly(nearly) if nearly is not None else ""
    if why:
        tell_note(f"{why}, so a batch that is split, as in this plan, has a loss of its own.")


def _meet(met: Op) -> str:
    return f"the rows of a batch meet in {met.name} ({met.location})"


def _nearly(graph: Graph) -> Op | None:
    """Return where the loss takes a term or weights that each part of a batch has for itself."""
    loss = loss_of_parts(graph)
    return loss.op if loss.follows is Follows.NEARLY else None


def _is_nearly(op: Op) -> str:
    if op.target == "aten.mul.Tensor":
        return (
            f"{op.name} ({op.location}) multiplies two means over rows, as balancing losses of "
            "experts do (Megatron has one for each microbatch)"
        )
    return f"{op.name} ({op.location}) makes the loss a mean over rows only nearly"
