"""Finds the fewest rows of a microbatch that a script can train on, at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.script.layer_lists import crossings_follow_rows
from autopar.codegen.script.settings_lines import has_batch_norm
from autopar.codegen.subject import PlannedSubject
from autopar.planner.findings.rows import meeting_rows, parts_have_weights
from autopar.planner.plan.declared.limits import least_rows
from autopar.planner.plan.plan import Plan


def fewer_rows(plan: Plan, subject: PlannedSubject) -> Iterator[str]:
    """Yield arguments of `read_batches`, if not every number of rows works."""
    is_whole = plan.arrangement.data * plan.arrangement.microbatches == 1
    least = least_rows(plan.graph, data=plan.arrangement.data)
    if _is_of_planned_rows(plan, subject) or not (is_whole or parts_have_weights(plan.graph)):
        yield "fewest=MICROBATCH"
    elif least > 1:
        yield f"fewest={least}"
    if not is_whole and (has_batch_norm(plan.graph) or meeting_rows(plan.graph) is not None):
        yield "repeats=False"


def _is_of_planned_rows(plan: Plan, subject: PlannedSubject) -> bool:
    """Whether code of the script only works for the planned number of rows."""
    opened = subject.opened
    is_printed = bool(opened.classes or opened.stages or opened.loss)
    is_fixed = plan.graph.fixed_batch is not None and is_printed
    is_pipelined = plan.arrangement.pipeline > 1
    follows = not is_pipelined or crossings_follow_rows(opened, subject.axes)
    return is_fixed or opened.splits_rows or not follows
