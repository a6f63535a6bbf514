"""Runs a script on CPU processes and plain PyTorch in one process, and compares them."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autopar.codegen.emit import script_text
from autopar.codegen.proof.comparison import (
    TrainingComparison,
    compared,
    compared_in_half,
    fusing_notes,
)
from autopar.codegen.proof.draws import AxisSizes
from autopar.codegen.proof.plain import Task, TrainedAlone, task_of, train_alone
from autopar.codegen.proof.plain_half import PlainHalf, train_in_half
from autopar.codegen.proof.plain_sums import RowsMeetError, rounding_note
from autopar.codegen.proof.pretended_device import device_draw_faults
from autopar.codegen.proof.replicas import short_round
from autopar.codegen.proof.script_rank import Job, trained_by_script
from autopar.codegen.script.render import FILE_NAME
from autopar.codegen.subject import subject_of
from autopar.planner.cluster.toml_reading import bytes_text
from autopar.planner.errors import InputError
from autopar.planner.files import read_given
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import AdamWDefaults
from autopar.planner.plan.traced import model_spec
from autopar.planner.precision import Float8

_DIGEST = "# Written by autopar "
_ADAMW_SETTINGS = {one.name: one.name.upper() for one in fields(AdamWDefaults)}
_OUTER_SETTINGS = {name: f"OUTER_{name.upper()}" for name in ("rate", "momentum", "parts", "delay")}
_NEEDED = ("main", "train_step")  # `main` is run, `train_step` is watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of a script that differ from its plan's script."""

    line: int  # the first one's number
    found: tuple[str, ...]
    emitted: tuple[str, ...]
    start: int  # index of `emitted` in the plan's script, without the checksum line


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenScript:
    """A script, and the settings that it shares with the plain training."""

    path: Path
    edits: tuple[Edit, ...]
    seed: int
    clip_norm: float | None
    adamw: AdamWDefaults
    outer: Mapping[str, Any]  # settings of the outer optimizer, if they are in the script


def read_script_of(plan: Plan, path: Path, folder: Path) -> GivenScript:
    """Read the script at a path; a relative path of the model file starts at `folder`."""
    place, subject = path.resolve(), subject_of(plan, folder)
    texts = [script_text(plan, subject, one) for one in (place, place.with_name(FILE_NAME))]
    if not path.is_file():
        raise InputError(
            "there is no script to verify",
            where=str(path),
            expected=f"{FILE_NAME} beside the plan, or the one that --script names",
            fix=f"write it with `autopar emit {folder}`, or say where it is: --script PATH",
        )
    # The script may be a renamed copy, whose docstring still says how to run train.py.
    return min((read_script(place, text) for text in texts), key=lambda one: len(one.edits))


def read_script(path: Path, emitted: str) -> GivenScript:
    """Read a script; `emitted` is the plan's script for the same path."""
    text = read_given(path, what="the script")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(
            f"the script is no Python: {error.msg}", where=f"{path}, line {error.lineno}"
        ) from error
    names = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    if missing := [name for name in _NEEDED if name not in names]:
        raise InputError(
            f"the script has no function {' and no '.join(missing)}",
            where=str(path),
            expected="main, which is run, and train_step, whose steps are watched",
            fix="bring them back under these names",
        )
    settings = dict(_settings(tree))
    return GivenScript(
        path=path,
        edits=edits_of(text, emitted),
        seed=settings.get("SEED", 0),
        clip_norm=settings.get("CLIP_NORM", 1.0),
        adamw=AdamWDefaults(
            **{key: settings[name] for key, name in _ADAMW_SETTINGS.items() if name in settings}
        ),
        outer={key: settings[name] for key, name in _OUTER_SETTINGS.items() if name in settings},
    )


def edits_of(text: str, emitted: str) -> tuple[Edit, ...]:
    """Return the differences between a script and its plan's, except the checksum line."""
    numbers, found = zip(*_lines(text), strict=True) if text.strip() else ((), ())
    planned = [line for _, line in _lines(emitted)]
    matcher = SequenceMatcher(None, planned, found, autojunk=False)
    return tuple(
        Edit(
            line=numbers[j1] if j1 < len(numbers) else len(text.splitlines()) + 1,
            found=tuple(found[j1:j2]),
            emitted=tuple(planned[i1:i2]),
            start=i1,
        )
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    )


