"""Says where a plan trains otherwise than one device does, or its ranks share nothing."""

from __future__ import annotations

import re

from autopar.planner.findings.drawn_once import drawn_once
from autopar.planner.findings.loss_of_parts import Follows, loss_of_parts
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.findings.statistics import norm_of_rows
from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE, Buffer, GradientUse, Op
from autopar.planner.plan.declared.gradient_limits import gradient_words
from autopar.planner.plan.plan import Plan
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


def meaning_notes(plan: Plan) -> tuple[str, ...]:
    """Return what a person has to know of what a plan means, a few sentences each."""
    notes = (
        parts_apart(plan),
        statistics_apart(plan),
        draws_apart(plan),
        held_in_half(plan),
        gradients_changed(plan),
        evaluates_parts(plan),
        shares_nothing(plan),
    )
    return tuple(note for note in notes if note)


def parts_apart(plan: Plan) -> str:
    """Return why a batch that is split, as in the plan, has a loss of its own; "" if it has not."""
    arranged, graph = plan.arrangement, plan.graph
    if arranged.data * arranged.microbatches == 1:
        return ""
    if (met := meeting_rows(graph)) is not None:
        return (
            f"{rows_meet(met)}: each microbatch of each data rank compares its own rows only, so "
            "this is not the training of one device."
        )
    if (nearly := nearly_a_mean(graph)) is not None:
        return (
            f"{is_nearly(nearly)}: each part of the batch takes its own, so this is nearly, but "
            "not quite, the training of one device."
        )
    return ""


def statistics_apart(plan: Plan) -> str:
    """Return what batch norms make of several microbatches; "" without either."""
    norm, count = norm_of_rows(plan.graph), plan.arrangement.microbatches
    if norm is None or count == 1:
        return ""
    return (
        f"{named(norm)} takes the statistics of each of {count} microbatches by itself, as was "
        "asked for, so this is not the training of one device."
    )


def draws_apart(plan: Plan) -> str:
    """Return which numbers each part of a batch draws for itself; "" if one device does, too."""
    arranged = plan.arrangement
    drawn = drawn_once(plan.graph) if arranged.data * arranged.microbatches > 1 else None
    if drawn is None:
        return ""
    return (
        f"{named(drawn)} draws numbers for all rows together. One device draws them once in a "
        "step; here each microbatch of each data rank draws its own."
    )


def narrowed_buffers(plan: Plan) -> tuple[Buffer, ...]:
    """Return the buffers that a plan in 16 bits has in 16 bits, though the model has not."""
    if not plan.arrangement.precision.is_half:
        return ()
    return tuple(one for one in plan.graph.buffers if one.narrowed and one.dtype == MODEL_DTYPE)


def held_in_half(plan: Plan) -> str:
    """Return which fp32 buffers have 16 bits, and what that does; "" if none has."""
    found, precision = narrowed_buffers(plan), plan.arrangement.precision
    if not found:
        return ""
    names, written = (
        " and ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", one.name) for one in some))
        for some in (found, [one for one in found if one.updated])
    )
    lost = f" The forward writes to {written}, where small changes are lost." if written else ""
    return (
        f"the model computes with {names} (fp32) and activations in {precision} as they are. That "
        f"makes fp32, which torch does not multiply by weights in {precision}, so the plan holds "
        f"them in {precision}, as model.to(torch.{precision.torch_name}) does.{lost} A buffer is "
        "held in fp32 where the model casts it as it reads it: x + self.table.to(x.dtype)."
    )


def gradients_changed(plan: Plan) -> str:
    """Return what a hook that changes gradients is given where the batch is split; "" elsewhere."""
    arranged = plan.arrangement
    changed = (one for one in plan.graph.own_gradients if one.use is GradientUse.CHANGED)
    own = next(changed, None)
    if own is None or arranged.data * arranged.microbatches == 1:
        return ""
    times = f", {arranged.data} times as large" if arranged.data > 1 else ""
    return (
        f"{gradient_words(own)}. What is changed there is the gradient of one microbatch of one "
        f"data rank{times}: a factor or a mask trains as on one device, a limit or a norm does not."
    )


def evaluates_parts(plan: Plan) -> str:
    """Return which parts of a model learn in eval mode, as the constructor has left them."""
    parts = plan.graph.in_eval_mode
    if not parts:
        return ""
    are = "is in eval mode, though it learns" if len(parts) == 1 else "are in eval mode, yet learn"
    return (
        f"{', '.join(parts)} {are}: dropout is off there, and batch norms keep their statistics, "
        "as in a loop that never calls model.train(). To train in training mode, return "
        "model.train() from build_model."
    )


def shares_nothing(plan: Plan) -> str:
    """Return that tensor ranks all compute the same, where they do."""
    splits = any(layout.axis for layouts in plan.layouts for layout in layouts)
    if plan.arrangement.tensor == 1 or splits:
        return ""
    return (
        f"as pinned, {plan.arrangement.tensor} tensor ranks compute all of it each: whatever they "
        "might share would take longer. Use fewer devices, pin dp, or require a split ([[splits]] "
        "in a constraints file)."
    )


def rows_meet(met: Op) -> str:
    """Say that the rows of a batch meet in an op."""
    return f"the rows of a batch meet in {named(met)}"


def nearly_a_mean(graph: Graph) -> Op | None:
    """Return where the loss takes a term or weights that each part of a batch has for itself."""
    loss = loss_of_parts(graph)
    return loss.op if loss.follows is Follows.NEARLY else None


def is_nearly(op: Op) -> str:
    """Say that an op makes the loss a mean over rows only nearly."""
    if kind_of(op) is OpKind.MULTIPLICATION:
        return (
            f"{named(op)} multiplies two means over rows, as balancing losses of experts do "
            "(Megatron has one for each microbatch)"
        )
    return f"{named(op)} makes the loss a mean over rows only nearly"


def named(op: Op) -> str:
    """Return the name of an op and its place: in the model's code, whose folder says nothing.

    Of an op that only code of libraries is around, the place is the module that was called.
    """
    place = op.location.rpartition("/")[2] or op.call
    return f"{op.name} ({place})" if place else op.name
