"""A folder gets what the model's save_pretrained writes, of weights that are asked for once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

from autopar.runtime.checkpointing.export import SavedModel, export, exporting
from autopar.runtime.checkpointing.model_files import destination
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.locations import MARK
from autopar.runtime.ranks.mesh import ALONE, Mesh
from autopar.runtime.weights.initial_weights import build, record
from autopar.runtime.weights.loading import WeightsOrigin
from tests.field.families import family_named

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


class Experts(nn.Module):
    """Experts in one tensor, which are saved one by one, in a file for each layer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(4, 6, 5) for _ in range(layers))
        self.scale = nn.Parameter(torch.randn(5))

    def save_pretrained(self, folder: Path) -> None:
        files: dict[str, dict[str, Tensor]] = {}
        for number, layer in enumerate(self.layers):
            saved = {f"{number}.{i}": one.clone() for i, one in enumerate(layer.detach())}
            files[f"model-{number + 1:05}-of-{len(self.layers):05}.safetensors"] = saved
        files[min(files)]["scale"] = self.scale.detach()
        for name, saved in files.items():
            save_file(saved, folder / name, metadata={"format": "pt"})
        places = {key: name for name, saved in files.items() for key in saved}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        (folder / "config.json").write_text(json.dumps({"layers": len(self.layers)}))


def exported(model_of: Any, folder: Path, mesh: Mesh) -> nn.Module:
    """Export the weights of a seed as a script does, and return the model that has them."""
    model, recipe = record(model_of, seed=0)
    to = exporting(destination(f"{folder}/", mesh), recipe, mesh)
    recipe.materialise(model, {}, ALONE, CPU)
    optimizer = build_optimizer([model], AdamW, zero=0, mesh=mesh)
    export([model], optimizer, WeightsOrigin(recipe, None), to, mesh)
    return model


def saved_by_itself(model_of: Any, folder: Path) -> Path:
    model: Any = build(model_of, seed=0)
    folder.mkdir()
    model.save_pretrained(folder)
    return folder


def tensors_in(folder: Path) -> Mapping[str, Tensor]:
    return {
        name: one
        for path in sorted(folder.glob("*.safetensors"))
        for name, one in load_file(path).items()
    }


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(one, expected[name]) for name, one in found.items()
    )


@pytest.mark.parametrize("kind", ["experts", "Mixtral", "DeepSeek-V3", "ViT"])
def test_a_folder_has_what_the_model_saves_by_itself(kind: str, tmp_path: Path, mesh: Mesh) -> None:
    model_of = Experts if kind == "experts" else family_named(kind).build_model
    exported(model_of, found := tmp_path / "found", mesh)
    expected = saved_by_itself(model_of, tmp_path / "expected")
    assert {one.name for one in found.iterdir()} == {one.name for one in expected.iterdir()}
    assert same(tensors_in(found), tensors_in(expected))
    config = (found / "config.json").read_text()
    assert config == (expected / "config.json").read_text()


def test_every_file_says_who_has_written_it_and_the_next_export_replaces_all(
    tmp_path: Path, mesh: Mesh
) -> None:
    exported(Experts, tmp_path, mesh)
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt", **MARK}
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == dict(MARK)
    exported(lambda: Experts(layers=1), tmp_path, mesh)
    assert {one.name for one in tmp_path.glob("*.safetensors")} == {
        "model-00001-of-00001.safetensors"
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {"layers": 1}


def test_what_a_person_has_left_beside_the_weights_stays(tmp_path: Path, mesh: Mesh) -> None:
    (tmp_path / "config.json").write_text("mine")
    exported(Experts, tmp_path, mesh)
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_weights_of_another_program_are_refused_before_anything_is_trained(
    name: str, tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(SystemExit):
        destination(f"{tmp_path}/", mesh)
    assert f"{name} is there, and autopar has not exported it" in capsys.readouterr().err


class OddlyNamed(Experts):
    """A model whose weights have a name that no library looks for."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "own").mkdir()
        save_file({"scale": self.scale.detach()}, folder / "own" / "weights.safetensors")


def test_files_of_any_name_are_not_replaced_either(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(OddlyNamed, tmp_path, mesh)
    exported(OddlyNamed, tmp_path, mesh)
    save_file({"x": torch.ones(2)}, path := tmp_path / "own" / "weights.safetensors")
    with pytest.raises(SystemExit):
        exported(OddlyNamed, tmp_path, mesh)
    assert f"{path} is there, and autopar has not exported it" in capsys.readouterr().err


class Unasked(nn.Linear):
    """A model whose method looks at its numbers."""

    def save_pretrained(self, folder: Path) -> None:
        save_file({"w": self.weight.detach()}, folder / f"{float(self.weight.sum())}")


def test_a_model_that_cannot_be_asked_is_exported_under_its_own_names_with_a_note(
    tmp_path: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported(lambda: Unasked(2, 3), tmp_path, mesh)
    assert same(tensors_in(tmp_path), model.state_dict())
    told = capsys.readouterr().err
    assert "a run on meta tensors does not show what save_pretrained of Unasked writes" in told
    assert "--export writes the weights under their names in the model" in told


def test_each_weight_is_asked_for_once_in_the_order_that_other_ranks_know() -> None:
    form = record(Experts, seed=0)[1].saved_form()
    assert form is not None
    own: Mapping[str, Tensor] = build(Experts, seed=0).state_dict()
    asked: list[str] = []

    def weight_of(name: str) -> Tensor:
        asked.append(name)
        return own[name]

    saved = SavedModel(form, weight_of)
    assert len(saved.files.weights) == 3
    for file in saved.files.weights:
        for entry in file.entries:
            assert saved.tensor_of(file, entry).shape == entry.shape
    assert tuple(asked) == saved.weights
    assert set(asked) == set(own)
