"""What a model's save_pretrained would write is known, and read back, without its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from autopar.runtime.ranks.mesh import ALONE, Axis, start, stop
from autopar.runtime.tensor.shards import Split, local_part
from autopar.runtime.weights import stored_tensors
from autopar.runtime.weights.initial_weights import build, record
from autopar.runtime.weights.loading import load_safetensors, note_unused
from autopar.runtime.weights.saved_form import UnsavableError
from tests.cells import cells
from tests.counted_reads import Counting
from tests.field.families import family_named
from tests.redrawn import redrawn

CPU = torch.device("cpu")
FAMILIES = ("GPT-2", "Mixtral", "ViT", "T5", "BERT", "Whisper", "Qwen3")


class Rearranging(nn.Module):
    """A model that saves its weights in each way that there is to lay numbers out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 5))  # two halves of each expert
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.turned = nn.Parameter(torch.randn(4, 7))
        self.pairs = nn.Parameter(torch.randn(6, 3))  # rows of two halves, saved in turns
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.padded = nn.Parameter(torch.randn(5, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def save_pretrained(self, folder: Path) -> None:
        own = self.state_dict()
        halves = own.pop("experts").chunk(2, dim=1)
        saved: dict[str, Tensor] = {
            f"expert.{number}.{half}": one
            for half, stack in zip(("gate", "up"), halves, strict=True)
            for number, one in enumerate(stack.contiguous())
        }
        for kind in ("weight", "bias"):
            saved[f"qk.{kind}"] = torch.cat([own.pop(f"query.{kind}"), own.pop(f"key.{kind}")])
        saved["turned"] = own.pop("turned").t().contiguous()
        saved["in_turns"] = own.pop("pairs").view(2, 3, 3).transpose(0, 1).reshape(6, 3)
        saved["both"] = torch.stack([own.pop("first.weight"), own.pop("second.weight")], dim=1)
        saved["padded too"] = own["padded"].clone()  # a second time
        saved["padded"] = torch.cat([own["padded"], own.pop("padded").new_zeros(3, 2)])
        saved |= {f"model.{name}": one for name, one in own.items()}
        save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"experts": 3}))


class Adapted(nn.Module):
    """A model that saves what it learns alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def save_pretrained(self, folder: Path) -> None:
        saved = {f"lora.{name}": one for name, one in self.adapter.state_dict().items()}
        (folder / "adapters").mkdir()
        save_file(saved, folder / "adapters" / "weights.safetensors")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "rearranging": Rearranging,
    **{name: family_named(name).build_model for name in FAMILIES},
}


def saved(build_model: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Save other weights than those of the seed, and return the model that has them."""
    model: Any = redrawn(build(build_model, seed=0))
    model.save_pretrained(folder)
    own: nn.Module = model
    return own


@pytest.mark.parametrize("kind", cells(KINDS, list(KINDS)[::2]))
def test_tensors_of_files_are_made_as_the_model_itself_saves_them(
    kind: str, tmp_path: Path
) -> None:
    model = saved(KINDS[kind], tmp_path)
    form = record(KINDS[kind], seed=0)[1].saved_form()
    assert form is not None
    (file,) = form.files
    own, written = model.state_dict(), load_file(tmp_path / file.name)
    assert {one.name for one in file.tensors} == written.keys()
    for one in file.tensors:
        (made,) = form.made([one], {name: own[name] for name in one.sources})
        assert torch.equal(made, written[one.name]), one.name
    others = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != file.name}
    assert form.others == others
    for name, one in own.items():
        assert torch.equal(one, dict(model.state_dict())[name])


