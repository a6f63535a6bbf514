"""Real disks that are full or read-only: what is kept stays, and a training is told or goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from autopar.runtime.checkpointing.finding import (
    checkpoints_in,
    find_checkpoint,
    remove_old_checkpoints,
    verify_checkpoint,
)
from autopar.runtime.checkpointing.keeper import Keeper
from autopar.runtime.checkpointing.manifest import Moment
from autopar.runtime.checkpointing.model_files import (
    Destination,
    WeightsFile,
    files_of_model,
    write_model,
)
from autopar.runtime.checkpointing.safetensors_file import Entry
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.weights.initial_weights import Recipe
from tests.runtime.checkpointing.test_progress import no_weights, options
from tests.runtime.checkpointing.written import write_checkpoint

SMALL_BYTES = 140 * 1024  # three checkpoints of 40 KB fit, and not four


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def _keep(folder: Path, step: int, mesh: Mesh) -> str | None:
    model = nn.Linear(64, 64)
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    moment = Moment(step=step, rows=step, updates=step)
    return write_checkpoint(folder, moment, "", [model], optimizer, mesh)


def test_a_training_on_a_full_disk_goes_on_and_keeps_again_once_there_is_room(
    disk: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--checkpoint", str(disk / "kept"), "--checkpoint-every", "1", "--keep", "9")
    keeper = Keeper(options(*words), mesh, rows_per_step=1, model="")
    model = nn.Linear(64, 64)
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    for step in range(1, 6):
        keeper.after(step)
    keeper._finish()
    kept = [one.name for one in checkpoints_in(disk / "kept")]
    assert kept == ["step-3", "step-2", "step-1"]
    told = capsys.readouterr().err
    assert "step 4 could not be kept (No space left on device" in told
    assert "the last one is step 3" in told
    assert not list(disk.rglob("*.tmp"))
    for name in kept:
        verify_checkpoint(disk / "kept" / name)
    remove_old_checkpoints(disk / "kept", 1, None)
    keeper.after(6)
    keeper._finish()
    keeper._signals.restore_handlers()
    assert "kept step 6" in capsys.readouterr().err
    assert verify_checkpoint(disk / "kept" / "step-6").moment.step == 6


def test_weights_that_do_not_fit_leave_nothing_behind_and_what_was_there(disk: Path) -> None:
    def tensor_of(_: WeightsFile, entry: Entry) -> torch.Tensor:
        return torch.ones(entry.shape)

    to = Destination(disk / "model.safetensors")
    entry = Entry(name="x", dtype=torch.float32, shape=(1000,))
    write_model(to, files_of_model(to, [entry], {}), tensor_of)
    before = to.path.read_bytes()
    large = Entry(name="x", dtype=torch.float32, shape=(SMALL_BYTES,))
    with pytest.raises(OSError, match="No space left on device"):
        write_model(to, files_of_model(to, [large], {}), tensor_of)
    assert [one.name for one in disk.iterdir()] == ["model.safetensors"]
    assert to.path.read_bytes() == before


@pytest.mark.parametrize("option", ["--checkpoint", "--export", "--metrics"])
def test_a_read_only_disk_is_refused_before_anything_is_trained(
    option: str, disk: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    _remount(disk, "ro")
    with pytest.raises(SystemExit) as left:
        Keeper(options(option, str(disk / "out")), mesh, rows_per_step=1, model="")
    assert left.value.code == 6
    told = capsys.readouterr().err
    assert f"nothing can be written to {disk / 'out'}: Read-only file system" in told
    assert f"with {option}" in told


def test_a_disk_that_becomes_read_only_keeps_what_it_has(
    disk: Path, tmp_path: Path, mesh: Mesh
) -> None:
    assert _keep(disk, 1, mesh) is None
    assert _keep(disk, 2, mesh) is None
    _remount(disk, "ro")
    failure = _keep(disk, 3, mesh)
    assert failure is not None
    assert "Read-only file system" in failure
    remove_old_checkpoints(disk, 1, None)
    assert [one.name for one in checkpoints_in(disk)] == ["step-2", "step-1"]
    found = find_checkpoint(tmp_path / "elsewhere", str(disk / "step-2"), mesh)
    assert found is not None
    _remount(disk, "rw")
    assert _keep(disk, 3, mesh) is None
    assert [one.name for one in checkpoints_in(disk)] == ["step-3", "step-2", "step-1"]
