"""`autopar verify`: compares a plan's script with one process of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from autopar.codegen.emit import script_text
from autopar.codegen.proof.comparison import TIMES, Difference, InHalf, TrainingComparison
from autopar.codegen.proof.plain_loop import FILE_NAME as PLAIN_NAME
from autopar.codegen.proof.plain_loop import plain_loop
from autopar.codegen.proof.verification import (
    GivenScript,
    carried_over,
    check_fits,
    read_script_of,
    verify,
)
from autopar.codegen.script.render import FILE_NAME, refuse_overwriting
from autopar.codegen.subject import subject_of
from autopar.commands import AS_JSON
from autopar.console import print_json, print_note, results, status_line
from autopar.notes import note_parts_apart
from autopar.options import ARG, CACHE, MANY_FLOPS, MOVED_MODEL, PLAN, TOLERANCE, difference, whole
from autopar.pages.plan_page import plain_table
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.sheet import machine_bytes
from autopar.planner.errors import ExitCode, InfeasibleError, InputError
from autopar.planner.files import refuse_replacing, write_whole
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.again import arrangement_constraints, whole_constraints
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planner.plan.traced import check_unchanged, model_spec, with_model
from autopar.planning import make_plan, traced_plan

_MOST_SHOWN = 4


def verify_plan(
    plan: PLAN,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script", metavar="FILE", help="The script. Default: train.py beside the plan."
        ),
    ] = None,
    model: MOVED_MODEL = None,
    arg: ARG = None,
    steps: Annotated[int, whole("--steps", least=1, text="Steps to train.")] = 5,
    half_steps: Annotated[
        int,
        whole("--half-steps", least=0, text="Train at most so many steps in bf16 or fp16."),
    ] = 30,
    tolerance: Annotated[
        float,
        difference("--tolerance", text="Largest difference to accept."),
    ] = TOLERANCE,
    plain: Annotated[
        bool,
        typer.Option("--plain", help=f"Train nothing; write {PLAIN_NAME}, a loop for one device."),
    ] = False,
    cache: CACHE = True,
    as_json: AS_JSON = False,
) -> None:
    """Compare some steps of the script, on CPU processes, with one process of plain PyTorch.

    The script is run as it is, changed by hand or not. The one process trains the model that
    build_model() returns in plain PyTorch, on the whole global batch. Both compute in float64,
    without random numbers. One more step has random numbers, and the numbers drawn are compared. A
    plan in bf16 or fp16 is also trained in that dtype, beside plain PyTorch with fp32 masters: both
    must begin with the same weights, and after --half-steps the script may be at most twice as far
    from fp32 as plain PyTorch. Exits with 1 if anything differs, with 7 if the script fails. With
    --arg a smaller model of the same file is used, planned with few rows under the plan's own
    degrees, schedule and splits; changes by hand are carried over.

    With --plain a loop of plain PyTorch is written beside the script: one process, the same weights
    and rows, for you to run and compare.

    Example: autopar verify out/plan.json --arg layers=2 --arg dim=96 --arg seq_len=64 --steps 3
    """
    folder = plan if plan.is_dir() else plan.parent
    found = traced_plan(with_model(read_plan(plan), folder, model), folder, uses_cache=cache)
    given = read_script_of(found, folder / FILE_NAME if script is None else script, folder)
    if plain:
        _write_plain(found, folder, given, is_smaller=bool(arg))
        return
    with TemporaryDirectory(prefix="autopar-smaller-") as name:
        if arg:
            large, found = found, _noted_smaller_plan(found, folder, arg)
            given = _carried_over(given, large, found, folder, Path(name))
        check_fits(found, machine_bytes())
        if found.step_flops > MANY_FLOPS:
            print_note(
                f"a step computes about {found.step_flops / 1e12:,.0f} TFLOP, on CPUs and in "
                "float64: verify a smaller model instead (--arg; see build_model in the model file)"
            )
        ranks = found.arrangement.ranks
        with status_line(f"training {steps} steps on {ranks} processes and on one"):
            comparison = verify(found, folder, given, steps=steps, half_steps=half_steps)
    equal = comparison.is_within(tolerance)
    if as_json:
        verdict = {"tolerance": tolerance, "is_equal": equal}
        subject = {"model": found.model.name, "arguments": dict(found.model.arguments)}
        edits = {"script": str(given.path), "edits": [asdict(edit) for edit in given.edits]}
        print_json({**asdict(comparison), **verdict, **subject, **edits}, indent=None)
    else:
        _tell_edits(given)
        tell_comparison(comparison, tolerance)
    if not equal:
        note_parts_apart(found)
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _write_plain(plan: Plan, folder: Path, given: GivenScript, *, is_smaller: bool) -> None:
    """Write the loop of plain PyTorch beside the script."""
    if is_smaller:
        raise InputError("--plain and --arg do not go together", fix="plan the smaller model first")
    path, subject = given.path.with_name(PLAIN_NAME), subject_of(plan, folder)
    refuse_overwriting(path, fix="move it away")
    refuse_replacing(path, subject.file.path)
    write_whole(path, plain_loop(plan, subject, given, path), what="the loop")
    results().print(f"Written: {path}", soft_wrap=True)


def _carried_over(
    given: GivenScript, large: Plan, small: Plan, folder: Path, place: Path
) -> GivenScript:
    """Write the script of a smaller plan, with the changes made by hand in the given script."""
    emitted = script_text(large, subject_of(large, folder), given.path)
    path = (place / FILE_NAME).resolve()
    text = script_text(small, subject_of(small, folder), path)
    path.write_text(carried_over(given, emitted, text), encoding="utf-8")
    return replace(given, path=path)


def _noted_smaller_plan(plan: Plan, folder: Path, arguments: Sequence[str]) -> Plan:
    """Return the plan of the model with these arguments; note what differs from the given plan."""
    with status_line("planning the smaller model"):
        smaller = smaller_plan(plan, folder, arguments)
    alike = "its modules are split as in the plan"
    if unlike := sorted(splits_of(plan) - splits_of(smaller)):
        more = ", …" * (len(unlike) > _MOST_SHOWN)
        shown = ", ".join(unlike[:_MOST_SHOWN]) + more
        alike = f"only the given plan splits {shown}"
    print_note(
        f"what is verified is {plan.model.name} with {', '.join(arguments)}, under the plan's "
        f"degrees: {arrangement_words(smaller.arrangement)}; {alike}"
    )
    return smaller


def _tell_edits(given: GivenScript) -> None:
    """Print the lines of the script that differ from its plan's script."""
    if not given.edits:
        return
    count = len(given.edits)
    places = "1 place" if count == 1 else f"{count} places"
    lines = [f"{given.path.name} differs from the script that its plan gives, in {places}:"]
    for edit in given.edits[:_MOST_SHOWN]:
        lines.append(f"  line {edit.line}")
        for mark, texts in (("-", edit.emitted), ("+", edit.found)):
            lines += [f"    {mark} {text}" for text in texts[:_MOST_SHOWN]]
            lines += [f"    {mark} …"] * (len(texts) > _MOST_SHOWN)
    lines += ["  …"] * (count > _MOST_SHOWN)
    results().print("\n".join(lines) + "\n", soft_wrap=True)