@pytest.mark.parametrize("kind", cells(KINDS, list(KINDS)[::2]))
def test_what_a_model_has_saved_it_starts_from(kind: str, tmp_path: Path) -> None:
    expected = saved(KINDS[kind], tmp_path)
    model, recipe = record(KINDS[kind], seed=0)
    left = load_safetensors(model, tmp_path, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    assert left == []
    recipe.materialise(model, {}, ALONE, CPU)
    for name, one in model.named_parameters():
        assert torch.equal(one, expected.get_parameter(name)), name


SPLITS: Mapping[str, Split] = {
    "experts": Split(1, ((4, 1), (4, 1))),
    "query.weight": Split(0, ((4, 1),)),
    "turned": Split(1, ((7, 1),)),
    "pairs": Split(0, ((6, 1),)),
    "second.weight": Split(1, ((3, 1),)),
    "padded": Split(0, ((5, 1),)),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices_of_what_lies_otherwise_in_files(rank: int, tmp_path: Path) -> None:
    expected, axis = saved(Rearranging, tmp_path), Axis(rank, 2, None)
    model, recipe = record(Rearranging, seed=0)
    load_safetensors(model, tmp_path, SPLITS, axis, device=CPU, saved_form=recipe.saved_form)
    for name, split in SPLITS.items():
        part = local_part(expected.get_parameter(name).detach(), split, axis)
        assert torch.equal(model.get_parameter(name), part), name


def test_of_experts_a_rank_reads_its_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(KINDS["Mixtral"], tmp_path)
    counting = Counting()
    monkeypatch.setattr(stored_tensors, "safe_open", counting)
    model, recipe = record(KINDS["Mixtral"], seed=0)
    stacks = {name: one for name, one in model.named_parameters() if one.ndim == 3}
    assert stacks
    splits = {name: Split(0, ((one.shape[0], 1),)) for name, one in stacks.items()}
    load_safetensors(
        model, tmp_path, splits, Axis(1, 2, None), device=CPU, saved_form=recipe.saved_form
    )
    held = sum(one.nbytes for one in model.parameters())
    assert counting.bytes == held
    assert held < sum(one.nbytes for one in record(KINDS["Mixtral"], seed=0)[0].parameters())


def test_a_file_that_is_named_itself_has_the_names_of_the_model(tmp_path: Path) -> None:
    expected = redrawn(build(Rearranging, seed=0))
    save_file(expected.state_dict(), path := tmp_path / "model.safetensors")
    model, recipe = record(Rearranging, seed=0)
    load_safetensors(model, path, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    for name, one in model.named_parameters():
        assert torch.equal(one, expected.get_parameter(name)), name


def test_adapters_are_read_without_their_base(tmp_path: Path) -> None:
    expected = saved(Adapted, tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    model, recipe = record(Adapted, seed=0)
    left = load_safetensors(model, file, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    assert left == ["base.weight", "base.bias"]
    for name in ("weight", "bias"):
        assert torch.equal(
            model.get_parameter(f"adapter.{name}"), expected.get_parameter(f"adapter.{name}")
        )


def test_adapters_of_which_one_is_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"lora.weight": torch.ones(4, 4)}, tmp_path / "weights.safetensors")
    model, recipe = record(Adapted, seed=0)
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    assert "lacks 1 parameters: adapter.bias" in capsys.readouterr().err


def test_a_tensor_of_another_shape_than_the_form_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Rearranging, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"expert.1.up": torch.zeros(4, 6)}, path)
    model, recipe = record(Rearranging, seed=0)
    with pytest.raises(SystemExit):
        load_safetensors(model, tmp_path, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    assert "expert.1.up is (4, 5) here and (4, 6) in its source" in capsys.readouterr().err


def test_files_may_lack_or_have_the_prefix_of_a_base_model(tmp_path: Path) -> None:
    expected = saved(KINDS["GPT-2"], tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({name.removeprefix("transformer."): one for name, one in weights.items()}, path)
    model, recipe = record(KINDS["GPT-2"], seed=0)
    load_safetensors(model, tmp_path, {}, ALONE, device=CPU, saved_form=recipe.saved_form)
    for name, one in model.named_parameters():
        assert torch.equal(one, expected.get_parameter(name)), name


class Unwilling(nn.Linear):
    """A model whose method needs numbers, or writes by other means."""

    def __init__(self, way: str) -> None:
        super().__init__(2, 2)
        self.way, self.table = way, torch.ones(2)  # which is no buffer

    def save_pretrained(self, folder: Path) -> None:
        if self.way == "torch.save":
            torch.save(self.state_dict(), folder / "model.bin")
        elif self.way == "nothing":
            (folder / "config.json").write_text("{}")
        elif self.way == "numbers":
            save_file({"w": self.weight.detach()}, folder / f"{float(self.weight.sum())}")
        else:
            save_file({"w": self.table * 2}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("torch.save", "torch.save"),
        ("nothing", "hands no tensors to safetensors"),
        ("numbers", "Error"),
        ("others", "no parameter and no buffer"),
    ],
)
def test_a_method_that_cannot_be_asked_is_told_and_leaves_no_trace(way: str, told: str) -> None:
    functions = torch.save, safetensors.torch.save_file
    recipe = record(lambda: Unwilling(way), seed=0)[1]
    with pytest.raises(UnsavableError, match=told):
        recipe.saved_form()
    assert functions == (torch.save, safetensors.torch.save_file)
    assert sys.modules[__name__].save_file is functions[1]


def test_names_that_only_the_saved_form_has_are_not_told_as_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(Rearranging, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"other": torch.ones(1)}, path)
    mesh, recipe = start(pipeline=1, data=1, tensor=1), record(Rearranging, seed=0)[1]
    note_unused(tmp_path, recipe.shapes, mesh, recipe.saved_form)
    stop(mesh)
    assert "are none of the model's, and are not used: other\n" in capsys.readouterr().err
