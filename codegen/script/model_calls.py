"""Turns a model file into the script's calls for building, loading and evaluating."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.modules import Imported
from autopar.codegen.forward.targets import DIVISOR
from autopar.codegen.script import ScriptSetting
from autopar.codegen.script.layer_lists import crossings_follow_rows
from autopar.codegen.script.parameter_tables import half_buffers
from autopar.codegen.script.render import sorted_imports
from autopar.codegen.script.settings_lines import has_batch_norm, parts, sums_rows
from autopar.codegen.subject import PlannedSubject
from autopar.codegen.text.expressions import is_identifier
from autopar.codegen.text.values import (
    KNOWN,
    Bracketed,
    Source,
    assigned,
    call,
    identifier,
    literal,
    remark,
    tuple_of,
)
from autopar.planner.cluster.cluster import Backend
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.errors import InputError
from autopar.planner.findings.rows import meeting_rows, parts_have_weights
from autopar.planner.graph.graph import Graph, batch_key
from autopar.planner.graph.ops import Ref
from autopar.planner.model.functions import sources
from autopar.planner.model.guard import folder_from, import_name
from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.declared.limits import least_rows, takes_whole_gradients
from autopar.planner.plan.plan import Plan
from autopar.planner.rules.rule import is_random
from autopar.runtime.ranks.user_code import source_digest

NOTHING: Mapping[str, Any] = MappingProxyType({})
MODULE = "model_file"  # the script's name for the model file

# The script's names of a model file's functions.
_OPTIONAL: Mapping[str, str] = {
    "build_dataset": "new_dataset",
    "build_eval_dataset": "new_eval_dataset",
    "build_collate": "new_collate",
    "build_optimizer": "new_optimizer",
    "build_scheduler": "new_scheduler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """The parts of a script that use the model file."""

    imports: Source
    functions: Source
    loss: Source  # the expression of the loss, from `outputs` and `batch`


def model_calls(
    file: ModelFile,
    classes: Iterable[Imported],
    destination: Path,
    *,
    is_half: bool,
    evaluates: bool = True,
) -> ModelCalls:
    """Return how a script at `destination` imports a model file and calls its functions."""
    return ModelCalls(
        imports=_imports(file, sorted(set(classes)), destination),
        functions=Source("\n".join(_functions(file, is_half=is_half, evaluates=evaluates))),
        loss=Source("compute_loss(outputs, batch)" if file.loss else "loss_in(outputs)"),
    )


def model_arguments(graph: Graph, *, takes_all: bool, has_weights: bool) -> Source:
    """Return the arguments for the model: the whole batch, or some of its entries."""
    keywords = graph.calls[""].keywords
    names = [name for name, value in keywords if isinstance(value, Ref)]
    plain = [f"{identifier(n)}={literal(v)}" for n, v in keywords if not isinstance(v, Ref)]
    if takes_all or (set(names) == set(map(batch_key, graph.inputs)) and not has_weights):
        parts = ["**batch"]
    else:
        parts = [f"{identifier(name)}=batch[{literal(name)}]" for name in names]
    return Source(", ".join([*parts, *plain]))


def _imports(file: ModelFile, classes: Sequence[Imported], destination: Path) -> Source:
    """Return the statements that import the model file, from any working directory."""
    known = import_name(file.path)
    folder = folder_from(destination, file.path)
    here = "Path(__file__).resolve().parent"
    place = here if folder == "." else f"{here} / {literal(Path(folder).as_posix())}"
    lines, after = [], list[str]()
    is_plain = all(map(is_identifier, known.name.split(".")))
    if is_plain:
        lines.append(f"import {known.name} as {MODULE}")
    else:
        after.append(f"{MODULE} = importlib.import_module({literal(known.name)})")
    for one in classes:
        _check_name(one)
        outer, _, inner = one.qualname.partition(".")
        called = "" if one.name == outer else f" as {identifier(one.name)}"
        if one.module == known.name and (inner or not is_plain):
            after.append(f"{identifier(one.name)} = {MODULE}.{_dotted(one.qualname)}")
        elif inner:
            lines.append(f"from {_dotted(one.module)} import {identifier(outer)}")
            after.append(f"{identifier(one.name)} = {_dotted(one.qualname)}")
        else:
            lines.append(f"from {_dotted(one.module)} import {identifier(outer)}{called}")
    said = remark(
        "The folder of the model file, relative to this script; change it when either moves."
    )
    path = f"{said}\n{call('sys.path.insert', '0', call('str', place)).laid_out()}"
    imported = sorted_imports(lines)
    parts = [path, *([imported] if imported else [])]
    return Source("\n".join([*parts, *(["", *after] if imported and after else after)]))


def _check_name(one: Imported) -> None:
    """Raise for a class (an autograd Function) that would hide a name of the script."""
    if one.name in KNOWN:
        raise InputError(
            f"the plan needs {one.module}.{one.qualname}, but {one.name} already has another "
            "meaning in scripts",
            fix="give the class another name",
        )


def _dotted(module: str) -> str:
    return ".".join(identifier(part) for part in module.split("."))


def _functions(file: ModelFile, *, is_half: bool, evaluates: bool) -> Iterator[str]:
    """Yield `new_model = …` and the model file's other functions."""
    yield _bound(file, file.factory, "new_model")
    yield _bound(file, "example_batch", "new_batch")
    # the plain loop, which does not evaluate, adds these entries to its batches itself
    plain = file.plain_entries() if evaluates else NOTHING
    around = "in_float32" if is_half else ""
    if file.loss is not None:
        yield _bound(file, "loss", "compute_loss", around=around, plain=plain)
    if evaluates and file.metrics is not None:
        yield _bound(file, "metrics", "compute_metrics", around=around, plain=plain)
    for name, own in _OPTIONAL.items():
        if getattr(file, name) is not None and (evaluates or name != "build_eval_dataset"):
            yield _bound(file, name, own)


