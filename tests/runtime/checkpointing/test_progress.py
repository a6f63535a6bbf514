"""Step lines: what they tell, and where a training ends whose numbers are none."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.checkpointing.finding import checkpoints_in
from autopar.runtime.checkpointing.keeper import Keeper
from autopar.runtime.checkpointing.progress import Planned, Progress, broken_of
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh, start, stop
from autopar.runtime.ranks.metrics import Curves, Event, Metrics
from autopar.runtime.ranks.options import read_options
from autopar.runtime.weights.initial_weights import Recipe
from tests.runtime.processes import run_on_ranks

PROGRESS = "autopar.runtime.checkpointing.progress"

CPU: Planned = ("cpu", 0.5, 0.4)


def options(*words: str) -> argparse.Namespace:
    settings: dict[str, Any] = {
        "STEPS": 40, "CLIP_NORM": 1.0, "SEED": 0, "DTYPE": "float32", "LOG_EVERY": 1,
        "EXPORT": "none", "CHECKPOINT": "none", "CHECKPOINT_EVERY": 10, "KEEP": 3,
        "CHECK_FIRST_STEP": False,
    }  # fmt: skip
    return read_options(words, settings)


def metrics_of(given: argparse.Namespace, mesh: Mesh) -> Metrics:
    return Metrics(given.metrics, mesh, Curves(given.tensorboard, mesh, begun=0))


def no_weights(name: str) -> torch.Tensor:
    raise KeyError(name)


def progress_of(
    mesh: Mesh,
    *words: str,
    planned: Planned = CPU,
    scales_loss: bool = False,
    model: nn.Module | None = None,
) -> Callable[..., float]:
    given = options(*words)
    made = Progress(
        given,
        mesh,
        [nn.Linear(2, 2) if model is None else model],
        lambda: 0.25,
        metrics_of(given, mesh),
        amount=640,
        unit="tokens",
        planned=planned,
        begun=0,
        scales_loss=scales_loss,
    )
    return lambda step, loss, norm=3.0: made.log(step, torch.tensor(loss), torch.tensor(norm))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 20.0, 23.0))
    monkeypatch.setattr(f"{PROGRESS}.time.perf_counter", lambda: next(times))


@pytest.mark.usefixtures("timed")
def test_a_line_has_all_that_is_known(capsys: pytest.CaptureFixture[str], mesh: Mesh) -> None:
    log = progress_of(mesh)
    log(10, 2.5)
    log(13, 2.0)
    assert [line.split("   ") for line in capsys.readouterr().out.splitlines()] == [
        ["step", "  10", "loss 2.50000", "norm 3", "lr 0.25", "2,000.0 ms", "320 tokens/s",
         "4.00 × planned", "0:01:00 left"],
        ["step", "  13", "loss 2.00000", "norm 3", "lr 0.25", "1,000.0 ms", "640 tokens/s",
         "2.00 × planned", "0:00:27 left"],
    ]  # fmt: skip


@pytest.mark.usefixtures("timed")
def test_json_lines_and_metrics_have_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mesh: Mesh
) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    log = progress_of(mesh, "--json", "--metrics", str(file), "--clip", "0")
    log(10, 2.5)
    log(13, 2.0)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "step": 10, "loss": 2.5, "gradient_norm": None, "learning_rate": 0.25, "seconds": 2.0,
        "per_second": 320.0, "unit": "tokens", "memory_bytes": None, "mfu": None,
        "against_plan": 4.0, "seconds_left": 60.0, "compile_seconds": None,
    }  # fmt: skip
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in lines)
    assert lines == [first, second]


def test_a_plan_for_a_gpu_says_nothing_of_a_cpu(
    capsys: pytest.CaptureFixture[str], mesh: Mesh
) -> None:
    progress_of(mesh, planned=("h100-sxm", 0.5, 0.4))(1, 2.5)
    assert "planned" not in capsys.readouterr().out


@pytest.mark.usefixtures("timed")
def test_a_line_is_not_compared_with_formulas_of_a_cpu_but_metrics_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mesh: Mesh
) -> None:
    file = tmp_path / "metrics.jsonl"
    progress_of(mesh, "--metrics", str(file), planned=("cpu by formula", 0.5, 0.4))(10, 2.5)
    assert "planned" not in capsys.readouterr().out
    assert json.loads(file.read_text())["against_plan"] == 4.0


def test_on_its_device_a_plan_is_compared_with_and_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh
) -> None:
    monkeypatch.setattr(f"{PROGRESS}._memory", lambda _: 3 * 2**29)
    times = iter((0.0, 10.0))
    monkeypatch.setattr(f"{PROGRESS}.time.perf_counter", lambda: next(times))
    progress = Progress(
        options(), replace(mesh, device=torch.device("cuda")), [], lambda: None,
        metrics_of(options(), mesh), amount=1, unit="rows",
        planned=("h100-sxm", 0.8, 0.4), begun=0, scales_loss=False,
    )  # fmt: skip
    line = progress._line(10, 2.5, None)
    assert line.mfu == pytest.approx(0.4 * 0.8)  # a step of 1 s instead of 0.8
    assert "MFU 32.0%   1.25 × planned   1.5 GiB" in str(line)


def test_steps_that_compile_are_told_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mesh: Mesh
) -> None:
    compiled, now = [0.0], [0.0]
    monkeypatch.setattr(f"{PROGRESS}.compile_seconds", lambda: compiled[0])
    monkeypatch.setattr(f"{PROGRESS}.time.perf_counter", lambda: now[0])
    made = Progress(
        options(), mesh, [nn.Linear(2, 2)], lambda: None, metrics_of(options(), mesh),
        amount=1, unit="rows", planned=CPU, begun=0, scales_loss=False,
    )  # fmt: skip

    def step(number: int, seconds: float, compiling: float = 0.0, *, logs: bool = False) -> None:
        now[0] += seconds + compiling
        compiled[0] += compiling
        if logs:
            made.log(number, torch.tensor(2.0), torch.tensor(3.0))
        made.show(number)

    step(1, 5.0, 40.0)  # waits 5 s for other ranks that compile
    step(2, 1.0)
    step(3, 1.0, logs=True)
    step(4, 1.0, 8.0, logs=True)
    now[0] += 7.0
    compiled[0] += 6.0
    made.leave_out(7.0)  # an evaluation, which compiles for rows in another number
    made.show(4)
    step(5, 1.0, logs=True)
    step(6, 1.0, logs=True)

    lines = capsys.readouterr().out.splitlines()
    told = [line.partition("norm 3   ")[2].rpartition("   ")[0] for line in lines]
    assert told == [
        "1,000.0 ms   1 rows/s   2.00 × planned   compiled in 40.0 s",
        "1,000.0 ms   1 rows/s   compiled in 8.0 s",
        "1,000.0 ms   1 rows/s   2.00 × planned   compiled in 6.0 s",
        "1,000.0 ms   1 rows/s   2.00 × planned",
    ]


def test_only_the_first_rank_prints_lines(
    capsys: pytest.CaptureFixture[str], mesh: Mesh, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    progress_of(replace(mesh, rank=1), "--metrics", str(file))(1, 2.5)
    assert capsys.readouterr().out == ""
    assert not file.exists()


@pytest.mark.parametrize(
    ("loss", "norm", "told"),
    [
        (math.nan, 3.0, "the loss is nan in step 20 on rank 0; the loss of step 10 was 2.50000"),
        (math.inf, 3.0, "the loss is inf in step 20"),
        (2.0, math.nan, "the gradient norm is nan in step 20;"),
    ],
)
def test_a_training_without_numbers_ends_at_once(
    loss: float,
    norm: float,
    told: str,
    capsys: pytest.CaptureFixture[str],
    mesh: Mesh,
    tmp_path: Path,
) -> None:
    file = tmp_path / "metrics.jsonl"
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = math.nan
    log = progress_of(mesh, "--metrics", str(file), model=model)
    log(10, 2.5)
    with pytest.raises(SystemExit) as left:
        log(20, loss, norm)
    assert left.value.code == 7
    error = capsys.readouterr().err
    assert told in error
    assert "1 of 2 parameters of rank 0 are nan or infinite, such as bias" in error
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("stopped", 20)


def test_a_training_without_numbers_goes_on_if_on_nan_says_so(mesh: Mesh) -> None:
    log = progress_of(mesh, "--on-nan", "go-on")
    assert math.isnan(log(10, math.nan))
    log(20, math.inf, math.nan)


def test_a_training_with_a_scaled_loss_ends_at_the_second_line_without_numbers(
    capsys: pytest.CaptureFixture[str], mesh: Mesh
) -> None:
    log = progress_of(mesh, scales_loss=True)
    log(10, math.nan)
    log(20, 2.5, math.inf)  # a step that overflowed was left out
    log(30, math.inf)
    with pytest.raises(SystemExit):
        log(40, math.nan)
    assert "the loss is nan in step 40" in capsys.readouterr().err


def nan_on_rank_1(place: str) -> str:
    mesh = start(pipeline=1, data=2, tensor=1)
    log = progress_of(mesh, "--metrics", f"{place}/{mesh.rank}.jsonl")
    try:
        log(5, math.nan if mesh.rank == 1 else 1.0)
    except SystemExit as left:
        return str(left.code)
    return "went on"


def test_a_loss_that_is_nan_on_one_rank_ends_all_and_names_it(tmp_path: Path) -> None:
    assert run_on_ranks(nan_on_rank_1, 2, str(tmp_path)) == ["7", "7"]
    told = json.loads((tmp_path / "0.jsonl").read_text().splitlines()[-1])["why"]
    assert told.startswith("the loss is nan in step 5 on rank 1")


def test_broken_parameters_are_found_in_every_type() -> None:
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.full((3,), 60000.0, dtype=torch.float16)),
            "b": nn.Parameter(torch.tensor([1.0, math.inf], dtype=torch.bfloat16)),
            "c": nn.Parameter(torch.tensor([math.nan])),
            "d": nn.Parameter(torch.full((2,), 3e38)),
            "e": nn.Parameter(torch.empty(0)),
        }
    )
    found = broken_of([model])
    assert (found.count, found.every, found.first) == (2, 4, "b")


@pytest.mark.parametrize("policy", ["stop", "go-on"])
def test_no_checkpoint_and_no_export_is_written_of_broken_weights(
    policy: str, mesh: Mesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "kept", tmp_path / "model.safetensors"
    words = ("--checkpoint", str(folder), "--export", str(file), "--on-nan", policy)
    keeper = Keeper(options(*words), mesh, rows_per_step=1, model="")
    model = nn.Linear(2, 2)
    optimizer = build_optimizer([model], lambda p: torch.optim.SGD(p, lr=0.5), zero=0, mesh=mesh)
    recipe = Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash)
    keeper.restore([model], optimizer, recipe)
    keeper.after(10)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    if policy == "stop":
        with pytest.raises(SystemExit) as left:
            keeper.after(20)
        assert left.value.code == 7
        with pytest.raises(SystemExit):
            keeper.export()
    else:
        keeper.after(20)
        keeper.export()
    keeper._signals.restore_handlers()
    told = "1 of 2 parameters of rank 0 are nan or infinite, such as weight"
    assert told in capsys.readouterr().err
    assert [one.name for one in checkpoints_in(folder)] == ["step-10"]
    assert not file.exists()


class Terminal(StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return what stands there after all; the bars before a line are written over by it."""
        rows = [""]
        for part in re.findall(r"\x1b\[K|[\r\n]|[^\x1b\r\n]+", self.getvalue()):
            if part == "\n":
                rows.append("")
                self.column = 0
            elif part == "\r":
                self.column = 0
            elif part == "\x1b[K":
                rows[-1] = rows[-1][: self.column]
            else:
                rows[-1] = rows[-1][: self.column] + part + rows[-1][self.column + len(part) :]
                self.column += len(part)
        return rows

    column = 0


