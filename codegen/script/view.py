"""Turns a plan into the values that the templates of its script print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autopar.codegen.forward.classes import CROSSING
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import LOSS_STAGE
from autopar.codegen.script import (
    BuildView,
    HeadView,
    ScriptTables,
    ScriptView,
    StepView,
    TrainingView,
    lines,
)
from autopar.codegen.script.layer_lists import (
    built_part,
    compile_call,
    crossing_names,
    float8_call,
    layer_lists,
    own_rows_table,
    rank_stages,
    recomputations,
    stages_table,
    ties_table,
    writing_list,
)
from autopar.codegen.script.model_calls import (
    ModelCalls,
    evaluation,
    first_step,
    images,
    model_arguments,
    model_calls,
    model_source,
    outer_call,
    outer_settings,
    plain_model,
    rank_modules,
    reading,
    seeding,
    waits_for_last,
    whole_gradients,
    why_weighed,
)
from autopar.codegen.script.parameter_tables import (
    half_buffers,
    has_buckets_apart,
    numbered_rows,
    once,
    patterns,
    replicated_table,
    splits_table,
    unread,
)
from autopar.codegen.script.settings_lines import (
    docstring,
    evaluating,
    has_copies,
    has_own_buckets,
    planned,
    settings_of,
    synchronises_batch_norms,
    units_per_step,
)
from autopar.codegen.subject import PlannedSubject, evaluation_notes
from autopar.codegen.text.values import (
    Source,
    call,
    identifier,
    row,
    table,
)
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import is_scheduled_here, unit_word


def script_view(plan: Plan, subject: PlannedSubject, destination: Path) -> ScriptView:
    """Return the contents of a plan's script."""
    calls = model_calls(
        subject.file,
        subject.opened.imported,
        destination,
        is_half=plan.arrangement.precision.is_half,
    )
    tables = _script_tables(plan, subject)
    return ScriptView(
        tables=tables,
        head=_head(plan, subject, calls, file_name=destination.name),
        build=_build(plan, subject, tables),
        step=_step(plan, subject, calls, tables),
        training=_training(plan, subject, tables),
    )


def _script_tables(plan: Plan, subject: PlannedSubject) -> ScriptTables:
    opened, is_pipelined = subject.opened, _is_pipelined(plan)
    return ScriptTables(
        own_rows=own_rows_table(opened),
        classes=_opened_table(plan, subject),
        splits=splits_table(plan, subject.axes),
        replicated=replicated_table(plan),
        writing=writing_list(plan, subject),
        layers=layer_lists(plan, subject),
        unread=unread(plan),
        once=once(plan),
        half_buffers=half_buffers(plan),
        stages=stages_table(plan, opened, subject.axes) if is_pipelined else Source(),
        ties=ties_table(plan, opened) if is_pipelined else Source(),
    )


def _head(plan: Plan, subject: PlannedSubject, calls: ModelCalls, *, file_name: str) -> HeadView:
    evaluates = subject.file.build_eval_dataset is not None
    notes = evaluation_notes(subject) if evaluates else ()
    evaluated = evaluating(plan) if evaluates else ()
    return HeadView(
        docstring=docstring(plan, file_name, *notes),
        model_imports=calls.imports,
        functions=calls.functions,
        settings=lines([*settings_of(plan), *outer_settings(plan), *evaluated]),
        plan=lines([*planned(plan), *images(plan, subject)]),
        model_source=model_source(subject.file.path),
        classes=_classes(plan, subject, calls),
    )


def _build(plan: Plan, subject: PlannedSubject, tables: ScriptTables) -> BuildView:
    return BuildView(
        is_pipelined=_is_pipelined(plan),
        built=built_part(plan),
        float8=float8_call(plan, subject),
        compiling=compile_call(plan, subject),
        recomputations=tuple(recomputations(plan)),
        wrapping=_wrapping(plan, tables),
        stage_indices=rank_stages(plan.arrangement),
    )


