"""Checkpoints as they lie on a disk: whole ones, damaged ones, and those of another model."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop

from autopar.runtime.checkpointing.finding import AUTO, NEVER, find_checkpoint, verify_checkpoint
from autopar.runtime.checkpointing.manifest import NAME, Moment, rank_file
from autopar.runtime.checkpointing.restoring import restore
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh
from tests.runtime.checkpointing.written import write_checkpoint

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
SHARD = rank_file(0)


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 3)
        self.second.weight = nn.Parameter(torch.ones(3, width))
        self.scale = nn.Parameter(torch.tensor(1.5))  # of no dims, as the counts of steps are
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out


def _optimizer(model: nn.Module, factory: Factory, mesh: Mesh) -> Optimizer:
    return build_optimizer([model], factory, zero=0, mesh=mesh)


def _train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(2, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _write(folder: Path, step: int, mesh: Mesh, *, width: int = 4) -> Path:
    model = Small(width)
    optimizer = _optimizer(model, AdamW, mesh)
    _train(model, optimizer, 1)
    moment = Moment(step=step, rows=8 * step, updates=step)
    assert write_checkpoint(folder, moment, "digest", [model], optimizer, mesh) is None
    return folder / f"step-{step}"


class Unlikely(Optimizer):
    """Steps only while its states are numbers that JSON does not have."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                state = self.state[one] or {"least": math.inf, "most": torch.tensor(-math.inf)}
                self.state[one] = {**state, "last": math.nan}
                if state["least"] > 0 > state["most"] and state.get("last", math.nan) != 0:
                    one.add_(one.grad, alpha=-0.1)


