"""`autopar run` trains with a plan's script; `autopar runs` lists such trainings."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autopar.commands import AS_JSON
from autopar.console import print_json, print_note, results
from autopar.options import PLAN, whole
from autopar.pages.other_pages import time_text
from autopar.pages.plan_page import plain_table
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.files import MOST_DEVICES, refuse_named_as_file
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.words import arrangement_words
from autopar.runs.launching import (
    End,
    check_rendezvous,
    recorded,
    run_training,
    script_help,
    torchrun_text,
)
from autopar.runs.run_folder import (
    LOGS,
    RUNS,
    Nodes,
    Start,
    copy_checkpoint,
    fill_folder,
    keeps_in_run,
    own_folder,
    refuse_foreign,
    refuse_wrong_options,
    run_name,
    script_arguments,
    settings_in,
    start_of,
    torchrun_arguments,
    value_given,
)
from autopar.runs.run_metrics import last_lines, last_step
from autopar.runs.run_record import (
    METRICS,
    PlanToTrain,
    RunRecord,
    RunState,
    awaited,
    left_in,
    own_process,
    planned_again,
    planned_in_advance,
    read_record,
    relative_to_folder,
    runs_in,
)
from autopar.runtime.texts import masked


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="of runs, of a plan, or of one run")
    ] = Path(),
    as_json: AS_JSON = False,
) -> None:
    """List runs: start, plan, state, last step, loss and seconds per step.

    Example: autopar runs out
    """
    found = _runs(folder)
    if not found:
        raise InputError(
            f"there are no runs in {folder}",
            expected="what `autopar run PLAN` makes in the folder runs beside the plan",
        )
    steps = [_last_step(record.metrics_in(path)) for path, record in found]
    if as_json:
        pairs = zip(found, steps, strict=True)
        print_json([_as_data(path, record, step) for (path, record), step in pairs])
        return
    table = plain_table("", "run", "started", "plan", "state", "step", "loss", "a step", left=4)
    for (path, record), step in zip(found, steps, strict=True):
        table.add_row(
            Text(path.name),
            time_text(record.started_at),
            record.plan,
            str(record.state),
            f"{step['step']:,}" if "step" in step else "",
            _loss_text(step.get("loss")),
            seconds_text(step["seconds"]) if step.get("seconds") is not None else "",
        )
    results().print(table)


def _runs(folder: Path) -> list[tuple[Path, RunRecord]]:
    """Return the run in a folder, else the runs in its subfolders, else those in its `runs`."""
    own = read_record(folder)
    if own is not None:
        return [(folder, own)]
    return runs_in(folder) or runs_in(folder / RUNS)


def _last_step(metrics: Path) -> dict[str, Any]:
    """Return the last step's metrics, or nothing if the file cannot be read."""
    try:
        return last_step(last_lines(metrics)) or {}
    except InputError as error:
        print_note(error.found)
        return {}


def _loss_text(loss: object) -> str:
    return f"{loss:.5f}" if isinstance(loss, float) else str(loss or "")


def _as_data(path: Path, record: RunRecord, step: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(path), **asdict(record), "last_step": step}


