"""How a run has ended, and why: by the lines of its metrics, and by what its ranks leave."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.planner.errors import ExitCode
from autopar.planner.plan.files.document import FILE_NAME
from autopar.runs.launching import ProcessEnd, run_training
from autopar.runs.run_folder import Nodes
from autopar.runs.run_record import RunState, read_record
from autopar.runtime.ranks import leaving
from autopar.runtime.ranks.leaving import VERDICT
from tests.autopar.commands import Autopar
from tests.autopar.runs.test_planned_again import for_devices, written

REFUSED = {"time": 2.0, "code": 6, "found": "no rows", "fix": "look at them"}
GLOO = "[rank1]: RuntimeError: Connection closed by peer"


def launching(
    monkeypatch: pytest.MonkeyPatch, folder: Path, left: Mapping[str, str], *, code: int
) -> None:
    """Have torchrun leave files in the folder of a run, and end."""

    def launch(_: list[str]) -> ProcessEnd:
        for number, (name, text) in enumerate(left.items()):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (2e9 + number, 2e9 + number))
        return ProcessEnd(code=code, is_signalled=False, leftovers=0)

    monkeypatch.setattr("autopar.runs.launching.launch", launch)


RANKS = "logs/none_x/attempt_{}/{}"
FIRST, LAST = RANKS.format(0, 0), RANKS.format(1, 0)


@pytest.mark.parametrize(
    ("left", "code", "why"),
    [
        ({f"{FIRST}/{VERDICT}": json.dumps(REFUSED)}, 6, "no rows"),
        ({f"{FIRST}/{VERDICT}": json.dumps({**REFUSED, "code": 2})}, 2, "no rows"),
        (
            {f"{FIRST}/{VERDICT}": json.dumps({**REFUSED, "code": 7})},
            7,
            "the training failed before its first logged step: no rows",
        ),
        (
            {
                f"{FIRST}/{VERDICT}": json.dumps(REFUSED),
                f"{RANKS.format(0, 1)}/{VERDICT}": json.dumps(
                    {**REFUSED, "time": 1.0, "found": "no data"}
                ),
            },
            6,
            "no data",  # it was the first to leave
        ),
        ({f"{FIRST}/{VERDICT}": "{"}, 7, "the training failed before its first logged step"),
        (
            {f"{FIRST}/{VERDICT}": json.dumps(REFUSED), f"{LAST}/stderr.log": ""},
            7,
            "the training failed before its first logged step",  # that was the attempt before
        ),
        (
            {
                f"{FIRST}/stderr.log": "Traceback (most recent call last):\n  x\n"
                "[rank0]: ValueError: broken here\n",
                f"{RANKS.format(0, 1)}/stderr.log": f"Traceback (most recent call last):\n{GLOO}\n",
            },
            7,
            "the training failed before its first logged step: ValueError: broken here",
        ),
        (
            {"metrics.jsonl": '{"event": "stopped", "step": 3, "why": "the loss is nan"}\n'},
            7,
            "the training failed before its first logged step: the loss is nan",
        ),
    ],
)
def test_what_ranks_leave_tells_why_and_with_which_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    left: dict[str, str],
    code: int,
    why: str,
) -> None:
    launching(monkeypatch, tmp_path, left, code=1)
    end = run_training([], tmp_path, tmp_path / "metrics.jsonl", Nodes())
    assert (end.state, end.code, end.why) == (RunState.FAILED, ExitCode(code), why)
    for log in tmp_path.rglob("*.log"):
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_another_machine_believes_torchrun_where_it_sees_no_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = Nodes(count=2, rank=1, address="host")
    for code, state in ((0, RunState.FINISHED), (1, RunState.FAILED)):
        launching(monkeypatch, tmp_path, {}, code=code)
        assert run_training([], tmp_path, tmp_path / "nowhere", nodes).state is state


def test_a_rank_leaves_its_verdict_beside_its_logs_without_passwords(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        leaving.refuse("no key to s3://key:secret@b", fix="give one")
    assert not (tmp_path / VERDICT).exists(), "`autopar run` has not started it"
    monkeypatch.setenv(leaving.RUN_TOKEN, "word")
    with pytest.raises(SystemExit):
        leaving.refuse("no key to s3://key:secret@b", fix="give one")
    left = json.loads((tmp_path / VERDICT).read_text())
    assert (left["code"], left["found"]) == (6, "no key to s3://key:***@b")
    assert "secret" not in capsys.readouterr().err


# ------------------------------------------------------------------- the command around it


def test_the_good_line_is_the_last_and_the_record_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, autopar: Autopar
) -> None:
    folder = written(for_devices(1), tmp_path / "out")
    place = folder / "runs" / "mine"
    launching(monkeypatch, place, {f"{FIRST}/{VERDICT}": json.dumps(REFUSED)}, code=1)
    ran = autopar("run", str(folder), "--name", "mine")
    assert ran.code == 6
    assert ran.err.splitlines()[0] == "error: no rows"
    assert ran.err.splitlines()[-1] == "  fix: look at them"
    record = read_record(place)
    assert record is not None
    assert (record.state, record.why) == (RunState.FAILED, "no rows")


def test_passwords_are_in_no_file_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, autopar: Autopar
) -> None:
    folder = written(for_devices(1), tmp_path / "out")
    place = folder / "runs" / "mine"
    monkeypatch.setenv("NCCL_MY_TOKEN", "secret")
    monkeypatch.setenv("TORCH_PROXY", "http://me:secret@proxy")
    launching(monkeypatch, place, {"metrics.jsonl": '{"event": "finished"}\n'}, code=0)
    ran = autopar("run", str(folder), "--name", "mine", "--", "--weights", "s3://key:secret@b/w")
    assert ran.code == 0
    assert "s3://key:***@b/w" in ran.out
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"run.json", "environment.json", FILE_NAME} <= {path.name for path in files}
    assert not [path for path in files if b"secret" in path.read_bytes()]
    for name, mode in (("run.json", 0o600), ("environment.json", 0o600), ("logs", 0o700)):
        assert stat.S_IMODE((place / name).stat().st_mode) == mode


def test_a_run_that_was_moved_shows_its_own_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, autopar: Autopar
) -> None:
    folder = written(for_devices(1), tmp_path / "out")
    place = folder / "runs" / "mine"
    lines = '{{"step": {}, "loss": 1.0, "seconds": 0.5}}\n{{"event": "finished"}}\n'
    launching(monkeypatch, place, {"metrics.jsonl": lines.format(3)}, code=0)
    assert autopar("run", str(folder), "--name", "mine").code == 0
    moved = tmp_path / "moved"
    place.rename(moved)
    place.mkdir()
    (place / "metrics.jsonl").write_text(lines.format(4))  # of another run
    (found,) = json.loads(autopar("runs", str(moved), "--json").out)
    assert found["last_step"]["step"] == 3
    assert not [
        value for value in found.values() if str(place) in str(value) and value != found["command"]
    ]


def test_a_plan_that_was_edited_beside_its_script_is_told(tmp_path: Path, autopar: Autopar) -> None:
    folder = written(for_devices(1), tmp_path / "out")
    other = written(for_devices(2), tmp_path / "other")
    (folder / FILE_NAME).write_text((other / FILE_NAME).read_text())
    ran = autopar("run", str(folder), "--name", "mine")
    assert ran.code == 6
    assert "the script was not written from this plan" in ran.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_is_none_of_a_run_stays_as_it_is(
    is_link: bool, tmp_path: Path, autopar: Autopar
) -> None:
    folder, mine = written(for_devices(1), tmp_path / "out"), tmp_path / "thesis"
    written(for_devices(2), mine)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    if is_link:
        (folder / "runs").mkdir()
        (folder / "runs" / "mine").symlink_to(mine)
    words = ("--name", "mine") if is_link else ("--runs", str(tmp_path), "--name", "thesis")
    ran = autopar("run", str(folder), *words)
    assert ran.code == 2
    assert "is there, and is no folder of a run" in ran.err
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_options_of_a_script_are_shown_without_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, autopar: Autopar
) -> None:
    folder, shown = written(for_devices(1), tmp_path / "out"), list[Path]()

    def show(path: Path) -> int:
        shown.append(path)
        return 0

    monkeypatch.setattr("autopar.commands.run.script_help", show)
    assert autopar("run", str(folder), "--", "--help").code == 0
    assert shown == [folder / "train.py"]
    assert not (folder / "runs").exists()