@pytest.mark.parametrize(("words", "stream", "bars"), [
    ((), Terminal, 2), (("--json",), Terminal, 0), ((), StringIO, 0),
])  # fmt: skip
def test_a_bar_stands_between_lines_of_a_terminal_alone(
    words: tuple[str, ...],
    stream: type[StringIO],
    bars: int,
    monkeypatch: pytest.MonkeyPatch,
    mesh: Mesh,
) -> None:
    console = stream()
    monkeypatch.setattr(sys, "stdout", console)
    times = iter((0.0, 1.0, 1.01, 2.0, 3.0))  # the third comes too soon after the second
    monkeypatch.setattr(f"{PROGRESS}.time.perf_counter", lambda: next(times))
    given = options(*words)
    progress = Progress(
        given, mesh, [nn.Linear(2, 2)], lambda: None, metrics_of(given, mesh), amount=1,
        unit="rows", planned=("h100-sxm", 0.8, 0.4), begun=0, scales_loss=False,
    )  # fmt: skip
    for step in (1, 2, 3):
        progress.show(step)
    progress.log(40, torch.tensor(2.5), torch.tensor(1.0))
    progress.show(40)
    assert console.getvalue().count("─") == 30 * bars - (2 if bars else 0)
    assert console.getvalue().count("0:00:39 left") == bool(bars)
    if isinstance(console, Terminal):
        line, end = console.screen()
        assert line.startswith('{"step": 40' if words else "step     40   loss 2.50000")
        assert "─" not in line
        assert not end


