"""Turns a plan into the call that makes what evaluates its model."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.targets import DIVISOR
from autopar.codegen.python_text import Group, Source, call
from autopar.codegen.script.parameter_tables import half_buffers
from autopar.codegen.script.settings_lines import sums_rows
from autopar.codegen.subject import Subject
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.plan.plan import Plan


def evaluation(plan: Plan, subject: Subject) -> Source:
    """Return the call: what computes a loss, on which rows, and how each microbatch weighs."""
    made = call(
        "Evaluation", *_model(plan, subject), _rows(plan, subject), *_weighing(plan, subject)
    )
    return Source(made.laid_out(before=17, indent=4))


def first_step(plan: Plan, subject: Subject) -> Source:
    """Return the call that compares the loss of the first microbatch with plain PyTorch's."""
    arguments = ["data", *_model(plan, subject), "plainly", "options", "mesh"]
    if subject.opened.weighs_terms:
        arguments.append("terms=valid_targets")
    if subject.opened.own_rows:
        arguments += ["rows_over=mesh.tensor", "own=OWN_ROWS", "rows=MICROBATCH"]
    return Source(call("first_step_checked", *arguments).in_few_lines(before=15, indent=8))


def plainly(plan: Plan, subject: Subject) -> Source:
    """Return the call that holds what one device computes a loss with."""
    given = ["new_model", "new_batch"]
    if subject.file.loss:
        given.append("new_loss")
    if half_buffers(plan):
        given.append("half_buffers=HALF_BUFFERS")
    if plan.graph.own_gradients:
        given.append("needs_gradients=True")
    return Source(call("Plainly", *given).flat)


def evaluation_notes(subject: Subject) -> Iterator[str]:
    """Yield what an evaluation does otherwise than one process that has the model."""
    opened, modules = subject.opened, subject.modules
    paths = {path for one in opened.classes for path in one.instances}
    paths |= {subject.graph.calls[call].path for call in opened.inlined}
    paths |= {""} if opened.stages else set()
    found = (modules[path] for path in paths if path in modules)
    names = sorted({one.class_name for one in found if one.branches_in_training})
    yield from absent_notes(subject)
    if names:
        yield (
            f"evaluations run {', '.join(names)} as in training, but for dropout and batch norms: "
            "the forward asks self.training, and the code printed here has that branch alone."
        )


def absent_notes(subject: Subject) -> Iterator[str]:
    """Yield what metrics() cannot use of what the model returns, if there is anything."""
    if subject.opened.absent:
        yield (
            f"metrics() cannot use {', '.join(subject.opened.absent)}. Scripts with code of the "
            "model compute what the loss depends on, and evaluations have what of that is there "
            "where the loss is computed, in tuples, dicts, dataclasses and namedtuples."
        )


def _model(plan: Plan, subject: Subject) -> tuple[str, str]:
    """Return what gives the losses of microbatches, and what a rank holds of the model."""
    is_pipelined = plan.arrangement.pipeline > 1
    split = ", tensor=mesh.tensor" if subject.opened.loss is not None else ""
    losses = "model.losses_of" if is_pipelined else f"one_by_one(partial(loss_of, model{split}))"
    return (
        f"with_gradients({losses})" if plan.graph.own_gradients else losses,
        "model.parts" if is_pipelined else "[model]",
    )


def _rows(plan: Plan, subject: Subject) -> Group:
    """Return the call that reads the rows; those that meet are never repeated to fill a batch."""
    arguments = ["new_batch", "new_eval_dataset", "options", "mesh", "microbatch=MICROBATCH"]
    if subject.file.build_collate is not None:
        arguments.append("new_collate=new_collate")
    if subject.opened.own_rows:
        arguments += ["rows_over=mesh.tensor", "own=OWN_ROWS"]
    if plan.graph.fixed_batch is not None or meeting_rows(plan.graph) is not None:
        arguments.append("fills=False")
    return call("read_evaluation", *arguments)


def _weighing(plan: Plan, subject: Subject) -> Iterator[str]:
    opened = subject.opened
    if opened.valid_targets is not None:
        yield f"{'terms' if opened.weighs_terms else 'targets'}=valid_targets"
    if opened.divisor is not None:
        yield f"divisor={DIVISOR}"
    if sums_rows(plan):
        yield "microbatches=MICROBATCHES * DATA"
    if subject.file.metrics is not None:
        is_split = opened.metrics is not None
        whole = "partial(whole_metrics, tensor=mesh.tensor)" if is_split else "new_metrics"
        yield f"metrics={whole}"
