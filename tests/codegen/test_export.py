"""The weights that scripts leave: those of the whole model, to the bit, whatever the plan was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import RankBlock, RankBlocks, assembled
from autopar.codegen.proof.script_rank import imported
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from autopar.runtime.checkpointing import model_files
from autopar.runtime.optimizer.pieces import local_tensor
from autopar.runtime.tensor.shards import chunks_by_name
from autopar.runtime.weights.initial_weights import build
from autopar.runtime.weights.plain_model import plain_model
from tests.cells import cells
from tests.codegen import matrix
from tests.codegen.kinds import plan_of
from tests.codegen.matrix_cells import SUBJECTS
from tests.codegen.plain_cells import KINDS as PLAIN_KINDS
from tests.field import trial
from tests.field.cells import KINDS as FIELD_KINDS
from tests.field.cells import MODELS, Subject
from tests.field.cells import SUBJECTS as FIELD_SUBJECTS
from tests.planner.subjects import zoo_file
from tests.redrawn import redrawn
from tests.runtime.processes import run_on_ranks

EXACT = ("--dtype", "float64", "--data", "synthetic")
STILL = ("--steps", "1", "--lr", "0")  # a step that changes nothing
STAND = (("gpt2 uneven", "dp×tp 4"), ("mnist", "zero-3 2"))
CELLS = list(product(SUBJECTS, ("ddp 2", "dp×tp 4", "pp 1f1b 2", "zero-3 2")))
FAMILIES = (
    "GPT-2", "Llama", "Gemma2", "Falcon (multi-query)", "Mixtral", "Mamba", "BERT", "T5",
    "Whisper", "ViT", "ResNet",
)  # fmt: skip
LORA = PLAIN_KINDS["LoRA"]
STAND_OF_FAMILIES = (("ViT", "zero-3 2"),)  # tests/examples/ exports a decoder from tensor ranks
OF_FAMILIES = list(product(FAMILIES, ("dp 2", "tp 2", "pp 2", "zero-3 2")))


def train_script(path: str, arguments: list[str], shard_bytes: int | None = None) -> RankBlocks:
    """Run a script here, and return what this rank holds after it."""
    if shard_bytes is not None:
        model_files.SHARD_BYTES = shard_bytes
    script: Any = imported(Path(path))
    parts, _ = script.main(arguments)
    return [block for part in parts for block in _held(part)]


def _held(part: nn.Module) -> Iterator[RankBlock]:
    chunks = chunks_by_name(part)
    for name, tensor in (
        *part.named_parameters(remove_duplicate=False),
        *part.named_buffers(remove_duplicate=False),
    ):
        yield RankBlock(name, chunks[name], local_tensor(tensor.detach()).double().clone())


def trained(
    plan: Plan, folder: Path, *arguments: str, shard_bytes: int | None = None
) -> dict[str, Tensor]:
    """Train by the script of a plan, and return what its ranks hold together."""
    script = write_script(plan, folder, force=True)
    own = [*EXACT, *arguments] if plan.model.has_dataset else [*EXACT[:2], *arguments]
    return assembled(
        run_on_ranks(train_script, plan.arrangement.ranks, str(script), own, shard_bytes)
    )


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [
        name for name, value in found.items() if not torch.equal(value.double(), expected[name])
    ]


@pytest.mark.parametrize(
    "kind", cells(("zero1", "zero3", "tp_zero1", "interleaved"), ("zero3", "tp_zero1"))
)
def test_an_export_has_what_the_ranks_hold_to_the_bit(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    held = trained(plan_of(kind), tmp_path, "--steps", "2", "--export", str(file))
    found = load_file(file)
    assert not differing(found, held)
    assert {value.dtype for value in found.values()} == {torch.float64}
    model = build(zoo_file("gpt2.py", "layers=4").build_model, seed=0)
    with safe_open(file, framework="pt") as stored:
        names = {*found, *stored.metadata()}
    assert names == {*model.state_dict(), "format", "written_by"}


@pytest.mark.parametrize(("name", "kind"), cells(CELLS, STAND))
def test_what_learns_nothing_is_exported_as_one_process_would_save_it(
    name: str, kind: str, tmp_path: Path
) -> None:
    plan, file = matrix.plan_of(name, kind), tmp_path / "model.safetensors"
    trained(plan, tmp_path, "--steps", "1", "--lr", "0", "--export", str(file))
    subject = SUBJECTS[name]
    model = build(zoo_file(subject.file, *subject.arguments).build_model, seed=0).double()
    found = load_file(file)
    parameters = dict(model.named_parameters())
    assert set(parameters) <= set(found) <= set(model.state_dict())
    assert not differing({n: found[n] for n in parameters}, parameters)
    for key, value in model.state_dict().items():
        assert key not in found or found[key].dtype is value.dtype


def test_weights_that_one_plan_has_exported_another_one_starts_from(tmp_path: Path) -> None:
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    trained(plan_of("tp_zero1"), tmp_path, "--steps", "1", "--export", str(first))
    still = (*STILL, "--weights", str(first))
    trained(plan_of("interleaved"), tmp_path, *still, "--export", str(again))
    assert again.read_bytes() == first.read_bytes()


def test_of_a_training_in_16_bits_the_exact_weights_are_exported(tmp_path: Path) -> None:
    file, half = tmp_path / "model.safetensors", ("--dtype", "bfloat16", "--lr", "0.01")
    held = trained(plan_of("zero1"), tmp_path, "--steps", "1", "--export", str(file), *half)
    found = load_file(file)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert not differing({name: value.bfloat16() for name, value in found.items()}, held)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())


BEGUN = list(product(("a file", "the constructor"), ("dp 2", "tp 2", "pp 2", "zero-3 2")))


@pytest.mark.parametrize(
    ("source", "kind"), cells(BEGUN, [("a file", "tp 2"), ("the constructor", "pp 2")])
)
def test_after_a_step_of_nothing_in_16_bits_the_export_is_what_it_began_with(
    source: str, kind: str, tmp_path: Path
) -> None:
    """Weights that are frozen, of which the training has 16 bits, among them."""
    given, found = tmp_path / "given.safetensors", tmp_path / "found.safetensors"
    plan = trial.plan_of(LORA, replace(FIELD_KINDS[kind], precision=Precision.BF16))
    build_model = load_model_file(str(LORA.path), ()).build_model
    model, still = plain_model(build_model, seed=0), ["--steps", "1", "--lr", "0"]
    if source == "a file":
        redrawn(model)
        save_model(model, str(given))
        still += ["--weights", str(given)]
    script = write_script(plan, tmp_path)
    words = [*still, "--data", "synthetic", "--export", str(found)]
    run_on_ranks(train_script, plan.arrangement.ranks, str(script), words)
    assert any(not one.requires_grad for one in model.parameters())
    exported = load_file(found)
    assert exported.keys() == saved_names(model)
    for name, value in model.state_dict().items():
        assert name not in exported or torch.equal(exported[name], value), name


def saved_names(model: nn.Module) -> set[str]:
    """Return the names of a state dict, of tied ones the first."""
    firsts: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        firsts.setdefault(id(value), name)
    return set(firsts.values())


@pytest.mark.parametrize(("family", "kind"), cells(OF_FAMILIES, STAND_OF_FAMILIES))
def test_a_family_goes_from_save_pretrained_through_a_plan_to_from_pretrained(
    family: str, kind: str, tmp_path: Path
) -> None:
    subject, first, folder = FIELD_SUBJECTS[family], tmp_path / "first", tmp_path / "out"
    plan = trial.plan_of(subject, FIELD_KINDS[kind])
    build_model = load_model_file(str(subject.path), subject.arguments).build_model
    model: Any = redrawn(build(build_model, seed=0).double())
    model.save_pretrained(first)
    words = ("--weights", str(first), "--export", str(folder))
    held = trained(plan, tmp_path, *STILL, *words)
    assert not differing(dict(model.named_parameters()), held)
    same_folders(folder, first)
    again, told = type(model).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(told.values()), told
    assert not differing(dict(model.named_parameters()), dict(again.named_parameters()))


def same_folders(found: Path, expected: Path) -> None:
    """Compare all files, of weights the tensors."""
    assert files_in(found) == files_in(expected)
    for name in files_in(found):
        if not name.endswith(".safetensors"):
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
            continue
        tensors, wanted = load_file(found / name), load_file(expected / name)
        assert tensors.keys() == wanted.keys()
        assert not differing(tensors, wanted)


def files_in(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


def test_a_folder_of_shards_says_where_each_tensor_lies(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("--steps", "1", "--export", str(folder))
    held = trained(plan_of("zero3"), tmp_path, *words, shard_bytes=40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name].double(), held[name])
    again = trained(plan_of("pp"), tmp_path, *STILL, "--weights", str(folder))
    assert not differing({name: held[name] for name in index["weight_map"]}, again)


# tests/examples/ exports adapters, tests/runtime/weights/test_saved_form.py reads them.
ADAPTERS = Subject(path=MODELS / "peft_adapters.py")


@pytest.mark.parametrize("kind", cells(("dp 2", "zero-3 2", "tp 2", "pp 2"), ()))
def test_of_a_model_with_adapters_these_alone_are_exported(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plan = trial.plan_of(ADAPTERS, replace(FIELD_KINDS[kind], microbatch=2))
    folder = tmp_path / "out"
    held = trained(plan, tmp_path, "--steps", "2", "--lr", "0.01", "--export", str(folder))
    assert files_in(folder) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    base = load_model_file(str(ADAPTERS.path) + ":build_base", ()).build_model().double()
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    learning = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert len(learning) == 2 * 2 + 1  # two adapters of two, and the head
    assert not differing(learning, held)
    assert all(one.any() for one in learning.values())
    again = trained(plan, tmp_path, *STILL, "--weights", str(folder))
    assert not differing(learning, again)
