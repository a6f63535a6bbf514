"""Turns a plan into the call that makes what evaluates its model."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.reading.calls import ROOT
from autopar.codegen.python_text import Group, Source, call
from autopar.codegen.script.settings_lines import sums_rows
from autopar.codegen.subject import Subject
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.ops import refs
from autopar.planner.plan.plan import Plan


def evaluation(plan: Plan, subject: Subject) -> Source:
    """Return the call: what computes a loss, on which rows, and how each microbatch weighs."""
    made = call(
        "Evaluation", *_model(plan, subject), _rows(plan, subject), *_weighing(plan, subject)
    )
    return Source(made.laid_out(before=17, indent=4))


def has_metrics(subject: Subject) -> bool:
    """Whether there are metrics, and some rank has all that they may be made of."""
    opened, graph = subject.opened, subject.graph
    if subject.file.metrics is None or not (opened.stages or opened.loss):
        return subject.file.metrics is not None
    if opened.stages and opened.stages[-1].returns_loss:
        return opened.stages[-1].shows_outputs
    return all(name in graph.tensors for name in refs(graph.calls[ROOT].result))


def evaluation_notes(subject: Subject) -> Iterator[str]:
    """Yield what an evaluation does otherwise than one process that has the model."""
    opened, modules = subject.opened, subject.modules
    paths = {path for one in opened.classes for path in one.instances}
    paths |= {subject.graph.calls[call].path for call in opened.inlined}
    paths |= {""} if opened.stages else set()
    found = (modules[path] for path in paths if path in modules)
    names = sorted({one.class_name for one in found if one.branches_in_training})
    if subject.file.metrics is not None and not has_metrics(subject):
        yield (
            "evaluations have the loss alone, and no metrics(): the code printed here makes no "
            "outputs that the loss does not depend on, and no objects that are no mapping."
        )
    if names:
        yield (
            f"evaluations run {', '.join(names)} as in training, but for dropout and batch norms: "
            "the forward asks self.training, and the code printed here has that branch alone."
        )


def _model(plan: Plan, subject: Subject) -> tuple[str, str]:
    """Return what gives the losses of microbatches, and what a rank holds of the model."""
    if plan.arrangement.pipeline > 1:
        return "model.losses_of", "model.parts"
    split = ", tensor=mesh.tensor" if subject.opened.loss is not None else ""
    return f"one_by_one(partial(loss_of, model{split}))", "[model]"


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
    if opened.added:
        yield "added=ADDED"
    if sums_rows(plan):
        yield "microbatches=MICROBATCHES * DATA"
    if has_metrics(subject):
        is_split = opened.metrics is not None
        whole = "partial(whole_metrics, tensor=mesh.tensor)" if is_split else "new_metrics"
        yield f"metrics={whole}"