class Counting(Optimizer):
    """Keeps a number in its groups, as schedule-free optimizers do, and one as an attribute."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"steps": 0})
        self.total = 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        self.total += 0.5
        for group in self.param_groups:
            group["steps"] += 1
            for one in group["params"]:
                if one.grad is not None:
                    one.add_(one.grad, alpha=-0.1 * self.total / group["steps"] ** 2)


FACTORIES: dict[str, Factory] = {
    "adamw": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: SGD(p, lr=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "nadam": lambda p: NAdam(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.1, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "states without a number": Unlikely,
    "a number in its groups": Counting,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_any_optimizer_goes_on_to_the_bit(name: str, tmp_path: Path, mesh: Mesh) -> None:
    model, other = Small(), Small()
    optimizer = _optimizer(model, FACTORIES[name], mesh)
    _train(model, optimizer, 3)
    moment = Moment(step=3, rows=6, updates=3, loss_scale=0.1, calm_steps=2)
    assert write_checkpoint(tmp_path, moment, "", [model], optimizer, mesh) is None
    found = find_checkpoint(tmp_path, AUTO, mesh)
    assert found is not None
    assert found.manifest.moment == moment
    again = _optimizer(other, FACTORIES[name], mesh)
    restore(found, [other], again)
    for one, its in ((model, optimizer), (other, again)):
        _train(one, its, 2)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in other.state_dict().items())


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


class Hostile:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, ("raise AssertionError('it was unpickled')",)


def _other_shard(path: Path) -> None:
    shutil.copy(path.parent / "step-1" / SHARD, path / SHARD)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda path: _flip(path / SHARD, -3), "other contents than were written"),
    "truncated": (lambda path: (path / SHARD).write_bytes(b"\0" * 10), "has 10 bytes, not"),
    "missing": (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
    "foreign": (_other_shard, "other contents than were written"),
    "no manifest": (lambda path: (path / NAME).unlink(), f"it has no {NAME}"),
    "cut manifest": (
        lambda path: (path / NAME).write_text((path / NAME).read_text()[:-9]),
        "no description of a checkpoint",
    ),
    "edited manifest": (
        lambda path: (path / NAME).write_text((path / NAME).read_text().replace("16", "17", 1)),
        "has been changed",
    ),
    "pickled code": (
        lambda path: (path / SHARD).write_bytes(pickle.dumps(Hostile())),
        "bytes, not",
    ),
    "hostile": (lambda path: (path / NAME).write_text(json.dumps([1])), "no description"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    kind: str, tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, told = DAMAGES[kind]
    _write(tmp_path, 1, mesh)
    newest = _write(tmp_path, 2, mesh)
    damage(newest)
    with pytest.raises(SystemExit) as left:
        find_checkpoint(tmp_path, str(newest), mesh)
    assert left.value.code == 6
    assert told in capsys.readouterr().err
    found = find_checkpoint(tmp_path, AUTO, mesh)
    assert found is not None
    assert found.manifest.moment.step == 1
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
    assert {one.name for one in tmp_path.iterdir()} == {"step-1", "step-2.broken"}


def test_a_training_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(_write(tmp_path, 1, mesh) / SHARD, -3)
    with pytest.raises(SystemExit):
        find_checkpoint(tmp_path, AUTO, mesh)
    assert "none of the 1 checkpoints" in capsys.readouterr().err


def test_what_was_being_written_when_a_run_was_killed_is_no_checkpoint(
    tmp_path: Path, mesh: Mesh
) -> None:
    _write(tmp_path, 1, mesh)
    half = tmp_path / "step-2.tmp"
    shutil.copytree(tmp_path / "step-1", half)
    found = find_checkpoint(tmp_path, AUTO, mesh)
    assert found is not None
    assert found.manifest.moment.step == 1
    assert verify_checkpoint(_write(tmp_path, 2, mesh)).moment.step == 2
    assert not half.exists()


def test_nothing_is_written_over(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = _write(tmp_path, 1, mesh), _write(tmp_path, 2, mesh)
    for resume, told in ((NEVER, "has checkpoints"), (str(first), "later checkpoints")):
        with pytest.raises(SystemExit):
            find_checkpoint(tmp_path, resume, mesh)
        assert told in capsys.readouterr().err
    found = find_checkpoint(tmp_path / "elsewhere", str(first), mesh)
    assert found is not None


def test_a_path_without_a_checkpoint_tells_what_is_there(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, newest = _write(tmp_path / "run", 1, mesh), _write(tmp_path / "run", 2, mesh)
    _flip(newest / SHARD, -3)
    (tmp_path / "empty").mkdir()
    for path, told in (
        (tmp_path / "run", f"is a folder of 2 checkpoints, and --resume names one|{whole}, the"),
        (tmp_path / "gone", f"no {tmp_path / 'gone'} exists|--resume auto"),
        (whole / SHARD, f"{SHARD} is a file, and a checkpoint is a folder|--resume auto"),
        (tmp_path / "empty", "empty is not whole|name another one"),
    ):
        with pytest.raises(SystemExit) as left:
            find_checkpoint(tmp_path / "new", str(path), mesh)
        assert left.value.code == 6
        error = capsys.readouterr().err
        assert all(part in error for part in told.split("|")), error


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, 1, mesh)
    found, model = find_checkpoint(tmp_path, AUTO, mesh), Small(5)
    assert found is not None
    with pytest.raises(SystemExit) as left:
        restore(found, [model], _optimizer(model, AdamW, mesh))
    assert left.value.code == 6
    assert "of another model: first.weight is [4, 3], not [5, 3]" in capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_told_and_not_raised(tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "file").write_text("")
    model = Small()
    optimizer = _optimizer(model, AdamW, mesh)
    moment = Moment(step=1, rows=8, updates=1)
    failure = write_checkpoint(tmp_path / "file", moment, "", [model], optimizer, mesh)
    assert failure is not None
    assert "Not a directory" in failure


def test_states_of_which_no_checkpoint_can_be_made_are_told(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Small()
    optimizer = _optimizer(model, AdamW, mesh)
    _train(model, optimizer, 1)
    optimizer.state[model.first.weight]["history"] = [torch.ones(3)]
    with pytest.raises(SystemExit):
        write_checkpoint(tmp_path, Moment(step=1, rows=8, updates=1), "", [model], optimizer, mesh)
    assert "AdamW keeps list as 'history' of first.weight" in capsys.readouterr().err