def run(
    plan: PLAN,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]", help="options of the script, whose --help lists them"),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH|never",
            help="Resume the newest run of this model, or the run or checkpoint at PATH. Default: "
            "the run of --name, if it is there; else begin anew.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        whole(
            "--gpus",
            least=1,
            most=MOST_DEVICES,
            text="Devices to train on. If PLAN is for another number, the plan in folder PLAN-N "
            "beside it is used, or a new one is made.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, whole("--max-restarts", least=0, text="How often to restart after a failure.")
    ] = 0,
    nnodes: Annotated[
        int,
        whole(
            "--nnodes",
            least=1,
            most=MOST_DEVICES,
            text="Number of machines; each runs this command.",
        ),
    ] = 1,
    node_rank: Annotated[
        int | None,
        whole("--node-rank", least=0, metavar="R", text="Index of this machine, from 0."),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", metavar="HOST", help="The first machine.")
    ] = None,
    master_port: Annotated[
        int, whole("--master-port", least=1, most=65535, text="A free port on the first machine.")
    ] = 29500,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run's folder; an existing one is resumed."
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", metavar="FOLDER", help="Folder of runs. Default: runs beside the plan."
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script", metavar="FILE", help="The script. Default: train.py beside the plan."
        ),
    ] = None,
) -> None:
    """Train with the script of a plan, under torchrun.

    Prints the torchrun command, and keeps plan, script, logs, metrics, environment, checkpoints and
    weights in a folder. Exits with 0 when the training is finished, 75 when a signal stopped it and
    a checkpoint was written, 7 when it failed. With --resume, a training goes on from a checkpoint
    of any number of devices.

    Example: autopar run out --max-restarts 3 -- --steps 1000
    """
    given = tuple(arguments or ())
    nodes = _nodes(nnodes, node_rank, master_addr, master_port, name)
    chosen = _chosen(plan, script, gpus, nodes)
    if not {"-h", "--help"}.isdisjoint(given):
        raise typer.Exit(script_help(chosen.script))
    refuse_wrong_options(chosen.source, given)
    check_rendezvous(nodes)
    place = ((plan if plan.is_dir() else plan.parent) / RUNS if runs is None else runs).resolve()
    refuse_named_as_file(place, option="--runs")
    folder = place / run_name(chosen.plan, place, name)
    refuse_foreign(folder)
    start = start_of(chosen.plan, place, folder, resume, nodes)
    if gpus not in (None, chosen.plan.arrangement.ranks):
        chosen = _planned_again(chosen, gpus, folder, nodes)
    settings = settings_in(chosen.source)
    command = torchrun_arguments(
        chosen.script,
        folder,
        processes=chosen.plan.arrangement.ranks,
        nodes=nodes,
        max_restarts=max_restarts,
        arguments=script_arguments(settings, folder, start, given),
    )
    text = masked(torchrun_text(command))
    metrics = Path(value_given("--metrics", given) or folder / METRICS).resolve()
    own_start = start if keeps_in_run(settings, given) else None

    def train() -> End:
        _fill(folder, chosen, start, nodes, text)
        _tell_start(folder, own_start, resume, text, nodes, chosen=chosen if gpus else None)
        return run_training(command, folder, metrics, nodes)

    with own_folder(folder, nodes):
        record = _record(chosen.plan, folder, own_start, metrics, text)
        end = recorded(folder, record, nodes, train)
    _tell_end(end, folder)


def _nodes(count: int, rank: int | None, address: str | None, port: int, name: str | None) -> Nodes:
    wanted = {"--node-rank": rank, "--master-addr": address, "--name": name}
    if count == 1:
        if rank or address:
            raise InputError("--node-rank and --master-addr need --nnodes 2 or more")
        return Nodes()
    missing = [option for option, value in wanted.items() if value is None]
    if missing:
        raise InputError(
            f"--nnodes {count} needs {', '.join(missing)}",
            expected="the same --name on each machine: they share one folder of checkpoints",
            fix=f"autopar run PLAN --nnodes {count} --node-rank 0 --master-addr HOST --name run1",
        )
    assert rank is not None
    if rank >= count:
        raise InputError(f"--node-rank {rank}", expected=f"0 to {count - 1}")
    return Nodes(count=count, rank=rank, address=address, port=port)


def _chosen(plan: Path, script: Path | None, gpus: int | None, nodes: Nodes) -> PlanToTrain:
    """Return the given plan, or one that was made in advance for these devices."""
    found = PlanToTrain.read(plan)
    if script is not None:
        found = replace(found, script=script)
    if not found.script.is_file():
        raise InputError(f"there is no script {found.script}", fix=f"autopar emit {plan} writes it")
    ranks = found.plan.arrangement.ranks
    devices = ranks if gpus is None else gpus
    _check_devices(devices, nodes)
    if devices == ranks:
        found.refuse_another_plan()
        return found
    if script is not None:
        raise InputError(
            f"--script is for the {ranks} devices of the plan, and --gpus says {devices}",
            fix="leave one of them out",
        )
    ahead = planned_in_advance(found, devices)
    found = found if ahead is None else ahead
    found.refuse_another_plan()
    return found