class Writer(SimpleNamespace):
    """Stands in for TensorBoard's, which is large: keeps what it is told."""

    made: list[Writer] = []  # noqa: RUF012

    def __init__(self, folder: str, *, purge_step: int) -> None:
        super().__init__(folder=folder, purge_step=purge_step, points={})
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points[name, step] = value

    def flush(self) -> None:
        pass


def test_curves_have_the_figures_of_lines_and_evaluations_from_where_they_go_on(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh
) -> None:
    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    metrics = Metrics(None, mesh, Curves(Path("curves"), mesh, begun=20))
    metrics.add(step=30, loss=2.5, mfu=None, unit="tokens", seconds_left=9.0)
    metrics.add(event=Event.EVALUATED, step=30, loss=2.0, metrics={"accuracy": 0.5}, rows=8)
    metrics.add(event=Event.KEPT, step=30, seconds=1.0)
    Metrics(None, replace(mesh, rank=1), Curves(Path("curves"), replace(mesh, rank=1), begun=0))
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step) == ("curves", 21)
    assert writer.points == {
        ("training/loss", 30): 2.5, ("evaluation/loss", 30): 2.0, ("evaluation/accuracy", 30): 0.5,
    }  # fmt: skip


def test_curves_without_tensorboard_are_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="6"):
        Keeper(options("--tensorboard", "curves"), mesh, rows_per_step=1, model="")
    assert "pip install tensorboard" in capsys.readouterr().err


def test_the_learning_rate_is_that_of_the_step_and_not_of_the_next(mesh: Mesh) -> None:
    keeper = Keeper(options(), mesh, rows_per_step=1, model="")
    model = nn.Linear(2, 2)
    optimizer = build_optimizer([model], lambda p: torch.optim.SGD(p, lr=0.5), zero=0, mesh=mesh)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert keeper._learning_rate() == 0.5
    stop(mesh)
