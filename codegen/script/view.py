"""Turns a plan into the view of its script: all decisions that remain after planning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autopar.codegen.forward.classes import CROSSING
from autopar.codegen.forward.opened import OpenedClass, OpenedSource
from autopar.codegen.forward.reading.modules import LOSS_STAGE, Imported
from autopar.codegen.forward.targets import DIVISOR
from autopar.codegen.script.layer_lists import (
    StageTables,
    crossing_names,
    crossings_follow_rows,
    layer_lists,
    recomputations,
    stage_tables,
    writing_layers,
)
from autopar.codegen.script.model_calls import (
    ModelCalls,
    evaluation,
    evaluation_notes,
    first_step,
    model_arguments,
    model_calls,
    model_source,
    plainly,
)
from autopar.codegen.script.parameter_tables import (
    half_buffers,
    numbered_rows,
    once,
    parameter_tables,
    patterns,
    unread,
)
from autopar.codegen.script.script_view import ScriptView
from autopar.codegen.script.settings_lines import (
    ScriptSetting,
    docstring,
    evaluating,
    has_batch_norm,
    lines,
    planned,
    scales_loss,
    settings_of,
    sums_rows,
    synchronises_batch_norms,
)
from autopar.codegen.subject import PlannedSubject
from autopar.codegen.text.values import (
    Source,
    assigned,
    call,
    identifier,
    literal,
    row,
    table,
    tuple_of,
)
from autopar.planner.cluster.cluster import Backend
from autopar.planner.costs.prediction import Arrangement, Compile
from autopar.planner.findings.rows import meeting_rows, parts_have_weights
from autopar.planner.plan.declared.limits import least_rows
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import is_scheduled_here, unit_word


def script_view(plan: Plan, subject: PlannedSubject, destination: Path) -> ScriptView:
    """Return the contents of a plan's script."""
    opened = subject.opened
    calls = model_calls(
        subject.file,
        _imported(opened),
        destination,
        is_half=plan.arrangement.precision.is_half,
    )
    parameters = parameter_tables(plan, subject.axes)
    stages = _stages(plan, subject)
    splits_loss, evaluates = opened.loss is not None, subject.file.build_eval_dataset is not None
    weighs = opened.valid_targets is not None and not opened.weighs_terms
    writing, unlearned, steady = writing_layers(plan, subject), unread(plan), once(plan)
    narrowed = half_buffers(plan)
    images = _images(plan, subject)
    return ScriptView(
        docstring=docstring(
            plan, destination.name, *(evaluation_notes(subject) if evaluates else ())
        ),
        model_imports=calls.imports,
        functions=calls.functions,
        model_source=model_source(subject.file.path),
        settings=lines([*settings_of(plan), *(evaluating() if evaluates else ())]),
        plan=lines([*planned(plan), *images]),
        has_images=bool(images),
        classes=_classes(plan, subject, calls),
        counting=Source(_counting(opened)),
        dividing=Source(f", divisor={DIVISOR}" if opened.divisor is not None else ""),
        weighs_terms=opened.weighs_terms,
        weighs_microbatches=weighs,
        sums_rows=sums_rows(plan),
        tables=_tables(
            _own_rows_table(opened),
            _opened_table(plan, subject),
            parameters.splits,
            parameters.summed,
            layer_lists(plan, subject, writing=writing),
            unlearned,
            steady,
            narrowed,
            stages.stages,
            stages.ties,
        ),
        is_pipelined=_is_pipelined(plan),
        opened=bool(_instances(plan, opened)),
        splits=bool(parameters.splits),
        parts=Source(_parts(plan)),
        split_argument=Source(", splits=SPLITS" if parameters.splits else ""),
        shards=plan.arrangement.zero.divides_optimizer,
        summed=bool(parameters.summed),
        ties=bool(stages.ties),
        scales_loss=scales_loss(plan),
        products=plan.arrangement.precision.products,
        kept=_kept(plan),
        scaling=Source(", scale=loss_scale.value" if scales_loss(plan) else ""),
        clipping=_clipping(plan, has_splits=bool(parameters.splits), has_ties=bool(stages.ties)),
        waits_for_last=Source(_waits_for_last(plan.arrangement)),
        prints_forwards=bool(opened.classes or opened.stages or opened.loss),
        has_dataset=plan.model.has_dataset,
        reading=_reading(plan, subject),
        evaluation=evaluation(plan, subject) if evaluates else Source(),
        plainly=plainly(plan, subject),
        first_step=first_step(plan, subject),
        measures=subject.file.metrics is not None,
        gathers_rows=bool(opened.own_rows),
        default_optimizer=_default_optimizer(plan),
        warms_up=is_scheduled_here(plan),
        scheduler=_scheduler(plan),
        has_writing=bool(writing),
        has_unread=bool(unlearned),
        has_steady=bool(steady),
        compiles=plan.arrangement.compile is Compile.LAYERS,
        recomputations=recomputations(plan),
        wrapping=_wrapping(plan, is_summed=bool(parameters.summed), has_ties=bool(stages.ties)),
        model_arguments=_model_arguments(plan, opened),
        axis_argument=Source(", tensor: Axis" if splits_loss else ""),
        axis_value=Source(", mesh.tensor" if splits_loss else ""),
        loss=_loss(opened, calls),
        unit=unit_word(plan.model),
        unit_constant=f"{unit_word(plan.model).upper()}_PER_STEP",
    )