def _bound(
    file: ModelFile, name: str, own: str, *, around: str = "", plain: Mapping[str, Any] = NOTHING
) -> str:
    """Return the assignment of a model file's function, with the arguments given when planning.

    `plain` are the batch's entries that are no tensors.
    """
    function = getattr(sys.modules[import_name(file.path).name], name)
    parameters = inspect.signature(function).parameters
    share = [f"{identifier(k)}={literal(v)}" for k, v in file.arguments if k in parameters]
    made: Bracketed | str = f"{MODULE}.{identifier(name)}"
    if share:
        made = call("partial", made, *share)
    if plain:
        given = (f"{identifier(k)}={literal(v)}" for k, v in plain.items())
        made = call("with_plain", made, *given)
    if around:
        made = call(around, made)
    return f"{own} = {made}" if isinstance(made, str) else assigned(own, made)


def model_source(path: Path) -> Source:
    """Return the constants with the paths of a model file and its imports, and their digest."""
    files = sources(path)
    names = (Path(os.path.relpath(file, path.parent)).as_posix() for file in files)
    lines = [
        assigned("MODEL_FILES", tuple_of(*map(literal, names)), "Python files of the model"),
        f"MODEL_DIGEST = {literal(source_digest(files))}  # checksum of their code in the plan",
    ]
    return Source("\n".join(lines))


def images(plan: Plan, subject: PlannedSubject) -> list[ScriptSetting]:
    """Return the setting that names image inputs, if they should be in channels_last order.

    Printed forwards may view images with sizes of the usual order, so scripts with them keep it.
    """
    opened = subject.opened
    if Backend(plan.machines.backend).is_on_cpu or opened.classes or opened.stages:
        return []
    found = plan.graph.images
    meaning = "inputs to put in channels_last order, in which GPUs convolve faster"
    return [ScriptSetting("IMAGES", literal(found), meaning)] if found else []