def _step(plan: Plan, subject: PlannedSubject, calls: ModelCalls, tables: ScriptTables) -> StepView:
    opened = subject.opened
    splits_loss, loss = opened.loss is not None, _loss(opened, calls)
    return StepView(
        is_pipelined=_is_pipelined(plan),
        model_class=Source("Pipeline" if _is_pipelined(plan) else "nn.Module"),
        model_arguments=_model_arguments(plan, opened),
        axis_argument=Source(", tensor: Axis" if splits_loss else ""),
        axis_value=Source(", mesh.tensor" if splits_loss else ""),
        loss=loss,
        loss_is_given=loss.startswith("loss_in("),
        counting=Source(_counting(opened)),
        waits_for_last=waits_for_last(plan.arrangement),
        scales_loss=plan.arrangement.precision.scales_loss,
        whole_gradients=whole_gradients(plan),
        scaling=_scaling(plan),
        parts=rank_modules(plan),
        clipping=_clipping(plan, tables),
    )


def _training(plan: Plan, subject: PlannedSubject, tables: ScriptTables) -> TrainingView:
    evaluates = subject.file.build_eval_dataset is not None
    return TrainingView(
        products=plan.arrangement.precision.products,
        product_units=plan.arrangement.precision.units,
        start=_start(plan.arrangement),
        prints_forwards=subject.opened.is_printed,
        has_dataset=plan.model.has_dataset,
        weighing=why_weighed(plan, subject.opened),
        reading=reading(plan, subject),
        evaluation=evaluation(plan, subject) if evaluates else Source(),
        parts=rank_modules(plan),
        split_argument=Source(", splits=SPLITS" if tables.splits else ""),
        default_optimizer=_default_optimizer(plan),
        optimizer=_optimizer(plan),
        outer=outer_call(plan, rank_modules(plan)),
        streams=plan.arrangement.outer_parts > 1,
        scheduler=_scheduler(plan),
        plain_model=plain_model(plan, subject),
        first_step=first_step(plan, subject),
        scales_loss=plan.arrangement.precision.scales_loss,
        seeding=seeding(plan),
        kept=_kept(plan),
        has_metrics=subject.file.metrics is not None,
        units=units_per_step(plan.model),
        unit=unit_word(plan.model),
    )


def _scaling(plan: Plan) -> Source:
    """Return the argument that scales the gradients of a pipeline's losses, or ""."""
    if plan.arrangement.precision.scales_loss:
        return Source(", scale=loss_scale.value")
    return Source(", scale=1 / mesh.data.size" if whole_gradients(plan) else "")


def _counting(opened: OpenedSource) -> str:
    """Return the source of `valid_targets` and of `divisor`, if the loss needs them."""
    functions = (opened.valid_targets, opened.divisor)
    return "\n\n\n".join(one.strip("\n") for one in functions if one is not None)


def _is_pipelined(plan: Plan) -> bool:
    return plan.arrangement.pipeline > 1


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


