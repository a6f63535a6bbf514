"""The folder of checkpoints as a training opens it: where another one writes, it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.runtime.checkpointing.claim import NAME, claim, holder_of
from autopar.runtime.checkpointing.keeper import Keeper
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.weights.initial_weights import Recipe
from tests.field.bad_inputs.kept import write_checkpoint
from tests.runtime.checkpointing.test_claim import leave
from tests.runtime.checkpointing.test_progress import no_weights, options


def opened(mesh: Mesh, *words: str) -> Keeper:
    return Keeper(options(*words), mesh, rows_per_step=1, model="")


def test_a_folder_into_which_another_training_writes_is_refused(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = leave(tmp_path)
    with pytest.raises(SystemExit) as left:
        opened(mesh, "--checkpoint", str(tmp_path))
    assert left.value.code == 6
    assert f"{tmp_path} is in use: {holder} writes its checkpoints there" in capsys.readouterr().err


def test_a_checkpoint_may_be_evaluated_while_its_training_goes_on(tmp_path: Path) -> None:
    from autopar.runtime.ranks.mesh import start, stop

    step = write_checkpoint(tmp_path, 4)
    mesh = start(pipeline=1, data=1, tensor=1)
    holder = leave(tmp_path)
    with pytest.raises(SystemExit):
        opened(mesh, "--resume", str(step), "--steps", "5")
    assert opened(mesh, "--resume", str(step), "--steps", "4").step == 4
    assert holder_of(tmp_path) == holder
    stop(mesh)


def test_a_training_that_is_over_or_fails_gives_its_folder_back(tmp_path: Path, mesh: Mesh) -> None:
    keeper, model = opened(mesh, "--checkpoint", str(tmp_path), "--steps", "1"), nn.Linear(2, 2)
    assert (tmp_path / NAME).exists()
    optimizer = build_optimizer([model], torch.optim.AdamW, zero=0, mesh=mesh)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    keeper.after(1)
    keeper.export()
    assert not (tmp_path / NAME).exists()


def test_a_training_whose_folder_was_taken_ends(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper, model = opened(mesh, "--checkpoint", str(tmp_path)), nn.Linear(2, 2)
    optimizer = build_optimizer([model], torch.optim.AdamW, zero=0, mesh=mesh)
    keeper.restore([model], optimizer, Recipe(shapes={}, source=no_weights, dtypes={}, digest=hash))
    assert keeper._claim is not None
    keeper._claim._lost.set()
    with pytest.raises(SystemExit) as left:
        keeper.after(10)
    keeper._signals.restore_handlers()
    assert left.value.code == 7
    assert f"another training has taken {tmp_path}" in capsys.readouterr().err
    assert claim(tmp_path) is not None