def reading(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that yields a rank's microbatches."""
    arguments = ["new_batch", "options", "mesh", "rows=(MICROBATCHES, MICROBATCH)"]
    if plan.model.has_dataset:
        arguments += ["dataset=dataset", "skip=keeper.rows", *_fewer_rows(plan, subject)]
    if subject.file.build_collate is not None:
        arguments.append("new_collate=new_collate")
    arguments += _counting(subject.opened) or ["sums_rows=True"] * sums_rows(plan)
    arguments += _own_rows(subject.opened)
    if images(plan, subject):
        arguments.append("channels_last=IMAGES")
    laid_out = call("read_batches", *arguments).laid_out(before=11, indent=4)
    return Source(laid_out.replace(f"{_UNREPEATED},\n", f"{_UNREPEATED},  # {_WHY_UNREPEATED}\n"))


_UNREPEATED = "may_repeat=False"
_WHY_UNREPEATED = "ops mix the rows of a microbatch, so it must not contain a row twice"


def _counting(opened: OpenedSource) -> list[str]:
    """Return the arguments with the functions that count targets, if the loss needs them."""
    found = [f"{'terms' if opened.weighs_terms else 'targets'}=valid_targets"]
    found += [f"divisor={DIVISOR}"] * (opened.divisor is not None)
    return found if opened.valid_targets is not None else []


def _own_rows(opened: OpenedSource) -> list[str]:
    """Return the arguments that give each tensor rank only its own rows, if it needs no others."""
    return ["rows_over=mesh.tensor", "own=OWN_ROWS"] if opened.own_rows else []


def waits_for_last(arrangement: Arrangement) -> Source:
    """Return a comment on what only a step's last microbatch does, or "" if there is nothing."""
    waits = min(arrangement.averaging_ranks, arrangement.microbatches) > 1
    if not waits or arrangement.zero.divides_parameters:
        return Source()
    if arrangement.zero.keeps_gathered:
        return Source("the last microbatch frees the gathered parameters")
    return Source("gradients are averaged in the last microbatch")


def seeding(plan: Plan) -> Source:
    """Return a comment on ranks whose random numbers differ, or "" if there are none."""
    arranged = plan.arrangement
    degrees = (("data", arranged.data), ("pipeline", arranged.pipeline))
    axes = " and ".join(axis for axis, degree in degrees if degree > 1)
    draws = axes and any(is_random(op) for op in plan.graph.ops)
    return Source(f"  # each {axes} rank has its own dropout masks" if draws else "")


def why_weighed(plan: Plan, opened: OpenedSource) -> Source:
    """Return a comment on why microbatches have weights, or "" if they have none."""
    if opened.weighs_terms:
        return Source("The loss adds several means, each weighted by its own valid targets.")
    if opened.valid_targets is not None:
        return Source(
            "The loss is a mean over valid targets, so a microbatch is weighted by how many it has."
        )
    return Source("The loss is a sum over rows, not a mean." if sums_rows(plan) else "")


def _fewer_rows(plan: Plan, subject: PlannedSubject) -> Iterator[str]:
    """Yield arguments of `read_batches` for a model that does not take every number of rows."""
    is_whole = plan.arrangement.data * plan.arrangement.microbatches == 1
    least = least_rows(plan.graph, data=plan.arrangement.averaging_ranks)
    if _is_of_planned_rows(plan, subject) or not (is_whole or parts_have_weights(plan.graph)):
        yield "fewest=MICROBATCH"
    elif least > 1:
        yield f"fewest={least}"
    if not is_whole and (has_batch_norm(plan.graph) or meeting_rows(plan.graph) is not None):
        yield _UNREPEATED


def _is_of_planned_rows(plan: Plan, subject: PlannedSubject) -> bool:
    """Whether code of the script only works for the planned number of rows."""
    opened = subject.opened
    is_fixed = plan.graph.fixed_batch is not None and opened.is_printed
    is_pipelined = plan.arrangement.pipeline > 1
    follows = not is_pipelined or crossings_follow_rows(opened, subject.axes)
    return is_fixed or opened.splits_rows or not follows


def evaluation(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that sets up evaluation: loss, rows, and weights of microbatches."""
    given = (_losses(plan, subject), rank_modules(plan), _rows(plan, subject))
    made = call("Evaluation", *given, *_weighing(plan, subject))
    return Source(made.laid_out(before=17, indent=4))


def first_step(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that compares the loss of the first microbatch with plain PyTorch's."""
    arguments = ["data", _losses(plan, subject), rank_modules(plan), "plain", "options", "mesh"]
    if subject.opened.weighs_terms:
        arguments.append("terms=valid_targets")
    if subject.opened.own_rows:
        arguments += [*_own_rows(subject.opened), "rows=MICROBATCH"]
    return Source(call("check_first_step", *arguments).laid_out(before=15, indent=8))


def whole_gradients(plan: Plan) -> Source:
    """Return a comment on why losses are divided by the number of data ranks, or ""."""
    if not takes_whole_gradients(plan.graph, plan.arrangement):
        return Source("")
    named = [one.name for one in plan.graph.own_backwards]
    return Source(f"{(named or ['The hook'])[0]} gets gradients as large as on one device")


def plain_model(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call `PlainModel(…)`, with all that a loss in plain PyTorch needs."""
    given = ["new_model", "new_batch"]
    if subject.file.loss:
        given.append("compute_loss")
    if half_buffers(plan):
        given.append("half_buffers=HALF_BUFFERS")
    if plan.graph.own_gradients:
        given.append("needs_gradients=True")
    return Source(call("PlainModel", *given).flat)


def rank_modules(plan: Plan) -> Source:
    """Return the list of the rank's modules."""
    return Source("model.parts" if plan.arrangement.pipeline > 1 else "[model]")


def _losses(plan: Plan, subject: PlannedSubject) -> str:
    """Return the function that computes the losses of microbatches."""
    split = ", tensor=mesh.tensor" if subject.opened.loss is not None else ""
    is_pipelined = plan.arrangement.pipeline > 1
    losses = "model.losses_of" if is_pipelined else f"one_by_one(partial(loss_of, model{split}))"
    return f"with_gradients({losses})" if plan.graph.own_gradients else losses


def _rows(plan: Plan, subject: PlannedSubject) -> Bracketed:
    """Return the call that reads rows.

    If ops mix rows, or the model takes only one number of rows, no row is repeated to fill a batch.
    """
    arguments = ["new_batch", "new_eval_dataset", "options", "mesh", "microbatch=MICROBATCH"]
    if subject.file.build_collate is not None:
        arguments.append("new_collate=new_collate")
    arguments += _own_rows(subject.opened)
    if plan.graph.fixed_batch is not None or meeting_rows(plan.graph) is not None:
        arguments.append("fills=False")
    return call("read_evaluation", *arguments)


def _weighing(plan: Plan, subject: PlannedSubject) -> Iterator[str]:
    yield from _counting(subject.opened)
    if sums_rows(plan):
        yield f"microbatches={parts(plan.arrangement)}"
    if subject.file.metrics is not None:
        is_split = subject.opened.metrics is not None
        whole = "partial(whole_metrics, tensor=mesh.tensor)" if is_split else "compute_metrics"
        yield f"metrics={whole}"


def outer_settings(plan: Plan) -> Iterator[ScriptSetting]:
    """Yield the settings of the outer steps that follow local steps, if there are any."""
    arranged = plan.arrangement
    if arranged.is_local:
        yield ScriptSetting(
            "OUTER_RATE", literal(arranged.outer.rate), "learning rate of outer steps"
        )
        momentum = "Nesterov momentum of outer steps; 0: none"
        yield ScriptSetting("OUTER_MOMENTUM", literal(arranged.outer.momentum), momentum)
    if arranged.outer_parts > 1:
        turns = "parts of the model; in SYNC_EVERY steps each has one outer step"
        yield ScriptSetting("OUTER_PARTS", literal(arranged.outer_parts), turns)
        sent = "steps during which a part is sent, before its outer step"
        yield ScriptSetting("OUTER_DELAY", literal(plan.prediction.outer_delay), sent)


def outer_call(plan: Plan, modules: Source) -> Source:
    """Return the call that builds the outer optimizer, or "" without local steps."""
    given = [modules, "optimizer", "mesh", "lr=OUTER_RATE", "momentum=OUTER_MOMENTUM"]
    given += ["parts=OUTER_PARTS", "delay=OUTER_DELAY"] * (plan.arrangement.outer_parts > 1)
    given += ["on_host=True"] * plan.arrangement.offload.has_outer
    made = call("OuterOptimizer", *given).laid_out(before=12, indent=4)
    return Source(made if plan.arrangement.is_local else "")
