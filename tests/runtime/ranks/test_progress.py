from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.runtime.ranks.mesh import start
from autopar.runtime.ranks.progress import Progress


def options(*, json: bool = False, metrics: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(json=json, metrics=metrics)


def test_a_line_has_the_step_the_loss_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(options(), start(pipeline=1, data=1, tensor=1), 640, "tokens").log(10, 2.5)
    words = capsys.readouterr().out.split()
    assert words[:4] == ["step", "10", "loss", "2.50000"]
    assert words[-1] == "tokens/s"


def test_json_lines_have_the_mean_time_since_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, 20.0, 23.0))
    monkeypatch.setattr("autopar.runtime.ranks.progress.time.perf_counter", lambda: next(times))
    progress = Progress(options(json=True), start(pipeline=1, data=1, tensor=1), 640, "tokens")
    progress.log(10, 2.5)
    progress.log(13, 2.0)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"step": 10, "loss": 2.5, "seconds": 2.0}
    assert second == {"step": 13, "loss": 2.0, "seconds": 1.0}


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = replace(start(pipeline=1, data=1, tensor=1), rank=1)
    Progress(options(), mesh, 640, "tokens").log(1, 2.5)
    assert capsys.readouterr().out == ""


def test_a_training_without_a_loss_ends_at_the_second_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(options(), start(pipeline=1, data=1, tensor=1), 640, "tokens")
    progress.log(10, math.nan)
    progress.log(20, 2.5)  # a step that overflowed was skipped
    progress.log(30, math.inf)
    with pytest.raises(SystemExit):
        progress.log(40, math.nan)
    told = capsys.readouterr()
    assert "loss nan" in told.out.splitlines()[-1]
    assert "the loss is nan in step 40" in told.err
    assert "--lr" in told.err
