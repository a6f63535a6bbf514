"""Turns a plan into a plain PyTorch loop: one process, with the script's rows and weights.

Users run it beside the plan's script. It only needs torch and the model file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import torch
from torch import Tensor

from autopar.codegen.forward.reading.forward_source import ROOT, leaves
from autopar.codegen.proof.verification import GivenScript
from autopar.codegen.script import ScriptSetting, lines
from autopar.codegen.script.model_calls import model_arguments, model_calls
from autopar.codegen.script.render import (
    BUILTINS_ALONE,
    check_names,
    environment,
    script_imports,
    with_checksum,
)
from autopar.codegen.subject import PlannedSubject
from autopar.codegen.text.values import (
    KNOWN_ALONE,
    WIDTH,
    Source,
    call,
    literal,
    prose,
)
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Ref
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.without_memory import without_memory
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import is_scheduled_here, meaning_notes
from autopar.planner.trace.model_checks import own_dtype
from autopar.runtime.data.rows import is_streamed
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.optimizer.building import MODEL, NAMED, asked_by

FILE_NAME = "plain.py"
_TEMPLATE = "plain.py.j2"
_STEPS = "int(sys.argv[1]) if len(sys.argv) > 1 else 10"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainView:
    """The parts of a plain loop."""

    docstring: Source
    model_imports: Source
    functions: Source
    settings: Source
    widened: Source  # converts a model that is built in 16 bits to float32
    has_dataset: bool
    is_streamed: bool
    has_collate: bool
    has_default_optimizer: bool
    has_default_schedule: bool
    optimizer: Source  # the call that creates it
    scheduler: Source  # empty if there is none
    model_arguments: Source
    loss: Source


def plain_loop(
    plan: Plan, subject: PlannedSubject, script: GivenScript, destination: Path
) -> Source:
    """Return the loop for the path `destination`, with a script's settings."""
    template = environment().get_template(_TEMPLATE)
    view = _view(plan, subject, script, destination)
    body = template.render(view=view, imports=Source())
    text = template.render(view=view, imports=script_imports(body, KNOWN_ALONE))
    check_names(text, KNOWN_ALONE, BUILTINS_ALONE)
    return with_checksum(text, plan)


def _view(plan: Plan, subject: PlannedSubject, script: GivenScript, destination: Path) -> PlainView:
    file = subject.file
    calls = model_calls(file, (), destination, is_half=False, evaluates=False)
    batch = {k: v for k, v in file.example_batch(2).items() if isinstance(v, Tensor)}
    dtypes = {  # of a float32 training
        key: torch.promote_types(one.dtype, torch.float32) if one.is_floating_point() else one.dtype
        for key, one in batch.items()
    }
    return PlainView(
        docstring=_docstring(plan, script, destination),
        model_imports=calls.imports,
        functions=calls.functions,
        settings=lines(_settings(plan, script, dtypes)),
        widened=Source(".float()" if own_dtype(without_memory(file)) in HALF_DTYPES else ""),
        has_dataset=file.build_dataset is not None,
        is_streamed=file.build_dataset is not None and is_streamed(file.build_dataset()),
        has_collate=file.build_collate is not None,
        has_default_optimizer=not plan.model.has_optimizer,
        has_default_schedule=is_scheduled_here(plan),
        optimizer=_optimizer(subject),
        scheduler=_scheduler(plan),
        model_arguments=model_arguments(
            plan.graph, takes_all=not plan.model.has_loss, has_weights=False
        ),
        loss=_own_loss(file) if file.loss else _place_of_loss(plan.graph),
    )


def _docstring(plan: Plan, script: GivenScript, destination: Path) -> Source:
    """Return the loop's docstring, including how to run it beside the script."""
    ranks, steps = plan.arrangement.ranks, 10
    notes = (f"Note of the script: {note}" for note in meaning_notes(plan))
    text = [
        f"Train {plan.model.name} in one process, as {script.path.name} does on {ranks} devices.",
        "",
        "Weights, rows, losses and learning rates are those of the script, under any plan. This",
        "file needs torch and the model file, and memory for the whole global batch. In float32",
        "and without dropout the losses of both are equal to about 1e-5:",
        "",
        f"    python {destination.name} {steps}",
        f"    torchrun --nproc-per-node {ranks} {script.path.name} --steps {steps} --log-every 1 "
        "--dtype float32",
        *(line for note in notes for line in ("", *wrap(note, WIDTH))),
    ]
    return Source('"""' + "\n".join(map(prose, text)) + '\n"""')


def _settings(
    plan: Plan, script: GivenScript, dtypes: Mapping[str, torch.dtype]
) -> Iterator[ScriptSetting]:
    adamw = script.adamw
    yield ScriptSetting("STEPS", Source(_STEPS), "the learning-rate schedule spans all of them")
    yield ScriptSetting("GLOBAL_BATCH", literal(plan.arrangement.global_batch), "rows of a step")
    if not plan.model.has_optimizer:
        yield ScriptSetting("LEARNING_RATE", literal(adamw.learning_rate), "of AdamW")
        yield ScriptSetting("BETAS", literal(adamw.betas), "of AdamW")
        yield ScriptSetting("WEIGHT_DECAY", literal(adamw.weight_decay), "of matrices")
    if is_scheduled_here(plan):
        yield ScriptSetting("WARMUP_STEPS", literal(adamw.warmup_steps), "at most a tenth of all")
        yield ScriptSetting(
            "FINAL_SHARE", literal(adamw.final_share), "of LEARNING_RATE, at the end"
        )
    clipped = "largest norm of all gradients together; 0: no clipping"
    yield ScriptSetting("CLIP_NORM", literal(script.clip_norm or 0.0), clipped)
    yield ScriptSetting("SEED", literal(script.seed), "of weights and rows")
    columns = (f"{literal(key)}: {dtype}" for key, dtype in dtypes.items())
    yield ScriptSetting("COLUMNS", Source(f"{{{', '.join(columns)}}}"), "a batch's keys and dtypes")


def _optimizer(subject: PlannedSubject) -> Source:
    factory = subject.file.build_optimizer
    if factory is None:
        return Source("new_optimizer(learning)")
    named = "[(name, one) for name, one in model.named_parameters() if one.requires_grad]"
    given = {MODEL: "model", NAMED: named}.get(asked_by(factory), "learning")
    return Source(call("new_optimizer", given).laid_out(before=16, indent=4))


def _scheduler(plan: Plan) -> Source:
    if is_scheduled_here(plan):
        return Source("LambdaLR(optimizer, rate)")
    return Source("new_scheduler(optimizer)" if plan.model.has_scheduler else "")


def _own_loss(file: ModelFile) -> Source:
    """Return the call of the model file's loss, with the batch's entries that are no tensors."""
    plain = [f"{literal(key)}: {literal(value)}" for key, value in file.plain_entries().items()]
    batch = f"{{{', '.join(['**batch', *plain])}}}" if plain else "batch"
    return Source(f"compute_loss(outputs, {batch})")


def _place_of_loss(graph: Graph) -> Source:
    """Return the expression of the loss in the model's output."""
    found = leaves(graph.calls[ROOT].result, "outputs")
    places = (place for place, part in found if isinstance(part, Ref) and part.tensor == graph.loss)
    return Source(next(places, "outputs.loss"))
