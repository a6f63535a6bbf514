"""The file of --metrics: lines are added to such a file alone, and to whole lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Curves, Event, Metrics

LINE = '{"time": 1.0, "event": "started", "step": 0, "steps": 3}'


def metrics_of(path: Path, mesh: Mesh) -> Metrics:
    return Metrics(path, mesh, Curves(None, mesh, begun=0))


@pytest.mark.parametrize(
    "before", ["", f"{LINE}\n", '{"time": 1.0, "step": 3, "loss": 1.0}\n', '{"time": 17']
)
def test_lines_are_added_to_metrics_and_to_what_a_kill_left_of_them(
    before: str, tmp_path: Path, mesh: Mesh
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(before)
    metrics_of(path, mesh).add(event=Event.FINISHED, step=3)
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "finished"
    assert len(lines) == len(before.splitlines()) + 1
    metrics_of(path, mesh).add(event=Event.FINISHED, step=3)
    assert len(path.read_text().splitlines()) == len(lines) + 1


@pytest.mark.parametrize(
    "content",
    ["import torch\n", "{}\n", '{"step": 3}\n', '{"time": "noon", "step": 3}\n', "[" * 5000,
     '{"time": 1.0, "level": "info"}\n', '{"time": 1.0, "event": "my own"}\n', "\n\n"],
)  # fmt: skip
def test_a_file_of_others_is_refused_and_stays(
    content: str, tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine"
    path.write_text(content)
    seen = path.stat().st_mtime_ns
    with pytest.raises(SystemExit) as left:
        metrics_of(path, mesh)
    assert left.value.code == 6
    assert "has no lines of metrics" in capsys.readouterr().err
    assert (path.read_text(), path.stat().st_mtime_ns) == (content, seen)


def test_a_password_is_not_written(tmp_path: Path, mesh: Mesh) -> None:
    path = tmp_path / "m.jsonl"
    metrics_of(path, mesh).add(event=Event.KEPT, step=3, folder="s3://key:secret@bucket/run")
    assert json.loads(path.read_text())["folder"] == "s3://key:***@bucket/run"
