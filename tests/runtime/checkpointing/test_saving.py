"""Checkpoints that are written while a training goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from autopar.runtime.checkpointing.finding import (
    AUTO,
    checkpoints_in,
    find_checkpoint,
    remove_old_checkpoints,
)
from autopar.runtime.checkpointing.keeper import Keeper
from autopar.runtime.checkpointing.manifest import NAME, Moment
from autopar.runtime.checkpointing.owners import Owners
from autopar.runtime.checkpointing.restoring import CheckpointSaving, restore
from autopar.runtime.checkpointing.writing import CheckpointSnapshot, snapshot
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.weights.initial_weights import Recipe
from tests.runtime.checkpointing.test_progress import no_weights, options


def _taken(folder: Path, model: nn.Module, mesh: Mesh) -> CheckpointSnapshot:
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    moment = Moment(step=1, rows=1, updates=1)
    found = snapshot(folder, moment, "", [model], optimizer, Owners(mesh))
    assert isinstance(found, CheckpointSnapshot)
    return found


def test_what_is_written_is_what_was_there_at_its_step(tmp_path: Path, mesh: Mesh) -> None:
    model, saving = nn.Linear(300, 300), CheckpointSaving(mesh)
    before = model.weight.detach().clone()
    saving.begin(_taken(tmp_path, model, mesh), time.perf_counter())
    with torch.no_grad():
        model.weight.zero_()
    assert find_checkpoint(tmp_path, AUTO, mesh) is None, "it has no name yet"
    saved = saving.finish()
    assert (saved.step, saved.failure, saving.is_under_way) == (1, None, False)
    assert 0 < saved.waited_seconds <= saved.seconds
    found = find_checkpoint(tmp_path, AUTO, mesh)
    assert found is not None
    restore(found, [model], build_optimizer([model], AdamW, zero=0, mesh=mesh))
    assert torch.equal(model.weight, before)


def test_without_room_for_a_copy_it_is_written_at_once(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n", encoding="utf-8")
    monkeypatch.setattr(
        "autopar.runtime.checkpointing.safetensors_file._MEMORY", tmp_path / "meminfo"
    )
    saving = CheckpointSaving(mesh)
    saving.begin(_taken(tmp_path, nn.Linear(20, 20), mesh), time.perf_counter())
    assert not saving.is_writing
    assert saving.finish().failure is None
    assert find_checkpoint(tmp_path, AUTO, mesh) is not None


def test_the_newest_stay_and_every_so_many_steps(tmp_path: Path) -> None:
    for step in range(10, 100, 10):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / NAME).touch()
    (tmp_path / "step-100.tmp").mkdir()
    remove_old_checkpoints(tmp_path, 2, 40)
    assert {one.name for one in tmp_path.iterdir()} == {"step-40", "step-70", "step-80", "step-90"}
    remove_old_checkpoints(tmp_path, 1, None)
    assert [one.name for one in tmp_path.iterdir()] == ["step-90"]


def test_a_checkpoint_is_written_when_the_minutes_are_over(tmp_path: Path, mesh: Mesh) -> None:
    words = ("--checkpoint", str(tmp_path), "--checkpoint-minutes", "1")
    keeper, model = Keeper(options(*words), mesh, rows_per_step=1, model=""), nn.Linear(2, 2)
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    keeper.after(1)
    keeper._begun_at -= 61
    keeper._signals._steps_between = 1
    keeper.after(2)
    keeper._finish()
    keeper._signals.restore_handlers()
    assert [one.name for one in checkpoints_in(tmp_path)] == ["step-2"]


def _steps(keeper: Keeper, steps: range) -> None:
    for step in steps:
        keeper._signals._steps_between = 1  # ranks ask each other after every step
        keeper.after(step)
    keeper._finish()
    keeper._signals.restore_handlers()


def _local(folder: Path, mesh: Mesh, *words: str) -> Keeper:
    """Return a keeper of a training with an outer step after every four steps."""
    words = ("--checkpoint", str(folder), *words)
    local = replace(mesh, sync_every=4)
    keeper, model = Keeper(options(*words), local, rows_per_step=1, model=""), nn.Linear(2, 2)
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    return keeper


def test_a_checkpoint_by_the_clock_waits_for_the_next_outer_step(
    tmp_path: Path, mesh: Mesh
) -> None:
    keeper = _local(tmp_path, mesh, "--checkpoint-minutes", "1")
    _steps(keeper, range(1, 5))
    assert not checkpoints_in(tmp_path)
    keeper._begun_at -= 61
    _steps(keeper, range(5, 10))
    assert [one.name for one in checkpoints_in(tmp_path)] == ["step-8"]


def test_checkpoints_follow_outer_steps(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = _local(tmp_path, mesh, "--checkpoint-every", "6")
    _steps(keeper, range(1, 13))
    assert [one.name for one in checkpoints_in(tmp_path)] == ["step-8"]
    assert "note: --checkpoint-every is 8: replicas are equal every 4 steps" in (
        capsys.readouterr().err
    )


def test_a_signal_ends_the_training_after_the_next_outer_step(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = _local(tmp_path, mesh)
    keeper.after(1)
    keeper._signals._asked_at = 0.0
    with pytest.raises(SystemExit):
        _steps(keeper, range(2, 9))
    keeper._signals.restore_handlers()  # a training that ends ignores signals
    assert [one.name for one in checkpoints_in(tmp_path)] == ["step-4"]
    assert "stops after step 4, the next outer step" in capsys.readouterr().err


def test_a_failure_in_the_thread_is_told_when_the_training_asks(
    tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.runtime.checkpointing.writing.write_tensors", full)
    saving = CheckpointSaving(mesh)
    saving.begin(_taken(tmp_path, nn.Linear(2, 2), mesh), time.perf_counter())
    assert saving.finish().failure == "No space left on device"
    assert list(tmp_path.iterdir()) == []