def carried_over(script: GivenScript, emitted: str, other: str) -> str:
    """Return another plan's script, `other`, with the edits that people made in this script."""
    lines = [line for _, line in _lines(emitted)]
    others = [line for _, line in _lines(other)]
    places = {
        own + offset: there + offset
        for own, there, size in SequenceMatcher(None, lines, others, False).get_matching_blocks()
        for offset in range(size)
    }
    for edit in reversed(script.edits):
        last = edit.start + len(edit.emitted)
        whole = range(edit.start, last) or range(edit.start - 1, edit.start)
        there = [places.get(line, -1) for line in whole]
        if there != list(range(there[0], there[0] + len(there))) or there[0] < 0:
            raise InputError(
                "a changed line has no counterpart in the script of the smaller model",
                where=f"{script.path}, line {edit.line}",
                fix="verify the script with the whole model, without --arg",
            )
        first = there[0] + (not edit.emitted)
        others[first : first + len(edit.emitted)] = edit.found
    return "\n".join(others) + "\n"


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, except the checksum line."""
    return [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.startswith(_DIGEST)
    ]


def _settings(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a script with plain values."""
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            try:
                yield one.targets[0].id, ast.literal_eval(one.value)
            except ValueError:
                continue


_RECOMPUTING = ("recompute(", "checkpoint(")  # a script's calls that recompute layers
MANY_FLOPS = 10**12  # of all 16-bit steps together; more FLOPs take minutes
# A script counts as hung after LEAST_PATIENCE seconds, plus SLOWER × its ranks × the time of one
# process.
LEAST_PATIENCE, SLOWER = 90.0, 5.0
PROCESS_BYTES = 300 * 2**20  # of Python with torch, without any model
# Bytes per parameter: in float64 its value, its gradient and AdamW's two moments, and copies of its
# first and last value and its gradient; in fp32 the first and last values of two more trainings.
STATE_BYTES = 72


COMPILING_SECONDS = 300.0  # allowed for ranks that compile at once
_WITHOUT_COMPILING = "TORCHDYNAMO_DISABLE"  # if set to 1, torch.compile compiles nothing


