"""Checkpoints and weights in a store, where nothing can be renamed: what is whole, what is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

from autopar.runtime.checkpointing.finding import (
    AUTO,
    checkpoints_in,
    find_checkpoint,
    remove_old_checkpoints,
    unfinished_in,
    verify_checkpoint,
)
from autopar.runtime.checkpointing.manifest import NAME, Moment, rank_file
from autopar.runtime.checkpointing.model_files import destination
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.locations import Location, StorePath, size_of, write
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.weights.stored_tensors import open_tensors
from tests.bucket import CLOSED, Bucket, bucket, object_file
from tests.runtime.checkpointing.written import write_checkpoint

SHARD = rank_file(0)


def _write(folder: Location, step: int, mesh: Mesh, *, loss: float | None = None) -> str | None:
    optimizer = build_optimizer([model := nn.Linear(3, 4)], AdamW, zero=0, mesh=mesh)
    moment = Moment(step=step, rows=step, updates=step, evaluation=loss)
    return write_checkpoint(folder, moment, "digest", [model], optimizer, mesh)


def _flip(place: StorePath) -> None:
    content = bytearray(place.read_bytes())
    content[-3] ^= 1
    place.write([bytes(content)])


DAMAGES: dict[str, tuple[Callable[[StorePath], object], str]] = {
    "flipped byte": (lambda one: _flip(one / SHARD), "other contents than were written"),
    "missing": (lambda one: (one / SHARD).unlink(), f"{SHARD} is missing"),
    "cut manifest": (lambda one: (one / NAME).write([b'{"a"']), "no description of a checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_set_aside(
    kind: str, tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (damage, told) = bucket(tmp_path), DAMAGES[kind]
    for step in (1, 2):
        assert _write(run, step, mesh) is None
    damage(run / "step-2")
    found = find_checkpoint(run, AUTO, mesh)
    assert found is not None
    assert found.manifest.moment.step == 1
    assert told in capsys.readouterr().err
    assert [one.name for one in run.iterdir()] == ["step-1", "step-2.broken"]


def test_what_has_no_manifest_is_never_taken_and_is_cleared_away(
    tmp_path: Path, mesh: Mesh
) -> None:
    run = bucket(tmp_path)
    _write(run, 1, mesh)
    for step in (2, 3):
        write(run / f"step-{step}" / "rank-00007.safetensors", [b"half"])
    found = find_checkpoint(run, AUTO, mesh)
    assert found is not None
    assert found.manifest.moment.step == 1
    assert {one.name for one in unfinished_in(run)} == {"step-2", "step-3"}
    assert _write(run, 2, mesh) is None
    assert {one.name for one in (run / "step-2").iterdir()} == {NAME, SHARD}
    remove_old_checkpoints(run, 3, None)
    assert [one.name for one in run.iterdir()] == ["step-1", "step-2"]
    again = _write(run, 2, mesh)
    assert again is not None
    assert "File exists" in again
    assert verify_checkpoint(run / "step-2").moment.step == 2


def test_the_newest_the_best_and_every_so_many_steps_stay(tmp_path: Path, mesh: Mesh) -> None:
    run = bucket(tmp_path)
    for step in range(10, 100, 10):
        _write(run, step, mesh, loss=0.0 if step == 30 else 1.0)
    remove_old_checkpoints(run, 2, 40)
    assert [one.name for one in checkpoints_in(run)] == [
        f"step-{step}" for step in (90, 80, 70, 40, 30)
    ]


def test_slices_are_those_of_safetensors_and_only_their_rows_are_read(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.arange(24, dtype=torch.bfloat16).view(6, 4),
        "one": torch.tensor(2.5),
        "none": torch.ones(0, 3),
        "flags": torch.tensor([True, False, True]),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"a": "b"})
    place = bucket(tmp_path / "store").with_name("x.safetensors")
    place.write([(tmp_path / "x.safetensors").read_bytes()])
    with open_tensors(place) as found, safe_open(tmp_path / "x.safetensors", "pt") as expected:
        assert set(found.keys()) == set(expected.keys())
        for name in tensors:
            assert torch.equal(found.get_tensor(name), expected.get_tensor(name))
            assert found.get_slice(name).get_shape() == expected.get_slice(name).get_shape()
        Bucket.ranges.clear()
        for columns in (slice(0, 1), slice(2, 4)):
            index = slice(2, 5), columns
            ours, theirs = (one.get_slice("wide")[index] for one in (found, expected))
            assert torch.equal(ours, theirs)
        assert [high - low for _, low, high in Bucket.ranges] == [3 * 4 * 2]
    object_file(place).write_bytes(place.read_bytes(0, size_of(place) - 1))
    with pytest.raises(SafetensorError, match="another size"), open_tensors(place):
        pass


def test_weights_of_another_program_in_a_store_are_not_replaced(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    place = bucket(tmp_path) / "model.safetensors"
    place.write([b"mine"])
    for text in (str(place), str(place.parent)):
        with pytest.raises(SystemExit):
            destination(text, mesh)
        assert f"{place} is there, and autopar has not exported it" in capsys.readouterr().err
    place.unlink()
    assert destination(f"{place.parent}/", mesh) is not None
    with pytest.raises(SystemExit):
        destination(f"{CLOSED}/out", mesh)
    assert f"nothing can be written to {CLOSED}/out: PermissionError" in capsys.readouterr().err
