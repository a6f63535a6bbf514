from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.runtime.model.parts import keep_only
from autopar.runtime.ranks.mesh import Axis, start, stop
from autopar.runtime.tensor.shards import Split, local_part
from autopar.runtime.weights.initial_weights import record
from autopar.runtime.weights.loading import load_safetensors, note_unused

CPU = torch.device("cpu")
FUSED = Split(0, ((3, 1), (3, 1)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.fused = nn.Linear(4, 6)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def _weights() -> dict[str, torch.Tensor]:
    return {
        "embedding.weight": torch.randn(5, 4),
        "fused.weight": torch.randn(6, 4),
        "fused.bias": torch.randn(6),
    }


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    for number, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reads_its_slices(tmp_path: Path, rank: int) -> None:
    weights, axis = _weights(), Axis(rank, 2, None)
    _save(tmp_path, weights)
    splits = {"fused.weight": FUSED, "fused.bias": FUSED, "head.weight": Split(1, ((2, 2),))}
    model, recipe = record(_Model, seed=0, dtype=torch.float64)
    load_safetensors(model, tmp_path, splits, axis, device=CPU)
    recipe.materialise(model, splits, axis, CPU)
    for name in ("fused.weight", "fused.bias"):
        expected = local_part(weights[name], FUSED, axis).double()
        assert torch.equal(model.get_parameter(name), expected)
    embedding = local_part(weights["embedding.weight"], splits["head.weight"], axis)
    assert torch.equal(model.get_parameter("head.weight"), embedding.double())
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert model.get_buffer("table").tolist() == [0, 1, 2]


def test_one_file_may_be_named_itself(tmp_path: Path) -> None:
    weights = _weights()
    save_file(weights, tmp_path / "all.safetensors")
    model, _ = record(_Model, seed=0)
    load_safetensors(model, tmp_path / "all.safetensors", {}, Axis(0, 1, None), device=CPU)
    assert torch.equal(model.get_parameter("fused.bias"), weights["fused.bias"])


def test_more_ranks_than_rows_leave_some_with_none(tmp_path: Path) -> None:
    _save(tmp_path, _weights())
    model, _ = record(_Model, seed=0)
    splits = {"embedding.weight": Split(0, ((5, 1),))}
    load_safetensors(model, tmp_path, splits, Axis(6, 7, None), device=CPU)
    assert model.get_parameter("head.weight").shape == (0, 4)


def test_missing_names_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = _weights()
    _save(tmp_path, {"fused.weight": weights["fused.weight"]})
    with pytest.raises(SystemExit):
        load_safetensors(record(_Model, seed=0)[0], tmp_path, {}, Axis(0, 1, None), device=CPU)
    told = capsys.readouterr().err
    assert "lacks 2 parameters: embedding.weight, fused.bias" in told
    assert '--allow-missing "embedding.*"' in told


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_there", [True, False])
def test_what_may_be_missing_starts_as_under_the_seed_on_every_rank(
    tmp_path: Path, rank: int, is_there: bool
) -> None:
    weights, axis = _weights(), Axis(rank, 2, None)
    if is_there:  # in shapes of another model
        weights |= {"fused.weight": torch.zeros(8, 4), "fused.bias": torch.zeros(8)}
    else:
        weights = {"embedding.weight": weights["embedding.weight"]}
    _save(tmp_path, weights)
    splits = {"fused.weight": FUSED, "fused.bias": FUSED}
    whole = record(_Model, seed=3)
    whole[1].materialise(whole[0], {}, Axis(0, 1, None), CPU)
    model, recipe = record(_Model, seed=3)
    left = load_safetensors(model, tmp_path, splits, axis, device=CPU, may_lack=["fused.*"])
    recipe.materialise(model, splits, axis, CPU)
    assert left == ["fused.weight", "fused.bias"]
    for name in left:
        expected = local_part(whole[0].get_parameter(name).detach(), FUSED, axis)
        assert torch.equal(model.get_parameter(name), expected)
    assert torch.equal(model.get_parameter("head.weight"), weights["embedding.weight"])


def test_a_pattern_spares_no_others_and_takes_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, alone = _weights(), Axis(0, 1, None)
    del weights["fused.bias"]
    _save(tmp_path, weights)
    for pattern in ("head.*", "fused", "*.Bias"):
        model = record(_Model, seed=0)[0]
        with pytest.raises(SystemExit):
            load_safetensors(model, tmp_path, {}, alone, device=CPU, may_lack=[pattern])
        assert "lacks 1 parameters: fused.bias" in capsys.readouterr().err
    model = record(_Model, seed=0)[0]
    found = load_safetensors(model, tmp_path, {}, alone, device=CPU, may_lack=["head.*", "*.bias"])
    assert found == ["fused.bias"]
    assert torch.equal(model.get_parameter("head.weight"), weights["embedding.weight"])


def test_tensors_that_the_model_has_not_are_named_once_and_those_under_any_name_of_it_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {f"old.{number}": torch.zeros(1) for number in range(7)}
    _save(tmp_path, _weights() | {"head.weight": torch.randn(5, 4), "table": torch.ones(3)} | more)
    mesh, recipe = start(pipeline=1, data=1, tensor=1), record(_Model, seed=0)[1]
    note_unused(tmp_path, recipe.shapes, replace(mesh, rank=1))
    assert capsys.readouterr().err == ""
    note_unused(tmp_path, recipe.shapes, mesh)
    assert capsys.readouterr().err == (
        f"note: 7 of the 12 tensors in {tmp_path} are none of the model's, and are not used: "
        "old.0, old.1, old.2, old.3, old.4 …\n"
    )
    note_unused(tmp_path, {*recipe.shapes, *more}, mesh)
    assert capsys.readouterr().err == ""
    stop(mesh)


def test_a_wrong_shape_and_an_empty_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = record(_Model, seed=0)[0]
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path, {}, Axis(0, 1, None), device=CPU)
    assert "holds no .safetensors file" in capsys.readouterr().err
    _save(tmp_path, _weights() | {"fused.bias": torch.zeros(7)})
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path, {}, Axis(0, 1, None), device=CPU)
    told = capsys.readouterr().err
    assert "fused.bias is (6,) here and (7,) in its source" in told
    assert '--allow-missing "fused.*"' in told


def test_what_is_no_file_of_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = record(_Model, seed=0)[0]
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path / "none", {}, Axis(0, 1, None), device=CPU)
    assert f"there is no {tmp_path / 'none'}" in capsys.readouterr().err
    torch.save(_weights(), tmp_path / "all.pt")
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path / "all.pt", {}, Axis(0, 1, None), device=CPU)
    assert "is not a whole .safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["embedding", "head"])
def test_a_stage_finds_a_tied_weight_under_the_name_that_another_has(
    tmp_path: Path, kept: str
) -> None:
    weights = _weights()
    save_file({"embedding.weight": weights["embedding.weight"]}, tmp_path / "all.safetensors")
    model, _ = record(_Model, seed=0)
    keep_only(model, [kept])
    load_safetensors(model, tmp_path, {}, Axis(0, 1, None), device=CPU)
    assert torch.equal(model.get_parameter(f"{kept}.weight"), weights["embedding.weight"])