def _opened_table(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the table CLASSES, of the modules whose class is printed."""
    roots = () if _is_pipelined(plan) else tuple(stage.cls for stage in subject.opened.stages)
    printed = (*subject.opened.classes, *roots)
    classes = {path: one.name for one in printed for path in one.instances}
    if not classes:
        return Source()
    found = numbered_rows(patterns(classes, subject.modules))
    rows = [(*row(names, identifier(kind)), "") for names, kind in found]
    return table("CLASSES", ("{", "}"), rows)


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
        """Compute the loss from the previous stage's output."""
        outputs = super().forward(*received, **batch){shown if has_metrics else ""}
        return {value}'''


def _wrap_arguments(plan: Plan) -> Iterator[str]:
    """Yield the arguments of wrap() that this plan needs."""
    arranged, part = plan.arrangement, built_part(plan)
    yield from (part, "mesh", *_zero(arranged), "compute_dtype=dtype")
    if has_own_buckets(arranged):
        yield "bucket_bytes=BUCKET_BYTES"
    if arranged.zero.shards_modules:
        yield f"units=submodules({part}, LAYERS)"
    if arranged.compression.words and arranged.data > 1:
        yield "compress=COMPRESS"
    if arranged.offload.has_states:
        yield "offload=OFFLOAD"
    if half_buffers(plan):
        yield "half_buffers=HALF_BUFFERS"
    if synchronises_batch_norms(plan):
        yield "sync_batch_norm=SYNC_BATCH_NORM"


def _default_optimizer(plan: Plan) -> Source:
    """Return the call for the default optimizer, or "" if the model file has its own."""
    if plan.model.has_optimizer:
        return Source()
    rates = ("lr=LEARNING_RATE", "betas=options.betas", "weight_decay=options.weight_decay")
    return Source(call("partial", "adamw", *rates).laid_out(before=20, indent=4))


def _scheduler(plan: Plan) -> Source:
    """Return the call for the learning-rate schedule, or "" if there is none."""
    if is_scheduled_here(plan):
        steps = ("steps=options.steps", "warmup=options.warmup_steps", "final=FINAL_SHARE")
        return Source(call("warmup_cosine", "optimizer", *steps).laid_out(before=16, indent=4))
    made = "build_scheduler(new_scheduler, optimizer, steps=options.steps, mesh=mesh)"
    return Source(made if plan.model.has_scheduler else "")


def _kept(plan: Plan) -> Source:
    """Return the keeper's arguments: everything that changes during training."""
    scheduler = ", scheduler=scheduler" if _scheduler(plan) else ""
    scale = ", loss_scale=loss_scale" if plan.arrangement.precision.scales_loss else ""
    return Source(f"{rank_modules(plan)}, optimizer, recipe{scheduler}{scale}")


def _clipping(plan: Plan, tables: ScriptTables) -> Source:
    """Return the call that clips gradients."""
    split = ", split=SPLITS" if tables.splits else ""
    tied = ", tied=model.tied.not_owned" if tables.ties else ""
    return Source(f"clip_by_global_norm({rank_modules(plan)}, clip, mesh{split}{tied})")


def _start(arranged: Arrangement) -> Source:
    """Return the call that joins the other ranks."""
    axes = ("pipeline", "data", "tensor")
    degrees = [f"{axis}={axis.upper()}" for axis in axes if getattr(arranged, axis) > 1]
    shard = ["shard=SHARD"] if has_copies(arranged) else []
    local = ["sync_every=SYNC_EVERY"] if arranged.is_local else []
    started = call("start", *degrees, *shard, *local, "timeout=options.timeout")
    return Source(started.laid_out(before=11, indent=4))


def _zero(arranged: Arrangement) -> list[str]:
    return ["zero=ZERO"] if arranged.data > 1 or arranged.shards_on_host else []


def _optimizer(plan: Plan) -> Source:
    """Return the call that builds a rank's optimizer."""
    given = (
        rank_modules(plan),
        "new_optimizer",
        *_zero(plan.arrangement),
        "mesh=mesh",
        "lr=options.lr",
    )
    return Source(call("build_optimizer", *given).laid_out(before=16, indent=4))


def _wrapping(plan: Plan, tables: ScriptTables) -> Source:
    """Return the call of wrap; `apart` names parameters whose gradients other axes sum, too."""
    arguments, before = [*_wrap_arguments(plan)], ""
    if has_buckets_apart(plan.arrangement):
        if tables.ties:
            before = "tied = [tie.names for tie in TIES]\n    "
            arguments.append("apart=[*tied, REPLICATED]" if tables.replicated else "apart=tied")
        elif tables.replicated:
            arguments.append("apart=[REPLICATED]")
    return Source(before + call("wrap", *arguments).laid_out(before=4, indent=4))
