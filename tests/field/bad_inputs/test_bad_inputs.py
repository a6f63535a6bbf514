"""Each case of the table: the code, the line, no traceback, and no file but what was asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.cluster.choose import choose_cluster
from autopar.planner.errors import InputError
from autopar.planner.given import MOST_BYTES, check_given
from autopar.planner.plan.declared.options import gathered_constraints
from autopar.planner.plan.files.document import plan_text
from autopar.planning import make_plan
from benchmarks.validation.table import COLUMNS, read_table
from tests.autopar.commands import run
from tests.autopar.mistakes import MODEL
from tests.field.bad_inputs.cases import CASES, Case, Special


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return plan.json of a small model on two processes."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        demands = {"global_batch": "8", "precision": "fp32"}
        constraints = gathered_constraints(("tp=2",), demands, None)
        cluster = choose_cluster(2, "cpu")
        return plan_text(make_plan("model.py", (), cluster, constraints, time_limit_seconds=None))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_input_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    planned: str,
    *,
    case: Case,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, content in case.files.items():
        _put(tmp_path / name, content)
    if case.plan:
        _put(tmp_path / "model.py", MODEL)
        _put(tmp_path / "plan.json", _edited(planned, case.plan))
    before = {path.name for path in tmp_path.iterdir()}
    ran = run(monkeypatch, capsys, *case.command.split())
    assert "Traceback" not in ran.err
    assert case.told in ran.err + ran.out
    assert ran.code == case.code
    assert ran.err.count("error: ") == (1 if case.code else 0)
    assert "\x1b" not in ran.err
    allowed = {"__pycache__"} | ({"out"} if case.code == 0 else set())
    assert {path.name for path in tmp_path.iterdir()} - before <= allowed
    assert Path.cwd() == tmp_path


def _put(path: Path, content: str | bytes | Special) -> None:
    match content:
        case Special.PIPE:
            os.mkfifo(path)
        case Special.LOOP:
            path.symlink_to(path)
        case Special.ZERO:
            path.symlink_to("/dev/zero")
        case str():
            path.write_text(content, encoding="utf-8")
        case _:
            path.write_bytes(content)


def _edited(plan: str, edits: Mapping[str, Any]) -> str:
    table = json.loads(plan)
    for place, value in edits.items():
        *outer, last = (int(key) if key.isdigit() else key for key in place.split("."))
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