def _images(plan: Plan, subject: PlannedSubject) -> list[ScriptSetting]:
    """Return the setting that names image inputs, if their memory format matters.

    With printed forwards images keep the usual format, for which the sizes were printed.
    """
    opened = subject.opened
    if Backend(plan.machines.backend).is_on_cpu or opened.classes or opened.stages:
        return []
    found = plan.graph.images
    meaning = "they lie pixel by pixel (channels_last), as a GPU convolves them"
    return [ScriptSetting("IMAGES", literal(found), meaning)] if found else []


def _counting(opened: OpenedSource) -> str:
    """Return the source of `valid_targets` and of `divisor`, if the loss needs them."""
    functions = (opened.valid_targets, opened.divisor)
    return "\n\n\n".join(one.strip("\n") for one in functions if one is not None)


def _is_pipelined(plan: Plan) -> bool:
    return plan.arrangement.pipeline > 1


def _imported(opened: OpenedSource) -> Iterator[Imported]:
    for one in (*opened.classes, *(stage.cls for stage in opened.stages)):
        yield one.base
    yield from opened.functions


def _loss(opened: OpenedSource, calls: ModelCalls) -> Source:
    if opened.loss is not None:
        return Source("split_loss(outputs, batch, tensor)")
    return Source("loss_in(outputs)") if _returns_loss(opened) else calls.loss


def _model_arguments(plan: Plan, opened: OpenedSource) -> Source:
    """Return the model's arguments: the whole batch if printed code computes the loss."""
    if _returns_loss(opened):
        return Source("**batch")
    return model_arguments(
        plan.graph, takes_all=not plan.model.has_loss, has_weights=opened.weighs_terms
    )


def _returns_loss(opened: OpenedSource) -> bool:
    """Whether the printed code of the model computes the loss from the whole batch."""
    return bool(opened.stages) and opened.stages[-1].returns_loss


def _stages(plan: Plan, subject: PlannedSubject) -> StageTables:
    if not _is_pipelined(plan):
        return StageTables(stages=Source(), ties=Source())
    last = subject.opened.stages[-1]
    name = last.cls.name if last.returns_loss else LOSS_STAGE
    return stage_tables(plan, subject.opened, subject.axes, last=name)


def _instances(plan: Plan, opened: OpenedSource) -> tuple[OpenedClass, ...]:
    """Return the classes of the table CLASSES; in a pipeline, STAGES has the root's classes."""
    roots = () if _is_pipelined(plan) else tuple(stage.cls for stage in opened.stages)
    return (*opened.classes, *roots)


def _opened_table(plan: Plan, subject: PlannedSubject) -> Source:
    classes = {n: one.name for one in _instances(plan, subject.opened) for n in one.instances}
    if not classes:
        return Source()
    found = numbered_rows(patterns(classes, subject.modules))
    rows = [(*row(names, identifier(kind)), "") for names, kind in found]
    return table("CLASSES: dict[str, type[nn.Module]]", ("{", "}"), rows)


def _own_rows_table(opened: OpenedSource) -> Source:
    if not opened.own_rows:
        return Source()
    keys = tuple_of(*map(literal, opened.own_rows))
    return assigned("OWN_ROWS", keys, "what tensor ranks need of their own rows alone")


def _classes(plan: Plan, subject: PlannedSubject, calls: ModelCalls) -> Source:
    """Return everything printed from the graph, separated by two empty lines."""
    opened = subject.opened
    sources = [one.source for one in opened.classes]
    stages = dict.fromkeys(stage.cls.source for stage in opened.stages)
    sources += stages
    sources += [one for one in (opened.loss, opened.metrics) if one is not None]
    names = crossing_names(opened)
    sources += [source.replace(CROSSING, name, 1) for source, name in names.items()]
    if _is_pipelined(plan) and not opened.stages[-1].returns_loss:
        name, loss = opened.stages[-1].cls.name, _loss(opened, calls)
        has_metrics = subject.file.metrics is not None
        sources.append(_loss_stage(name, loss, has_metrics=has_metrics))
    return Source("\n\n\n".join(source.strip("\n") for source in sources))


