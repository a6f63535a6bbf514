"""`autopar run --gpus N`: a training goes on with other devices than were planned for."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.codegen.emit import write_script
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.files.document import read_plan, write_plan
from autopar.planner.plan.plan import Plan, StoredPlan
from autopar.runs.launching import ProcessEnd
from autopar.runs.run_metrics import lines_of
from autopar.runs.run_record import PlanToTrain, awaited
from tests.autopar.commands import Autopar
from tests.cells import cells
from tests.codegen.plans import pinned_plan

pytestmark = pytest.mark.usefixtures("forked_python")
AUTOPAR = (sys.executable, "-m", "autopar")


def written(plan: Plan, folder: Path) -> Path:
    """Leave a plan and its script in a folder."""
    folder.mkdir(parents=True)
    write_plan(plan, folder / "plan.json")
    write_script(plan, folder)
    return folder


def for_devices(devices: int, **settings: object) -> Plan:
    """Return a plan that only splits rows, with its pins declared as by --pin."""
    plan = pinned_plan("mnist.py", (), data=devices, microbatch=4, global_batch=8)
    pins = {"pins.dp": devices, "pins.microbatch": 4} | settings
    declared = (declare(place, one, origin="--pin", where="") for place, one in pins.items())
    return replace(plan, constraints=tuple(declared))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a plan for two devices and its script."""
    return written(for_devices(2), tmp_path / "out")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Write down the torchrun commands in place of running them."""
    commands: list[list[str]] = []

    def launch(command: list[str]) -> ProcessEnd:
        commands.append(command)
        metrics = Path(command[command.index("--metrics") + 1])
        with metrics.open("a", encoding="utf-8") as file:
            file.write('{"event": "finished", "step": 1}\n')
        return ProcessEnd(code=0, is_signalled=False, leftovers=0)

    monkeypatch.setattr("autopar.runs.launching.launch", launch)
    return commands


def test_a_plan_for_these_devices_is_made_and_left_in_the_folder_of_the_run(
    folder: Path, autopar: Autopar, started: list[list[str]]
) -> None:
    ran = autopar("run", str(folder), "--gpus", "1", "--name", "mine")
    assert ran.code == 0, ran.err
    place = folder / "runs" / "mine"
    made, before = read_plan(place), read_plan(folder)
    assert made.arrangement.ranks == 1
    assert made.arrangement.global_batch == before.arrangement.global_batch
    assert (made.model.spec, made.arrangement.precision) == (
        before.model.spec,
        before.arrangement.precision,
    )
    assert [one.text for one in made.constraints if one.origin == "--pin"] == ["microbatch=4"]
    assert "dropped from the constraints of the plan for --gpus 1: dp=2 (--pin)" in ran.err
    assert f"plan: {place / 'plan.json'} (one device" in ran.out
    (command,) = started
    assert str(place / "train.py") in command
    assert command[command.index("--nproc-per-node") + 1] == "1"


@pytest.mark.parametrize("devices", ["2", "1"])
def test_nothing_is_planned_where_a_plan_for_these_devices_is_there(
    devices: str,
    folder: Path,
    autopar: Autopar,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(for_devices(1), folder.with_name("out-1"))
    monkeypatch.setattr("autopar.commands.run.planned_again", lambda *_: pytest.fail("planned"))
    ran = autopar("run", str(folder), "--gpus", devices, "--name", "mine")
    assert ran.code == 0, ran.err
    taken = folder if devices == "2" else folder.with_name("out-1")
    assert str(taken / "train.py") in started[0]
    copied = read_plan(folder / "runs" / "mine")
    assert copied.arrangement.ranks == int(devices)


def test_a_plan_of_another_training_is_not_taken(
    folder: Path, autopar: Autopar, started: list[list[str]]
) -> None:
    other = pinned_plan("mnist.py", ("size=512",), microbatch=4, global_batch=16)
    written(other, folder.with_name("out-1"))
    ran = autopar("run", str(folder), "--gpus", "1", "--name", "mine")
    assert ran.code == 0, ran.err
    assert "is not taken: it has another model, another global batch" in ran.err
    assert str(folder / "runs" / "mine" / "train.py") in started[0]


def test_a_script_that_was_changed_by_hand_is_not_lost_without_a_word(
    folder: Path, autopar: Autopar, started: list[list[str]]
) -> None:
    script = folder / "train.py"
    script.write_text(script.read_text().replace("STEPS = 100", "STEPS = 200"))
    ran = autopar("run", str(folder), "--gpus", "1")
    assert ran.code == 2
    assert "the script was changed by hand" in ran.err
    assert str(folder.with_name("out-1")) in ran.err
    assert not (folder / "runs").exists()
    assert autopar("run", str(folder), "--gpus", "2").code == 0
    assert len(started) == 1


ALONE = ("--node-rank", "0", "--master-addr", "host", "--name", "mine")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--gpus", "0"), 2, "is out of range"),
        (("--gpus", "1", "--script", "train.py"), 2, "--script is for the 2 devices of the plan"),
        (("--gpus", "3", "--nnodes", "2", *ALONE), 2, "not shared out evenly over 2 machines"),
        (("--gpus", "9"), 3, "a global batch of 8 (the plan)"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    words: tuple[str, ...],
    code: int,
    told: str,
    tmp_path: Path,
    autopar: Autopar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = for_devices(2, **{"limits.pp": 1, "limits.tp": 1})
    folder = written(plan, tmp_path / "out")
    monkeypatch.chdir(folder)
    ran = autopar("run", str(folder), *words)
    assert ran.code == code, ran.err
    assert told in ran.err
    assert not (folder / "runs").exists()


def test_a_machine_with_fewer_devices_says_how_to_go_on(
    folder: Path, autopar: Autopar, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ran = autopar("run", str(folder))
    assert ran.code == 6
    assert "2 devices of this machine are needed, and 1 is there" in ran.err
    assert "--gpus 1" in ran.err
    assert not started


def test_the_first_of_several_machines_plans_for_all(
    folder: Path,
    autopar: Autopar,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autopar.commands.run.check_rendezvous", lambda _: None)
    place = ("--nnodes", "2", "--master-addr", "host", "--name", "mine", "--node-rank")
    with ThreadPoolExecutor() as pool:
        second = pool.submit(_awaited, folder)
        ran = autopar("run", str(folder), "--gpus", "4", *place, "0")
        assert ran.code == 0, ran.err
        plan = second.result(timeout=60)
    assert plan == read_plan(folder / "runs" / "mine")
    assert [node.devices for node in plan.cluster.nodes] == [2, 2]
    assert started[0][started[0].index("--nproc-per-node") + 1] == "2"
    # Started again, all of them take it: another one would replace what the others have read.
    monkeypatch.setattr("autopar.commands.run.planned_again", lambda *_: pytest.fail("planned"))
    assert autopar("run", str(folder), "--gpus", "4", *place, "0").code == 0


def _awaited(folder: Path) -> StoredPlan:
    return awaited(PlanToTrain.read(folder), 4, folder / "runs" / "mine", 2).plan


@pytest.mark.slow
@pytest.mark.parametrize("then", cells(("1", "4", "1 4"), ("1",)))
def test_losses_go_on_with_other_numbers_of_devices_as_if_nothing_had_changed(
    then: str, folder: Path
) -> None:
    exact = ("--dtype", "float64", "--log-every", "1", "--lr", "0.01", "--steps", "5")

    def trained(name: str, *words: str) -> list[float]:
        own = (*exact, "--checkpoint-every", "2")
        ran = subprocess.run(
            [*AUTOPAR, "run", str(folder), "--name", name, *words, "--", *own],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        lines = lines_of(folder / "runs" / name / "metrics.jsonl")
        return [one["loss"] for one in lines if "event" not in one]

    expected = trained("planned")
    assert len(expected) == 5
    before = "planned"
    for devices, step in zip(map(int, then.split()), (2, 4), strict=False):
        kept = folder / "runs" / before / "checkpoints" / f"step-{step}"
        before = f"on-{devices}"
        losses = trained(before, "--gpus", str(devices), "--resume", str(kept))
        assert losses == pytest.approx(expected[step:], rel=0.0, abs=1e-9)
        assert read_plan(folder / "runs" / before).arrangement.ranks == devices