def verify(
    plan: Plan,
    folder: Path,
    script: GivenScript,
    *,
    steps: int,
    half_steps: int = 0,
    compiles: bool = True,
) -> TrainingComparison:
    """Return how far a script is from one process of plain PyTorch.

    Both are trained in float64 without random numbers; the random numbers are compared separately.
    A plan in 16 bits is also compared in that dtype, for `half_steps`. Draws of recomputed layers
    are checked on a pretended device. If `compiles` is false, layers that the plan compiles run
    uncompiled (eager). A relative path of the model file starts at the working directory, or at
    `folder`.
    """
    task = replace(
        task_of(plan, model_spec(plan, folder), steps=steps),
        seed=script.seed,
        clip_norm=script.clip_norm,
        adamw=script.adamw,
    )
    half_steps = steps_in_half(plan, half_steps, steps)
    if task.local is not None:
        local = replace(task.local, counting_script=str(script.path), **script.outer)
        every, delay = short_round(local.parts, local.delay)
        steps, half_steps = -(-max(steps, 2 * every) // every) * every, 0
        task = replace(task, steps=steps, local=replace(local, every=every, delay=delay))
    begun = time.monotonic()
    expected, not_compressed = _trained_alone(task, plan)
    half, notes = _trained_in_half(plan, task, half_steps)
    ranks = plan.arrangement.ranks
    patience = LEAST_PATIENCE + SLOWER * ranks * (time.monotonic() - begun)
    settings, not_compiled = _compiled_here(plan, compiles=compiles)
    if plan.arrangement.compile.takes_layers and not settings:
        patience += COMPILING_SECONDS
    with TemporaryDirectory(prefix="autopar-verify-") as name:
        job = Job(
            folder=Path(name),
            patience_seconds=patience,
            clip_norm=script.clip_norm,
            compresses=not not_compressed,
            counts_messages=plan.arrangement.compile.fuses_messages and not settings,
            exact=_options(steps, "float64"),
            in_half=() if half is None else _options(half_steps, half[0].dtype),
        )
        found = trained_by_script(script.path, ranks, job, settings)
    comparison = compared(found["exact"], expected, axes_of(plan))
    if half is not None:
        comparison = replace(comparison, half=compared_in_half(found["half"], *half))
    faults, more = _draws_again(plan, script) if expected.draws else ((), ())
    notes = (
        *notes,
        *_plan_notes(plan, task),
        *not_compressed,
        *not_compiled,
        *fusing_notes(found["exact"], script.path),
        *more,
    )
    return replace(comparison, faults=(*comparison.faults, *faults), notes=notes)


def _trained_alone(task: Task, plan: Plan) -> tuple[TrainedAlone, tuple[str, ...]]:
    """Train in one process; return a note if it does not compress gradients as the plan does."""
    if plan.arrangement.compression.rounds_sums:
        return train_alone(task), (rounding_note(plan),)
    try:
        return train_alone(task), ()
    except RowsMeetError:
        sums = plan.arrangement.compression.sums
        note = (
            f"gradients are summed as they are, not {sums}: rows of a data rank depend on others', "
            "so one process cannot tell each rank's gradients"
        )
        return train_alone(replace(task, sums=None)), (note,)


def _plan_notes(plan: Plan, task: Task) -> Iterator[str]:
    """Yield notes on what the comparison leaves out."""
    arranged = plan.arrangement
    if arranged.compression.keeps_lost and arranged.precision.is_half:
        yield f"nothing is compared in {arranged.precision} with compressed gradients"
    if arranged.float8 is not Float8.NONE:
        yield f"products are in float8 when {arranged.precision} is compared, not in float64"
    if task.local is not None:
        yield (
            f"one process played all replicas; outer steps follow after {task.local.every} local "
            f"steps, not after {arranged.sync_every}, and only float64 is compared"
        )


def _compiled_here(plan: Plan, *, compiles: bool) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return environment variables that turn torch.compile off, if it must be, and a note why."""
    if not plan.arrangement.compile.takes_layers or (compiles and has_cpp_compiler()):
        return {}, ()
    why = "torch.compile finds no C++ compiler here (g++)" if compiles else ""
    return {_WITHOUT_COMPILING: "1"}, (f"layers ran without being compiled: {why}",) if why else ()


def has_cpp_compiler() -> bool:
    """Whether torch.compile can compile for this machine's CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def steps_in_half(plan: Plan, asked: int, steps: int) -> int:
    """Return the number of steps to compare in 16 bits: fewer than requested if they are slow."""
    if not plan.arrangement.precision.is_half or plan.arrangement.compression.keeps_lost:
        return 0
    return min(asked, max(steps, MANY_FLOPS // plan.step_flops))


def axes_of(plan: Plan) -> AxisSizes:
    """Return the axes of a plan's ranks."""
    own = plan.arrangement
    return AxisSizes(
        pipeline=own.pipeline, data=own.data, tensor=own.tensor, microbatches=own.microbatches
    )


def _options(steps: int, dtype: str) -> list[str]:
    return ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]


def _trained_in_half(
    plan: Plan, task: Task, steps: int
) -> tuple[tuple[PlainHalf, PlainHalf] | None, tuple[str, ...]]:
    """Train in the plan's 16-bit dtype with plain PyTorch, or return a note why this CPU cannot."""
    if not steps:
        return None, ()
    precision = plan.arrangement.precision
    try:
        return train_in_half(replace(task, steps=steps, dtype=precision.torch_name)), ()
    except (RuntimeError, NotImplementedError) as error:
        why = str(error).partition("\n")[0]
        return None, (f"nothing is compared in {precision}: plain PyTorch on a CPU says {why}",)


def _draws_again(plan: Plan, script: GivenScript) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return faults in the draws of recomputed layers, and notes if they could not be checked."""
    text = script.path.read_text(encoding="utf-8")
    if not any(word in text for word in _RECOMPUTING):
        return (), ()
    arranged = plan.arrangement
    first_of_stages = range(0, arranged.ranks, arranged.ranks // arranged.pipeline)
    try:
        return device_draw_faults(script.path, first_of_stages, arranged.ranks), ()
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-2:]
        note = f"random numbers of recomputed layers are not compared: {' '.join(why)}"
        return (), (note,)


def check_fits(plan: Plan, memory_bytes: int) -> None:
    """Raise if this machine lacks memory for plain PyTorch's process, or for the script's."""
    needed_bytes = STATE_BYTES * plan.model.parameters
    if needed_bytes > memory_bytes:
        raise InputError(
            f"one process would need {bytes_text(needed_bytes)} to train {plan.model.name} in "
            f"float64, and this machine has {bytes_text(memory_bytes)}",
            fix="verify a small model of the same file under the same degrees: "
            "autopar verify PLAN --arg layers=… (see its build_model)",
        )
    ranks = plan.arrangement.ranks
    if ranks * PROCESS_BYTES > memory_bytes:
        raise InputError(
            f"the script would run in {ranks:,} processes here, of {bytes_text(PROCESS_BYTES)} "
            f"each, and this machine has {bytes_text(memory_bytes)}",
            fix="plan for fewer data ranks (--pin dp=2), and verify that",
        )