def _loss_stage(last: str, loss: Source, *, has_metrics: bool) -> str:
    value = loss.replace(", tensor)", ", self.tensor)")
    shown = """
        if not self.training:
            self.for_metrics = outputs"""
    return f'''class {LOSS_STAGE}({identifier(last)}):
    """The last stage, with the loss."""

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor:
        """Map what the stage before gives to the loss."""
        outputs = super().forward(*received, **batch){shown if has_metrics else ""}
        return {value}'''


def _tables(*tables: Source) -> Source:
    return Source("\n".join(table for table in tables if table))


def _wrap_arguments(plan: Plan) -> Iterator[str]:
    """Yield the arguments of wrap() that matter under this plan."""
    arranged = plan.arrangement
    part = "part" if _is_pipelined(plan) else "model"
    yield from (part, "mesh", "zero=ZERO", "compute_dtype=dtype")
    if not arranged.zero.divides_gradients and arranged.data > 1:
        yield "bucket_bytes=BUCKET_BYTES"
    if arranged.zero.divides_gradients:
        yield f"units=submodules({part}, LAYERS)"
    if arranged.compressed_gradients and arranged.data > 1:
        yield "compress=COMPRESS"
    if half_buffers(plan):
        yield "half_buffers=HALF_BUFFERS"
    if synchronises_batch_norms(plan):
        yield "sync_batch_norm=SYNC_BATCH_NORM"


def _default_optimizer(plan: Plan) -> Source:
    """Return the call for the default optimizer, or "" if the model file has its own."""
    if plan.model.has_optimizer:
        return Source()
    rates = ("lr=LEARNING_RATE", "betas=options.betas", "weight_decay=options.weight_decay")
    return Source(call("partial", "adamw", *rates).in_few_lines(before=20, indent=4))


def _scheduler(plan: Plan) -> Source:
    """Return the call for the learning-rate schedule, or "" if there is none."""
    if is_scheduled_here(plan):
        steps = ("steps=options.steps", "warmup=options.warmup_steps", "final=FINAL_SHARE")
        return Source(call("warmup_cosine", "optimizer", *steps).in_few_lines(before=16, indent=4))
    made = "build_scheduler(new_scheduler, optimizer, steps=options.steps, mesh=mesh)"
    return Source(made if plan.model.has_scheduler else "")


def _kept(plan: Plan) -> Source:
    """Return the keeper's arguments: everything that changes during training."""
    scheduler = ", scheduler=scheduler" if _scheduler(plan) else ""
    scale = ", loss_scale=loss_scale" if scales_loss(plan) else ""
    return Source(f"{_parts(plan)}, optimizer, recipe{scheduler}{scale}")


def _clipping(plan: Plan, *, has_splits: bool, has_ties: bool) -> Source:
    """Return the call that clips gradients."""
    split = ", split=SPLITS" if has_splits else ""
    tied = ", tied=model.tied.not_owned" if has_ties else ""
    return Source(f"clip_by_global_norm({_parts(plan)}, clip, mesh{split}{tied})")


def _parts(plan: Plan) -> str:
    """Return the rank's modules."""
    return "model.parts" if _is_pipelined(plan) else "[model]"


def _reading(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that yields a rank's microbatches."""
    arguments = ["new_batch", "options", "mesh", "rows=(MICROBATCHES, MICROBATCH)"]
    if plan.model.has_dataset:
        arguments += ["dataset=dataset", "skip=skip", *_fewer_rows(plan, subject)]
    if subject.file.build_collate is not None:
        arguments.append("new_collate=new_collate")
    if subject.opened.own_rows:
        arguments.append("rows_over=axis")
    return Source(call("read_batches", *arguments).in_few_lines(before=11, indent=4))


def _fewer_rows(plan: Plan, subject: PlannedSubject) -> Iterator[str]:
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


def _waits_for_last(arrangement: Arrangement) -> str:
    """Return a comment on what waits for a step's last microbatch, or "" if nothing does."""
    if arrangement.data == 1 or arrangement.zero.divides_parameters:
        return ""
    if arrangement.zero.keeps_gathered:
        return "parameters stay gathered until the last one" if arrangement.microbatches > 1 else ""
    return "gradients are averaged with the last one's"


def _wrapping(plan: Plan, *, is_summed: bool, has_ties: bool) -> Source:
    """Return the call of wrap; gradients that are also summed over other axes share no bucket."""
    arguments, before = [*_wrap_arguments(plan)], ""
    if plan.arrangement.zero.gathers_updated and plan.arrangement.shard > 1:
        if has_ties:
            before = "tied = [tie.names for tie in TIES]\n    "
            arguments.append("apart=[*tied, REPLICATED]" if is_summed else "apart=tied")
        elif is_summed:
            arguments.append("apart=[REPLICATED]")
    return Source(before + call("wrap", *arguments).laid_out(before=4, indent=4))