def tell_comparison(comparison: TrainingComparison, tolerance: float) -> None:
    """Print whether the figures of a script equal those of plain PyTorch in one process."""
    table = plain_table("", "what", "largest difference", "of", "", left=1)
    rows = (
        ("weights and buffers at the start", comparison.initial),
        ("loss", comparison.loss),
        ("norm of all gradients", comparison.norm),
        ("gradients of the first step", comparison.gradient),
        ("parameters after the last step", comparison.parameter),
    )
    for what, found in rows:
        is_equal = found.largest <= (0 if found is comparison.initial else tolerance)
        verdict = "equal" if is_equal else "DIFFERS"
        table.add_row(what, f"{found.largest:.1e}", found.name, verdict)
    verdict = "DIFFERS" if comparison.faults else "equal"
    table.add_row("other checks: values at the start, random numbers, clipping", "", "", verdict)
    results().print(table)
    for fault in comparison.faults:
        results().print(f"- {fault}", soft_wrap=True)
    if comparison.half is not None:
        _tell_half(comparison.half)
    for note in comparison.notes:
        print_note(note)
    losses = ", ".join(f"{loss:.6f}" for loss in comparison.losses)
    results().print(f"losses of one process: {losses}\ntolerance: {tolerance:g}")


def _tell_half(half: InHalf) -> None:
    table = plain_table("", f"in {half.dtype}", "times as far from fp32", "of", "", left=1)
    verdict = "DIFFERS" if half.faults else "equal"
    table.add_row("weights and buffers at the start", "", half.initial.name, verdict)
    rows = (
        (f"losses of {half.steps} steps", Difference(largest=half.loss, name="")),
        ("weights and buffers after them", half.weights),
    )
    for what, found in rows:
        verdict = "near enough" if found.largest <= TIMES else "DIFFERS"
        table.add_row(what, f"{found.largest:.2f}", found.name, verdict)
    results().print(table)
    for fault in half.faults:
        results().print(f"- in {half.dtype}, {fault}", soft_wrap=True)
    results().print(
        f"allowed: {TIMES:g} times as far as plain PyTorch in {half.dtype} with fp32 masters"
    )


def smaller_plan(plan: Plan, folder: Path, arguments: Sequence[str]) -> Plan:
    """Return a plan for the model with other arguments, with the same degrees.

    Modules are split and recomputed as in the given plan, unless the smaller model cannot follow
    all of these rules: then none is kept.
    """
    spec = model_spec(plan, folder)
    check_unchanged(plan, model_path(spec))
    given = (argument.partition("=") for argument in arguments)
    chosen = dict(plan.model.arguments) | {key: value for key, _, value in given}
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)

    def planned(constraints: Constraints) -> Plan:
        texts = [f"{key}={value}" for key, value in chosen.items()]
        return make_plan(spec, texts, plan.cluster, constraints)

    with suppress(InputError, InfeasibleError):  # a smaller model may lack a module or an axis
        return planned(whole_constraints(plan, axes, layers))
    try:
        return planned(arrangement_constraints(plan))
    except InfeasibleError as error:
        raise _refusal(plan, arguments, error) from None


def _refusal(plan: Plan, arguments: Sequence[str], error: InfeasibleError) -> InfeasibleError:
    arranged = plan.arrangement
    sizes = f", and sizes that {arranged.tensor} divides" if arranged.tensor > 1 else ""
    return InfeasibleError(
        f"{plan.model.name} with {', '.join(arguments)} cannot be arranged as the plan is "
        f"({arrangement_words(arranged)}): {error.found}",
        fix=f"give it layers for {arranged.pipeline * arranged.stages_per_rank} stages{sizes}",
    )


def splits_of(plan: Plan) -> set[str]:
    """Return which ops are split along which axes; equal layers are listed once."""
    return {
        f"{one.op} of {line.name}{'.' * bool(one.module)}{one.module} along {one.axis}"
        for line in plan.classes
        for one in line.splits
    }
