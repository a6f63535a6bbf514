"""`autopar run`: trains by the script of a plan, in a folder that keeps what the run was."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autopar.commands.emit import PLAN
from autopar.console import results, tell_note
from autopar.number_options import whole
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import arrangement_words
from autopar.runs.launching import Ended, launch, torchrun_text
from autopar.runs.meeting import check_meeting_place
from autopar.runs.planned_again import Trained, awaited, left_in, made_ahead, planned_again
from autopar.runs.run_folder import (
    LOGS,
    RUNS,
    Nodes,
    Start,
    copy_checkpoint,
    fill_folder,
    keeps_in_run,
    run_name,
    script_arguments,
    settings_in,
    start_of,
    torchrun_arguments,
    value_given,
)
from autopar.runs.run_metrics import last_event, last_step, lines_of
from autopar.runs.run_record import (
    EXIT_CODES,
    METRICS,
    RECORD,
    RunRecord,
    RunState,
    own_process,
    write_record,
)
from autopar.runtime.ranks.metrics import Event


class DevicesError(AutoparError):
    """This machine has fewer devices than the plan needs of it."""

    exit_code = ExitCode.MISMATCH


class TrainingFailedError(AutoparError):
    """A rank has failed, and no restart was left."""

    exit_code = ExitCode.TRAINING_FAILED


def run(
    plan: PLAN,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="for the script, whose --help lists them"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH|never",
            help="Go on from the newest run of this model; from a run, its checkpoints or one of "
            "them. Else begin anew.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        whole("--gpus", least=1, text="Devices that are there; planned again if PLAN has others."),
    ] = None,
    max_restarts: Annotated[
        int, whole("--max-restarts", least=0, text="How often to start again after a failure.")
    ] = 0,
    nnodes: Annotated[
        int, whole("--nnodes", least=1, text="Machines, each with this command.")
    ] = 1,
    node_rank: Annotated[
        int | None,
        whole("--node-rank", least=0, metavar="R", text="Which of them this is, from 0."),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="The first machine.")
    ] = None,
    master_port: Annotated[
        int, whole("--master-port", least=1, most=65535, text="A free port there.")
    ] = 29500,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of the folder; one that is there goes on."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FOLDER", help="Where runs are; else beside the plan."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option("--script", metavar="FILE", help="Else train.py beside the plan."),
    ] = None,
) -> None:
    """Train by the script of a plan, under torchrun.

    Prints the torchrun command, and keeps plan, script, logs, metrics, environment, checkpoints and
    weights in a folder. Exits with 0 when it is done, 75 when a signal stopped it and a checkpoint
    was written, 7 when it failed. With --gpus N it goes on with fewer or more devices.

    Example: autopar run out --max-restarts 3 -- --steps 1000
    """
    given = tuple(arguments or ())
    nodes = _nodes(nnodes, node_rank, master_addr, master_port, name)
    chosen = _chosen(plan, script, gpus, nodes)
    check_meeting_place(nodes)
    place = ((plan if plan.is_dir() else plan.parent) / RUNS if runs is None else runs).resolve()
    folder = place / run_name(chosen.plan, place, name)
    start = start_of(chosen.plan, place, folder, resume, nodes)
    if gpus not in (None, chosen.plan.arrangement.ranks):
        chosen = _planned_again(chosen, gpus, folder, nodes)
    content, path = chosen.plan, chosen.script
    _make(folder, start, nodes)
    chosen.write()
    command = torchrun_arguments(
        path,
        folder,
        processes=content.arrangement.ranks,
        nodes=nodes,
        max_restarts=max_restarts,
        arguments=script_arguments(path, folder, start, given),
    )
    text = torchrun_text(command)
    fill_folder(folder, chosen.file, path, nodes, text)
    keeps = keeps_in_run(settings_in(path.read_text(encoding="utf-8")), given)
    metrics = Path(value_given("--metrics", given) or folder / METRICS).resolve()
    record = _record(content, folder, start if keeps else None, metrics, text)
    file_name = f"node-{nodes.rank}.json" if nodes.rank else RECORD
    write_record(folder, record, name=file_name)
    _tell_start(folder, start if keeps else None, resume, text, chosen=chosen if gpus else None)
    seen = metrics.stat().st_size if metrics.is_file() else 0
    ended = launch(command)
    state = ended_as(ended, metrics, seen)
    write_record(folder, replace(record, state=state, ended_at=time.time()), name=file_name)
    _tell_end(state, ended, folder, metrics, seen)
    code = EXIT_CODES[state]
    if code:
        raise typer.Exit(int(code))


def _nodes(count: int, rank: int | None, address: str | None, port: int, name: str | None) -> Nodes:
    wanted = {"--node-rank": rank, "--master-addr": address, "--name": name}
    if count == 1:
        if rank or address:
            raise InputError("--node-rank and --master-addr are for several machines: --nnodes")
        return Nodes()
    missing = [option for option, value in wanted.items() if value is None]
    if missing:
        raise InputError(
            f"--nnodes {count} needs {', '.join(missing)}",
            expected="the same --name on each machine: they share one folder of checkpoints",
            fix=f"autopar run PLAN --nnodes {count} --node-rank 0 --master-addr HOST --name first",
        )
    assert rank is not None
    if rank >= count:
        raise InputError(f"--node-rank {rank}", expected=f"0 to {count - 1}")
    return Nodes(count=count, rank=rank, address=address, port=port)


def _chosen(plan: Path, script: Path | None, gpus: int | None, nodes: Nodes) -> Trained:
    """Return the plan that is given, or one that was made ahead for these devices."""
    found = Trained.read(plan)
    if script is not None:
        found = replace(found, script=script)
    if not found.script.is_file():
        raise InputError(f"there is no script {found.script}", fix=f"autopar emit {plan} writes it")
    ranks = found.plan.arrangement.ranks
    devices = ranks if gpus is None else gpus
    _check_devices(devices, nodes)
    if devices == ranks:
        return found
    if script is not None:
        raise InputError(
            f"--script is for the {ranks} devices of the plan, and --gpus says {devices}",
            fix="leave one of them out",
        )
    ahead = made_ahead(found, devices)
    return found if ahead is None else ahead


def _planned_again(chosen: Trained, devices: int, folder: Path, nodes: Nodes) -> Trained:
    """Return another plan of the training, which the first of several machines makes for all.

    All of them take the one of an earlier start: the others might see it before it is replaced.
    """
    if nodes.count > 1 and (found := left_in(folder, chosen, devices, nodes.count)) is not None:
        return found
    if nodes.rank:
        return awaited(chosen, devices, folder, nodes.count)
    return planned_again(chosen, devices, folder, nodes.count)


def _check_devices(ranks: int, nodes: Nodes) -> None:
    if ranks % nodes.count:
        raise InputError(f"{ranks} ranks are not shared out evenly over {nodes.count} machines")
    import torch  # here alone: it takes seconds

    here, needed = torch.cuda.device_count(), ranks // nodes.count
    if torch.cuda.is_available() and here < needed:
        raise DevicesError(
            f"{needed} devices of this machine are needed, and {here} "
            f"{'is' if here == 1 else 'are'} there",
            fix=f"--gpus {here * nodes.count} goes on with those, planned again; --nnodes N shares "
            "them out over machines",
        )


def _make(folder: Path, start: Start, nodes: Nodes) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if start.copied is not None and nodes.rank == 0:
            copy_checkpoint(start.copied, start.checkpoints)
    except OSError as error:
        raise InputError(
            f"nothing can be written to {folder}: {error.strerror}", fix="choose another --runs"
        ) from None


def _record(
    plan: Plan, folder: Path, start: Start | None, metrics: Path, command: str
) -> RunRecord:
    host, process, began = own_process()
    goes_on = None if start is None else start.goes_on_from
    return RunRecord(
        name=folder.name,
        model=plan.model.spec,
        arguments=plan.model.arguments,
        plan=arrangement_words(plan.arrangement),
        predicted_step_seconds=plan.prediction.step_seconds,
        command=command,
        checkpoints=None if start is None else str(start.checkpoints),
        metrics=str(metrics),
        goes_on_from=None if goes_on is None else str(goes_on),
        host=host,
        process=process,
        process_began=began,
        started_at=time.time(),
    )


def _tell_start(
    folder: Path, start: Start | None, resume: str | None, command: str, *, chosen: Trained | None
) -> None:
    print(f"run: {folder}")
    if chosen is not None:
        print(f"plan: {chosen.file} ({arrangement_words(chosen.plan.arrangement)})")
    if start is not None and start.goes_on_from is not None:
        print(f"goes on from {start.goes_on_from}; checkpoints: {start.checkpoints}")
    elif start is not None and resume == "auto":
        print("no run of this model has kept anything: it begins anew")
    print(f"{command}\n", flush=True)


def ended_as(ended: Ended, metrics: Path, seen: int) -> RunState:
    """Tell how a run has ended: torchrun returns 1 for whatever is not 0."""
    if ended.code == 0:
        return RunState.FINISHED
    if last_event(lines_of(metrics, start=seen)) == Event.PREEMPTED:
        return RunState.PREEMPTED
    return RunState.INTERRUPTED if ended.is_signalled else RunState.FAILED


def _tell_end(state: RunState, ended: Ended, folder: Path, metrics: Path, seen: int) -> None:
    lines = lines_of(metrics, start=seen)
    step = last_step(lines)
    last = f"after step {step['step']:,}" if step else "before its first line"
    if ended.leftovers:
        tell_note(f"torchrun was killed; {ended.leftovers} of its processes were ended, too")
    if state is RunState.FINISHED:
        results().print(f"finished: {folder}", soft_wrap=True)
    elif state is RunState.PREEMPTED:
        results().print(f"stopped by a signal, and kept: --resume {folder} goes on", soft_wrap=True)
    elif state is RunState.INTERRUPTED:
        results().print(f"stopped by a signal {last}, and nothing was kept", soft_wrap=True)
    else:
        why = f": {lines[-1].get('why')}" if last_event(lines) == Event.STOPPED else ""
        raise TrainingFailedError(
            f"the training failed {last}{why}", where=f"{folder / LOGS} has what each rank printed"
        )
