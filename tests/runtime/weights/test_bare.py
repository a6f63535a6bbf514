"""What a constructor gives no numbers is refused, for each rank would have others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from autopar.runtime.ranks.leaving import MISMATCH
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.weights.initial_weights import build, record
from autopar.runtime.weights.loading import load_safetensors

CPU = torch.device("cpu")
ALONE = Axis(0, 1, None)


def _of(made: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    """A model with one parameter, which is not given numbers after this."""

    def build_model() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_parameter("own", nn.Parameter(made()))
        return model

    return build_model


BARE: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3),
    "constructor": lambda: torch.Tensor(3),
    "copied": lambda: torch.empty(3).clone(),
    "of another": lambda: torch.ones(3).new_empty(3).double(),
    "like": lambda: torch.empty_like(torch.ones(3)),
    "skipped": lambda: nn.utils.skip_init(nn.Linear, 3, 3).weight,  # type: ignore[no-untyped-call]
}
FILLED: dict[str, Callable[[], Tensor]] = {
    "drawn": lambda: torch.empty(3).normal_(),
    "by an initialiser": lambda: nn.init.trunc_normal_(torch.empty(3)),
    "in part": lambda: nn.init.zeros_(torch.empty(3)[1:]),
    "as a copy": lambda: torch.empty(3).copy_(torch.ones(3)),
    "full": lambda: torch.full((3,), 2.0),
    "multiplied": lambda: torch.empty(3).zero_().clone() * 2,
    "given": lambda: torch.tensor([1.0, 2.0]),
    "of no elements": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("name", BARE)
def test_a_parameter_that_nothing_fills_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        build(_of(BARE[name]), seed=0)
    assert left.value.code == MISMATCH
    told = capsys.readouterr().err
    assert "the parameter own has no initial weights" in told
    assert "fix: " in told


@pytest.mark.parametrize("name", FILLED)
def test_a_parameter_that_is_filled_in_any_way_is_not_refused(name: str) -> None:
    assert torch.isfinite(build(_of(FILLED[name]), seed=0).get_parameter("own")).all()


def test_a_parameter_that_nothing_fills_is_filled_from_files(tmp_path: Path) -> None:
    trained = {"weight": torch.eye(2), "bias": torch.ones(2), "own": torch.arange(3.0)}
    save_file(trained, tmp_path / "model.safetensors")
    model, recipe = record(_of(BARE["empty"]), seed=0)
    load_safetensors(model, tmp_path, {}, ALONE, device=CPU)
    recipe.materialise(model, {}, ALONE, CPU)
    assert model.get_parameter("own").tolist() == [0, 1, 2]


def _parameter_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def _buffer_on_meta() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.ones(2, device="meta"))
    return model


def _in_full() -> nn.Module:
    model = _parameter_on_meta()
    model.get_parameter("0.weight").untyped_storage().resize_(64)
    return model


LEFT = {
    "the parameter 1.weight": _parameter_on_meta,
    "the buffer table": _buffer_on_meta,
    "the parameter 1.bias": lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(2, device="meta")),
    "parameter 1.weight": _in_full,
}


@pytest.mark.parametrize("told", LEFT)
@pytest.mark.filterwarnings("ignore:the model is built in full")
def test_what_stays_on_meta_is_refused(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(LEFT[told], seed=0)
    found = capsys.readouterr().err
    assert "no initial weights: the model's constructor leaves it on the meta device" in found
    assert told.replace(".bias", ".weight") in found