def _planned_again(chosen: PlanToTrain, devices: int, folder: Path, nodes: Nodes) -> PlanToTrain:
    """Return a new plan for the training; the first of several machines makes it for all.

    If an earlier start left a plan, all machines use it: otherwise some of them might read this
    plan before the first machine replaces it.
    """
    if nodes.count > 1 and (found := left_in(folder, chosen, devices, nodes.count)) is not None:
        return found
    if nodes.rank:
        return awaited(chosen, devices, folder, nodes.count)
    return planned_again(chosen, devices, folder, nodes.count)


def _check_devices(ranks: int, nodes: Nodes) -> None:
    if ranks % nodes.count:
        raise InputError(f"{ranks} ranks are not shared out evenly over {nodes.count} machines")
    import torch  # imported here, because it takes seconds

    here, needed = torch.cuda.device_count(), ranks // nodes.count
    if torch.cuda.is_available() and here < needed:
        raise AutoparError(
            f"{needed} devices of this machine are needed, and {here} "
            f"{'is' if here == 1 else 'are'} there",
            fix=f"--gpus {here * nodes.count} plans again for those; --nnodes N spreads the ranks "
            "over N machines",
            exit_code=ExitCode.MISMATCH,
        )


def _fill(folder: Path, chosen: PlanToTrain, start: Start, nodes: Nodes, command: str) -> None:
    try:
        if start.copied is not None and nodes.rank == 0:
            copy_checkpoint(start.copied, start.checkpoints)
        chosen.write()
        fill_folder(folder, chosen.file, chosen.script, nodes, command)
    except OSError as error:
        raise InputError(
            f"nothing can be written to {folder}: {error.strerror}", fix="choose another --runs"
        ) from None


def _record(
    plan: StoredPlan, folder: Path, start: Start | None, metrics: Path, command: str
) -> RunRecord:
    host, process = own_process()
    goes_on = None if start is None else start.goes_on_from
    return RunRecord(
        name=folder.name,
        model=plan.model.spec,
        arguments=plan.model.arguments,
        plan=arrangement_words(plan.arrangement),
        predicted_step_seconds=plan.prediction.step_seconds,
        command=command,
        checkpoints=None if start is None else relative_to_folder(folder, start.checkpoints),
        metrics=relative_to_folder(folder, metrics),
        goes_on_from=None if goes_on is None else masked(str(goes_on)),
        host=host,
        process=process,
        started_at=time.time(),
    )


def _tell_start(
    folder: Path,
    start: Start | None,
    resume: str | None,
    command: str,
    nodes: Nodes,
    *,
    chosen: PlanToTrain | None,
) -> None:
    print(f"run: {folder}")
    if chosen is not None:
        print(f"plan: {chosen.file} ({arrangement_words(chosen.plan.arrangement)})")
    if start is not None and start.goes_on_from is not None:
        print(masked(f"resumes from {start.goes_on_from}; checkpoints: {start.checkpoints}"))
    elif start is not None and resume == "auto":
        # several machines search no other run
        found = "no run of this model has a" if nodes.count == 1 else f"{folder.name} has no"
        print(f"{found} checkpoint: training starts at step 0")
    print(f"{command}\n", flush=True)


def _tell_end(end: End, folder: Path) -> None:
    """Print how a run ended, as the last line, and exit with the run's code."""
    if end.leftovers:
        print_note(f"torchrun was killed; {end.leftovers} of its processes were ended, too")
    if end.state is RunState.FAILED:
        raise AutoparError(
            end.why or "the training failed",
            where=f"{folder / LOGS} has what each rank printed",
            fix=end.fix,
            exit_code=end.code,
        )
    texts = {
        RunState.FINISHED: f"finished: {folder}",
        RunState.PREEMPTED: f"stopped by a signal, with a checkpoint: --resume {folder} resumes it",
        RunState.INTERRUPTED: f"stopped by a signal {end.last}, without a new checkpoint",
    }
    results().print(texts[end.state], soft_wrap=True)
    if end.code:
        raise typer.Exit(int(end.code))
