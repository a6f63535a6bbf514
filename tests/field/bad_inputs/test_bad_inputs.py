"""Each case of the table: the code, the line, no traceback, and files stay as they were."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autopar.codegen.emit import script_text
from autopar.codegen.subject import subject_of
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.errors import InputError
from autopar.planner.files import MOST_BYTES, check_given
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planner.plan.files.document import plan_text
from autopar.planning import make_plan
from autopar.runtime.checkpointing.manifest import NAME, rank_file
from benchmarks.validation.table import COLUMNS, read_table
from tests.autopar.commands import Ran, run
from tests.autopar.mistakes import MODEL
from tests.field.bad_inputs.cases import CASES, Case, Content, Special
from tests.field.bad_inputs.cases_of_model_files import MODEL_FILES
from tests.field.bad_inputs.cases_of_trainings import TRAININGS
from tests.field.bad_inputs.kept import record_text, signed, write_checkpoint

PLANNED = {**CASES, **MODEL_FILES}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return plan.json of a small model on two processes."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        return plan_text(_plan(folder, patch, devices=2, pin="tp=2"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Return what a training on one process leaves: plan, script and a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        plan = _plan(folder, patch, devices=1, pin="dp=1")
        script = script_text(plan, subject_of(plan, folder), folder / "train.py")
    write_checkpoint(folder, 4)
    step = folder / "step-4"
    return {
        "plan.json": plan_text(plan).encode(),
        "train.py": script.encode(),
        NAME: (step / NAME).read_bytes(),
        rank_file(0): (step / rank_file(0)).read_bytes(),
    }


def _plan(folder: Path, patch: pytest.MonkeyPatch, *, devices: int, pin: str) -> Any:
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    demands = {"global_batch": "8", "precision": "fp32"}
    constraints = gathered_constraints((pin,), demands, None)
    cluster = choose_cluster(devices, "cpu")
    return make_plan("model.py", (), cluster, constraints, time_limit_seconds=None)


@pytest.mark.parametrize("case", PLANNED.values(), ids=PLANNED)
def test_a_bad_input_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    planned: str,
    *,
    case: Case,
) -> None:
    if case.plan:
        _put(tmp_path / "model.py", MODEL)
        _put(tmp_path / "plan.json", _edited(planned, case.plan))
    _commit(case, monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize("case", TRAININGS.values(), ids=TRAININGS)
def test_a_bad_input_of_a_training_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    trained: Mapping[str, bytes],
    *,
    case: Case,
) -> None:
    _put(tmp_path / "model.py", MODEL)
    for name in ("plan.json", "train.py"):
        _put(tmp_path / name, trained[name])
    if case.plan:
        _put(tmp_path / "plan.json", _edited(trained["plan.json"].decode(), case.plan))
    if case.checkpoint is not None:
        step = tmp_path / "CK" / "step-4"
        _put(step / rank_file(0), trained[rank_file(0)])
        _put(step / NAME, signed(_edited(trained[NAME].decode(), case.checkpoint)))
    if case.record is not None:
        _put(tmp_path / "mine" / "run.json", _edited(record_text(), case.record))
    _commit(case, monkeypatch, capsys, tmp_path)


def _commit(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """Run the command of a case in a folder with its files, and compare what comes of it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, content in case.files.items():
        _put(folder / name, content)
    names, before = {path.name for path in folder.iterdir()}, _contents(folder)
    program, *words = shlex.split(case.command)
    if program == "train.py":
        ran = _trained(monkeypatch, capsys, folder, words)
    else:
        ran = run(monkeypatch, capsys, program, *words)
    assert "Traceback" not in ran.err
    assert case.message in ran.err + ran.out
    assert ran.code == case.code
    assert ran.err.count("error: ") <= (1 if case.code else 0)
    assert "\x1b" not in ran.err
    allowed = {"__pycache__", *case.makes} | ({"out"} if case.code == 0 else set())
    assert {path.name for path in folder.iterdir()} - names <= allowed
    after = _contents(folder)
    assert {path: after.get(path) for path in before} == before
    assert Path.cwd() == folder


def _trained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    words: list[str],
) -> Ran:
    """Run a script as the one process that there is."""
    monkeypatch.delitem(sys.modules, "model", raising=False)  # of another case
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    code: Any = 0
    try:
        runpy.run_path(str(folder / "train.py"), run_name="__main__")
    except SystemExit as left:
        code = left.code
    except Exception:  # as the interpreter does
        with pytest.raises(SystemExit) as left_by_hook:
            sys.excepthook(*sys.exc_info())
        code = left_by_hook.value.code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    captured = capsys.readouterr()
    return Ran(code=code, out=captured.out, err=captured.err)


def _contents(folder: Path) -> dict[Path, bytes]:
    return dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        with suppress(OSError):  # a loop of links
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, path.read_bytes()


def _put(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match content:
        case Special.PIPE:
            os.mkfifo(path)
        case Special.LOOP:
            path.symlink_to(path)
        case Special.ZERO:
            path.symlink_to("/dev/zero")
        case Special.GONE:
            path.symlink_to("nothing")
        case Special.LINK:
            path.symlink_to("others")
        case str():
            path.write_text(content, encoding="utf-8")
        case _:
            path.write_bytes(content)


def _edited(text: str, edits: Mapping[str, Any]) -> str:
    """Return a JSON text with other values: a place is a path of keys, ~ in one is a dot."""
    table = json.loads(text)
    for place, value in edits.items():
        *outer, last = (
            int(key) if key.isdigit() else key.replace("~", ".") for key in place.split(".")
        )
        holder = table
        for key in outer:
            holder = holder[key]
        holder[last] = value
    return json.dumps(table)


def test_a_plan_with_a_bom_is_read(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    planned: str,
) -> None:
    (tmp_path / "plan.json").write_text(planned, encoding="utf-8-sig")
    ran = run(monkeypatch, capsys, "explain", str(tmp_path))
    assert (ran.code, ran.err) == (0, "")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(InputError, match="the plan has 134217729 bytes"):
        check_given(tmp_path / "plan.json", what="the plan")


def test_a_table_with_a_bom_is_read_and_endless_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    cells = dict.fromkeys(COLUMNS, "") | {"layers": "1e300"}
    text = f"{','.join(cells)}\n{','.join(cells.values())}\n"
    path.write_text(text, encoding="utf-8-sig")
    with pytest.raises(InputError, match="layers is '1e300', needed: a whole number"):
        read_table(path)
    path.write_text(text.replace("1e300", "100000"), encoding="utf-8")
    with pytest.raises(InputError, match="at most 10000"):
        read_table(path)
