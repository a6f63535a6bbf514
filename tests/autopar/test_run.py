"""`autopar run` and `autopar runs`: how a training ended is told, and no process is left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.commands.run import _tell_start
from autopar.planner.errors import AutoparError, InputError
from autopar.planner.plan.files.document import write_plan
from autopar.planner.plan.plan import Plan
from autopar.runs.launching import (
    ENVIRONMENT,
    TORCHRUN,
    ProcessEnd,
    check_rendezvous,
    ended_as,
)
from autopar.runs.run_folder import (
    Nodes,
    Start,
    copy_checkpoint,
    run_name,
    script_arguments,
    settings_in,
    start_of,
)
from autopar.runs.run_metrics import last_step, lines_of
from autopar.runs.run_record import (
    RunRecord,
    RunState,
    own_process,
    read_record,
    runs_in,
    write_record,
)
from autopar.runtime.checkpointing.claim import NAME as IN_USE
from autopar.runtime.checkpointing.claim import _own, began, claim
from autopar.runtime.checkpointing.finding import checkpoints_in
from autopar.runtime.checkpointing.manifest import NAME
from autopar.runtime.ranks.locations import Location, write
from tests.autopar.commands import Autopar
from tests.bucket import bucket
from tests.codegen.plans import pinned_plan

ENDLESS = ("--data", "synthetic", "--steps", "1000000", "--checkpoint-every", "50")
ONE = Nodes()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    del tmp_path_factory
    return pinned_plan("mnist.py", (), microbatch=4)


@pytest.fixture
def folder(planned: Plan, tmp_path: Path) -> Path:
    """The folder of a plan and its script."""
    write_plan(planned, tmp_path / "plan.json")
    write_script(planned, tmp_path)
    return tmp_path


def record_of(plan: Plan, place: Path, **changes: object) -> RunRecord:
    host, process = own_process()
    made = RunRecord(
        name=place.name,
        model=plan.model.spec,
        arguments=plan.model.arguments,
        plan="one",
        predicted_step_seconds=0.5,
        command="torchrun train.py",
        checkpoints="checkpoints",
        metrics="metrics.jsonl",
        host=host,
        process=process,
        started_at=1.0,
        state=RunState.FINISHED,
        ended_at=2.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def kept_run(plan: Plan, place: Path, **changes: object) -> Path:
    """Leave a run that has kept step 5."""
    (place / "checkpoints" / "step-5").mkdir(parents=True)
    (place / "checkpoints" / "step-5" / NAME).touch()
    write_record(place, record_of(plan, place, **changes))
    return place


def run_that_trains(plan: Plan, place: Path, **changes: object) -> None:
    """Leave the folder of a run which another process has: that which has started this one."""
    write_record(place, record_of(plan, place, state=RunState.RUNNING, ended_at=None, **changes))
    hold(place, os.getppid())


def hold(place: Path, process: int) -> None:
    """Have a process hold a folder."""
    claim(place).release()
    own = _own(place)
    (place / IN_USE).write_text(
        json.dumps(asdict(replace(own, process=process, began=began(process))))
    )


# ------------------------------------------------------------------------ where a run begins


def test_a_run_begins_anew_unless_it_is_told_to_go_on(planned: Plan, tmp_path: Path) -> None:
    kept_run(planned, tmp_path / "first")
    own = tmp_path / "second"
    for resume in (None, "never"):
        start = start_of(planned, tmp_path, own, resume, ONE)
        assert (start.checkpoints, start.goes_on_from) == (own / "checkpoints", None)
    start = start_of(planned, tmp_path, own, "auto", ONE)
    assert start.checkpoints == tmp_path / "first" / "checkpoints"


@pytest.mark.parametrize(
    ("machines", "told"),
    [(1, "no run of this model has a checkpoint"), (2, "second has no checkpoint")],
)
def test_a_start_without_checkpoints_says_which_runs_were_searched(
    machines: int, told: str, planned: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, nodes = tmp_path / "second", Nodes(count=machines)
    if machines > 1:  # which search no other run
        kept_run(planned, tmp_path / "first")
    start = start_of(planned, tmp_path, own, "auto", nodes)
    assert start == Start(checkpoints=own / "checkpoints")
    _tell_start(own, start, "auto", "torchrun", nodes, chosen=None)
    assert f"{told}: training starts at step 0" in capsys.readouterr().out


def test_auto_takes_the_newest_run_of_the_same_model_that_has_kept_something(
    planned: Plan, tmp_path: Path
) -> None:
    kept_run(planned, tmp_path / "a", started_at=1.0)
    kept_run(planned, tmp_path / "b", started_at=3.0)
    kept_run(planned, tmp_path / "other", started_at=4.0, model="llama.py")
    write_record(tmp_path / "empty", record_of(planned, tmp_path / "empty", started_at=5.0))
    assert start_of(planned, tmp_path, tmp_path / "new", "auto", ONE).goes_on_from == tmp_path / "b"
    run_that_trains(planned, tmp_path / "b", started_at=3.0)
    with pytest.raises(AutoparError, match="is still running"):
        start_of(planned, tmp_path, tmp_path / "new", "auto", ONE)


@pytest.mark.parametrize("place", [Path, bucket])
def test_one_checkpoint_is_copied_so_that_restarts_find_later_ones(
    place: Callable[[Path], Location], planned: Plan, tmp_path: Path
) -> None:
    step = place(tmp_path / "a") / "step-5"
    step.mkdir(parents=True, exist_ok=True)
    write(step / NAME, [b"{}"])
    start = start_of(planned, tmp_path, tmp_path / "new", str(step.parent), ONE)
    assert (start.checkpoints, start.copied) == (step.parent, None)
    start = start_of(planned, tmp_path, tmp_path / "new", str(step), ONE)
    assert start.copied == step
    copy_checkpoint(step, start.checkpoints)
    copied = tmp_path / "new" / "checkpoints" / "step-5"
    assert (copied / NAME).read_text() == "{}"
    assert [one.name for one in checkpoints_in(copied.parent)] == ["step-5"]


def test_a_name_that_is_there_goes_on_and_is_not_written_over(
    planned: Plan, tmp_path: Path
) -> None:
    own = kept_run(planned, tmp_path / "mine")
    assert start_of(planned, tmp_path, own, None, ONE).goes_on_from == own
    with pytest.raises(InputError, match="are not written over"):
        start_of(planned, tmp_path, own, "never", ONE)
    with pytest.raises(InputError, match="no checkpoints"):
        start_of(planned, tmp_path, tmp_path / "new", str(tmp_path / "nowhere"), ONE)
    with pytest.raises(InputError, match="no name of a folder"):
        run_name(planned, tmp_path, "../out")


def test_what_script_and_arguments_say_is_left_as_it_is(planned: Plan, folder: Path) -> None:
    script, place = folder / "train.py", folder / "runs" / "a"
    start = start_of(planned, folder / "runs", place, None, ONE)
    settings = settings_in(script.read_text())
    told = script_arguments(settings, place, start, ("--lr", "1"))
    assert told[:4] == ("--checkpoint", str(place / "checkpoints"), "--resume", "auto")
    assert str(place / "model.safetensors") in told
    assert told[-2:] == ("--lr", "1")
    given = ("--checkpoint=mine", "--export", "none", "--metrics", "m")
    assert script_arguments(settings, place, start, given) == given
    told = script_arguments({"CHECKPOINT": "there", "EXPORT": "none"}, place, start, ())
    assert told == ("--metrics", str(place / "metrics.jsonl"))


# --------------------------------------------------------------------------- how it has ended


STARTED, STEP = '{"event": "started"}', '{"step": 3, "loss": 1.0}'
FINISHED = '{"event": "finished", "step": 3}'
PREEMPTED = '{"event": "preempted", "step": 3}'


@pytest.mark.parametrize(
    ("code", "is_signalled", "lines", "state"),
    [
        (0, False, [STARTED, STEP, FINISHED], RunState.FINISHED),
        (0, False, [STARTED, STEP], RunState.FAILED),  # something has ended the process
        (0, False, [], RunState.FAILED),
        (0, False, [FINISHED, STARTED, STEP], RunState.FAILED),  # it was started again
        (1, False, [STARTED, STEP], RunState.FAILED),
        (1, False, [], RunState.FAILED),
        (1, False, [STARTED, STEP, PREEMPTED], RunState.PREEMPTED),  # a scheduler told the ranks
        (1, True, [STARTED, STEP, PREEMPTED], RunState.PREEMPTED),
        (-9, True, [STARTED, STEP], RunState.INTERRUPTED),
        (1, False, [PREEMPTED, STARTED, STEP], RunState.FAILED),  # it went on, and then failed
    ],
)
def test_the_end_is_told_by_the_code_and_by_what_the_script_left(
    code: int, is_signalled: bool, lines: list[str], state: RunState, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(PREEMPTED + "\n")  # of an earlier start
    seen = metrics.stat().st_size
    metrics.write_text("\n".join([PREEMPTED, *lines, '{"cut o']))
    ended = ProcessEnd(code=code, is_signalled=is_signalled, leftovers=0)
    assert ended_as(ended, lines_of(metrics, start=seen)) is state


def test_a_run_whose_process_is_gone_was_killed(planned: Plan, tmp_path: Path) -> None:
    run_that_trains(planned, tmp_path / "a")
    assert state_of(tmp_path / "a") is RunState.RUNNING
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert state_of(tmp_path / "copy") is RunState.KILLED, "the process has the original"
    held = json.loads((tmp_path / "a" / IN_USE).read_text())
    (tmp_path / "a" / IN_USE).write_text(json.dumps({**held, "began": 1}))
    assert state_of(tmp_path / "a") is RunState.KILLED, "another process has its number"


def state_of(folder: Path) -> RunState:
    found = read_record(folder)
    assert found is not None
    return found.state


def test_runs_are_listed_with_their_last_step(
    autopar: Autopar, planned: Plan, tmp_path: Path
) -> None:
    place = kept_run(planned, tmp_path / "runs" / "first")
    lines = [STARTED, '{"step": 20, "loss": 2.5, "seconds": 0.25}', '{"event": "finished"}']
    (place / "metrics.jsonl").write_text("\n".join(lines))
    ran = autopar("runs", str(tmp_path))
    assert ran.code == 0
    line = next(line for line in ran.out.splitlines() if "first" in line)
    assert all(word in line for word in ("finished", "20", "2.50000", "250 ms"))
    found = json.loads(autopar("runs", str(place), "--json").out)
    assert [(one["state"], one["last_step"]["step"]) for one in found] == [("finished", 20)]
    assert autopar("runs", str(tmp_path / "nowhere")).code == 2


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--nnodes", "2"), 2, "needs --node-rank, --master-addr, --name"),
        (("--master-addr", "host"), 2, "need --nnodes 2 or more"),
        (("--resume", "nowhere"), 2, "there are no checkpoints"),
        (("--script", "nowhere.py"), 2, "there is no script"),
        (("--max-restarts", "-1"), 2, "is out of range"),
    ],
)
def test_bad_input_is_told_before_anything_is_made(
    autopar: Autopar, words: tuple[str, ...], code: int, told: str, folder: Path
) -> None:
    ran = autopar("run", str(folder), *words)
    assert ran.code == code
    assert told in ran.err
    assert not (folder / "runs").exists()


def test_machines_that_cannot_meet_are_told_before_anything_is_started() -> None:
    with pytest.raises(InputError, match=r"no\.invalid is not found from this machine"):
        check_rendezvous(Nodes(count=2, rank=1, address="no.invalid"))
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        check_rendezvous(Nodes(count=2, rank=1, address="127.0.0.1", port=port))
        with pytest.raises(InputError, match=f"--master-port {port} is in use on this machine"):
            check_rendezvous(Nodes(count=2, rank=0, address="127.0.0.1", port=port))
    check_rendezvous(Nodes(count=2, rank=0, address="127.0.0.1", port=port))


# ------------------------------------------------------------------------- real torchrun jobs


Job = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def job(folder: Path) -> Iterator[Job]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [sys.executable, "-m", "autopar", "run", str(folder), *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(made)
        return made

    yield start
    for one in started:
        if one.poll() is None:
            one.kill()
            one.wait()


def only_run(folder: Path) -> tuple[Path, RunRecord]:
    (found,) = runs_in(folder / "runs")
    return found


def wait_for_checkpoint(job: subprocess.Popen[str], folder: Path) -> Path:
    deadline = time.monotonic() + 240
    while job.poll() is None and time.monotonic() < deadline:
        for place, _ in runs_in(folder / "runs"):
            if checkpoints_in(place / "checkpoints"):
                return place
        time.sleep(0.1)
    raise AssertionError(job.communicate(timeout=30)[0][-3000:])


def processes_of(place: Path) -> list[int]:
    """Return the processes whose command line names a file or folder, or that are in its folder."""
    folder = place if place.is_dir() else place.parent
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_named = str(place).encode() in (path / "cmdline").read_bytes()
            if is_named or (path / "cwd").readlink() == folder:
                found.append(int(path.name))
        except OSError:
            continue
    return [one for one in found if one != os.getpid()]


def wait_until_gone(folder: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = [Path(f"/proc/{one}/cmdline").read_text() for one in processes_of(folder)]
    assert not left


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
def test_a_run_that_was_stopped_leaves_with_75_and_another_one_goes_on(
    folder: Path, job: Job
) -> None:
    first = job("--", *ENDLESS)
    place = wait_for_checkpoint(first, folder)
    first.send_signal(signal.SIGUSR1)
    printed = first.communicate(timeout=120)[0]
    assert first.returncode == 75, printed[-3000:]
    assert f"torchrun --standalone --nproc-per-node 1 --log-dir {place / 'logs'}" in printed
    assert only_run(folder)[1].state is RunState.PREEMPTED
    wait_until_gone(folder, 5)
    step = int(checkpoints_in(place / "checkpoints")[0].name.removeprefix("step-"))
    assert list(place.glob("logs/*/attempt_0/0/stderr.log"))
    again = job("--resume", "auto", "--", *ENDLESS[:2], "--steps", str(step + 5))
    printed = again.communicate(timeout=240)[0]
    assert again.returncode == 0, printed[-3000:]
    assert f"resumes from {place}" in printed
    second, record = runs_in(folder / "runs")[-1]
    assert (record.state, record.goes_on_from) == (RunState.FINISHED, str(place))
    last = last_step(lines_of(second / "metrics.jsonl"))
    assert last is not None
    assert last["step"] == step + 5
    names = {one.name for one in second.iterdir()}
    assert {"plan.json", "train.py", "environment.json", "model.safetensors"} <= names


@pytest.mark.slow
def test_a_failure_leaves_with_7_and_says_where_the_logs_are(folder: Path, job: Job) -> None:
    """The lines of a rank are told in the order in which it printed them, to whichever stream."""
    script = folder / "train.py"
    printing = "[print('line', n, file=(sys.stdout, sys.stderr)[n % 2]) for n in range(40)]"
    failing = f"{printing}; raise RuntimeError('broken here')"
    script.write_text(script.read_text().replace("keeper.after(step)", failing))
    failed = job("--max-restarts", "1", "--", *ENDLESS)
    printed = failed.communicate(timeout=240)[0]
    assert failed.returncode == 7, printed[-3000:]
    assert "error: the training failed" in printed
    place, record = only_run(folder)
    assert record.state is RunState.FAILED
    logs = [one.read_text() for one in place.glob("logs/*/attempt_*/0/stdout.log")]
    assert len(logs) == 2, "it was started again"
    assert all("broken here" in one for one in logs)
    for text in (*logs, printed.partition("line 39")[0]):
        numbers = [int(one) for one in re.findall(r"line (\d+)$", text, flags=re.M)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 39


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["torchrun", "autopar"])
def test_no_process_outlives_a_kill(
    victim: str, folder: Path, job: Job, request: pytest.FixtureRequest
) -> None:
    if victim == "autopar":  # which else finds ranks by an environment that forks do not show
        request.getfixturevalue("forked_python")
    running = job("--", *ENDLESS)
    place = wait_for_checkpoint(running, folder)
    if victim == "autopar":
        running.kill()
        running.wait()
    else:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert running.wait(timeout=120) == 75, "its rank was told to stop, and kept its work"
    wait_until_gone(folder)
    state = only_run(folder)[1].state
    assert state is (RunState.KILLED if victim == "autopar" else RunState.PREEMPTED)
    assert (place / "checkpoints").is_dir()


SLOW_TO_STOP = """
import pathlib, signal, sys, time

def stop(*_):
    pathlib.Path("stops").touch()
    time.sleep(2)
    pathlib.Path("kept").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
pathlib.Path("ready").touch()
time.sleep(300)
"""


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
def test_torchrun_closes_its_ranks_whole_though_it_gets_three_signals(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_TO_STOP)
    words = ("--standalone", "--nproc-per-node", "1", "--log-dir", "logs", "--tee", "3", "train.py")
    running = subprocess.Popen(
        [sys.executable, *TORCHRUN, *words], cwd=tmp_path, env=os.environ | ENVIRONMENT
    )
    for name in ("ready", "stops", "stops"):
        wait_for_file(tmp_path / name)
        running.terminate()
        time.sleep(0.3)  # signals that come together are one
    assert running.wait(timeout=60) != 0
    assert (tmp_path / "kept").exists()


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def test_torchrun_knows_the_names_that_are_set_around_it() -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.launcher import api

    known = "".join(Path(str(one.__file__)).read_text() for one in (torchrun, api))
    assert all(name in known for name in ENVIRONMENT)
