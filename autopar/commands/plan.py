"""`autopar plan`: finds the best way to split a training, with a proof."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopar import options as options
from autopar.commands import AS_JSON
from autopar.console import print_json, print_note, results, status_line
from autopar.options import CACHE, MANY_FLOPS, TOLERANCE
from autopar.planner.errors import AutoparError, ExitCode
from autopar.planner.files import PLAN_FOLDER, refuse_named_as_file, refuse_replacing
from autopar.runtime.launchers import usable_cores

# The planner and the pages are imported in the functions, because --help and completion do not need
# them.
if TYPE_CHECKING:
    from autopar.codegen.proof.comparison import TrainingComparison
    from autopar.planner.plan.plan import Plan
    from autopar.planner.plan.planned import Planned


STEPS = 3  # of a verification
_QUICK_SECONDS = 10.0
_START_SECONDS = 3.0  # for a process to import torch, if it has a core
_FLOPS_PER_SECOND = 1e9  # of a core, in float64 with small tensors


@options.with_demands(after="pin")
def plan(
    model: options.MODEL,
    gpus: options.GPUS = None,
    device: options.DEVICE = None,
    nodes: options.NODES = None,
    cluster: options.CLUSTER = None,
    arg: options.ARG = None,
    pin: options.PIN = None,
    constraints: options.CONSTRAINTS = None,
    time_limit: options.TIME_LIMIT = None,
    profile: options.PROFILE = None,
    output: options.OUTPUT = Path(),
    force: options.FORCE = False,
    verify: options.VERIFY = None,
    as_json: AS_JSON = False,
    cache: CACHE = True,
    *,
    demands: Mapping[str, str | None],
) -> None:
    """Plan how to split the training of a model, prove the choice, and write the script.

    The script, train.py, runs under torchrun. --gpus or --cluster says what the machines are.
    Several numbers of devices (--gpus 1,2,4,8) are compared, and one is chosen.

    A script that can be verified within seconds is verified; the command exits with 1 if it differs
    from one process.

    Example: autopar plan models_zoo/gpt2.py --arg size=124m --gpus 8 --global-batch 64 -o out
    """
    from autopar.codegen.script.render import FILE_NAME as SCRIPT_NAME
    from autopar.codegen.script.render import refuse_overwriting, write_text
    from autopar.planner.model.model_file import model_path
    from autopar.planner.plan.files.document import FILE_NAME, refuse_foreign, write_plan
    from autopar.planning import scripted

    request = options.request_of(
        model,
        arguments=arg or (),
        gpus=gpus,
        device=device,
        nodes=nodes,
        cluster=cluster,
        pins=pin or (),
        demands=demands,
        constraints=constraints,
        time_limit_seconds=time_limit,
        profile=profile,
        uses_cache=cache,
    )
    refuse_named_as_file(output, expected=PLAN_FOLDER)
    refuse_foreign(output / FILE_NAME)
    refuse_replacing(output / SCRIPT_NAME, model_path(model))
    if not force:
        refuse_overwriting(output / SCRIPT_NAME)
    made, text = scripted(request, output / SCRIPT_NAME)
    write_plan(made.plan, output / FILE_NAME)
    # Write both files before the page, because the reader of a pipe may stop early.
    script = write_text(text, output, force=force)
    tell(made, as_json=as_json)
    if not as_json:
        results().print(f"Written: {output / FILE_NAME}, {script}", soft_wrap=True)
    is_wanted = is_quick(made.plan, usable_cores()) if verify is None else verify
    found = verified(made.plan, output, script) if is_wanted else None
    if not as_json:
        _tell_verified(made.plan, output, found)
    if found is not None and not found.is_within(TOLERANCE):
        raise AutoparError(
            "the script trains otherwise than one process of plain PyTorch",
            where=str(script),
            fix=f"do not train with it; {verify_command(made.plan, output)} tells more",
            exit_code=ExitCode.NEGATIVE,
        )


def _tell_verified(plan: Plan, folder: Path, found: TrainingComparison | None) -> None:
    """Print that the script trains like one process, or the differences, or how to verify it."""
    from autopar.planner.layers import Compile

    command, ranks = verify_command(plan, folder), plan.arrangement.ranks
    if found is None:
        results().print(f"Verify it: {command}", soft_wrap=True)
    elif found.is_within(TOLERANCE):
        steps = len(found.losses)  # more than STEPS, if local steps need whole rounds
        alone = "" if plan.arrangement.compile is Compile.NONE else ", with layers not compiled"
        text = f"Verified: {ranks} CPU processes train {steps} steps as one does{alone} ({command})"
        results().print(text, soft_wrap=True)
    else:
        from autopar.commands.verify import tell_comparison  # with torch

        tell_comparison(found, TOLERANCE)


def tell(planned: Planned, *, as_json: bool) -> None:
    """Print the plan, after a table if several numbers of devices were compared."""
    from autopar.notes import note_fewer
    from autopar.pages.plan_page import curve_json, curve_page, plan_page, work_text
    from autopar.planner.plan.files.document import summary

    curve, point = planned.curve, planned.choice.point
    is_compared = len(curve.trials) > 1
    if as_json:
        counts = {"counts": curve_json(curve)} if is_compared else {}
        print_json({**summary(point.plan), **counts})
        return
    for part in curve_page(curve, planned.choice) if is_compared else ():
        results().print(part)
    for part in plan_page(point.plan):
        results().print(part)
    if work := work_text(point):
        results().print(work, soft_wrap=True)
    if planned.is_from_cache:
        results().print("This is the plan as it was found before; --no-cache searches again.")
    if planned.fewer is not None:
        note_fewer(point.plan, planned.fewer)


def is_quick(plan: Plan, cores: int) -> bool:
    """Whether verifying a plan takes less than ten seconds, as for models of tests and demos.

    False for plans that deliberately train differently from one process.
    """
    from autopar.planner.plan.telling.words import parts_apart, statistics_apart

    if parts_apart(plan) or statistics_apart(plan):
        return False
    processes = plan.arrangement.ranks + 1
    computed = 2 * (STEPS + 1) * plan.step_flops  # by all ranks together, and by one process
    seconds = _START_SECONDS * max(1.0, processes / cores) + computed / _FLOPS_PER_SECOND
    return seconds < _QUICK_SECONDS


def verified(plan: Plan, folder: Path, script: Path) -> TrainingComparison | None:
    """Compare a script with one process; if the comparison fails, print why and return None.

    Layers run uncompiled (eager), because compiling would take much longer than the training.
    """
    from autopar.codegen.proof.verification import check_fits, read_script_of, verify
    from autopar.planner.cluster.sheet import machine_bytes

    try:
        check_fits(plan, machine_bytes())
        ranks = plan.arrangement.ranks
        with status_line(f"training {STEPS} steps on {ranks} processes and on one"):
            given = read_script_of(plan, script, folder)
            return verify(plan, folder, given, steps=STEPS, compiles=False)
    except AutoparError as error:
        why = error.found
    except Exception as error:  # the model may raise anything on CPUs
        why = f"{type(error).__name__}: {error}"
    print_note(f"the plan could not be verified on the CPUs here: {why}")
    return None


def verify_command(plan: Plan, folder: Path) -> str:
    """Return the command that verifies a plan, with a smaller model if the plan's is too large."""
    is_large = plan.step_flops > MANY_FLOPS
    smaller = " --arg NAME=VALUE (a smaller model: see build_model in the model file)"
    return f"autopar verify {folder}{smaller if is_large else ''}"
