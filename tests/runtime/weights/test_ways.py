"""Whatever way a constructor fills a model, each rank begins with what plain PyTorch makes."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.model.parts import keep_only, shard_parameters
from autopar.runtime.ranks.mesh import ALONE, Axis, start
from autopar.runtime.tensor.shards import Split
from autopar.runtime.weights.initial_weights import build, record
from autopar.runtime.weights.plain_model import plain_model
from tests.cells import cells
from tests.runtime.processes import run_on_ranks
from tests.runtime.weights.reached import differences, is_same
from tests.runtime.weights.ways import CERTAIN, DRAWN, EVERY
from tests.runtime.weights.ways.from_files import IN_FULL
from tests.runtime.weights.ways.small import write_files

CPU = torch.device("cpu")


class Holder(nn.Module):
    """Has a forward, which lists of modules have not."""

    def __init__(self, way: Callable[[Path], nn.Module], folder: Path) -> None:
        super().__init__()
        self.model = way(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    write_files(place)
    return place


@pytest.fixture(autouse=True)
def _quiet_libraries() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mean is more than|enable_nested_tensor")
        yield


def _expected(name: str, folder: Path) -> nn.Module:
    """Return what plain PyTorch makes; what draws without a seed has numbers for its draws."""
    _forget()
    if name in CERTAIN:
        return Holder(CERTAIN[name], folder)
    return plain_model(partial(Holder, DRAWN[name], folder), seed=3)


def _factory(name: str, folder: Path) -> Callable[[], nn.Module]:
    _forget()
    return partial(Holder, EVERY[name], folder)


def _forget() -> None:
    """Let go of what a way caches."""
    hanging = sys.modules["tests.runtime.weights.ways.hanging"]
    hanging._angles.cache_clear()


def _recorded(name: str) -> AbstractContextManager[Any]:
    if name in IN_FULL:
        return pytest.warns(UserWarning, match="built in full")
    warnings.filterwarnings("error", "the model is built in full")
    return nullcontext()


@pytest.mark.parametrize("name", EVERY)
def test_one_process_begins_with_what_plain_pytorch_makes(name: str, folder: Path) -> None:
    expected = _expected(name, folder)
    with _recorded(name):
        model = build(_factory(name, folder), seed=3)
    assert differences(model, expected) == []


def _halves(model: nn.Module) -> dict[str, Split]:
    """Cut every parameter of an even number of rows."""
    found = dict(model.named_parameters(remove_duplicate=False)).items()
    cut = {name: one for name, one in found if one.dim() and one.shape[0] % 2 == 0}
    return {name: Split(0, ((one.shape[0], 1),)) for name, one in cut.items()}


@pytest.mark.parametrize("name", cells(EVERY, list(EVERY)[1::3]))
def test_two_tensor_ranks_have_the_halves_of_it(name: str, folder: Path) -> None:
    expected, parts = _expected(name, folder), []
    for rank in range(2):
        with _recorded(name):
            model, recipe = record(_factory(name, folder), seed=3)
        splits = _halves(model)
        shard_parameters(model, splits, Axis(rank, 2, None))
        recipe.materialise(model, splits, Axis(rank, 2, None), CPU)
        parts.append(_state(model))
    for key, whole in _state(expected).items():
        halves = [part[key] for part in parts]
        made = torch.cat(halves) if key in splits else halves[1]
        assert is_same(made.detach(), whole.detach()), key
        assert {type(one) for one in halves} == {type(whole)}, key


def _state(model: nn.Module) -> Mapping[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("name", cells(EVERY, list(EVERY)[::3]))
def test_a_stage_has_its_part_of_it(name: str, folder: Path) -> None:
    expected = _state(_expected(name, folder))
    with _recorded(name):
        record(_factory(name, folder), seed=3)  # of another stage
        model, recipe = record(partial(Holder, EVERY[name], folder), seed=3)
    kept = list(_state(model))[::2]
    keep_only(model, kept)
    recipe.materialise(model, {}, ALONE, CPU)
    held = _state(model)
    assert set(kept) <= held.keys()
    for key, tensor in held.items():
        assert is_same(tensor.detach(), expected[key].detach()), key


def _fully_sharded(folder: Path) -> None:
    mesh = start(pipeline=1, data=2, tensor=1)
    warnings.simplefilter("ignore")
    for name in EVERY:
        expected = _expected(name, folder)
        model, recipe = record(_factory(name, folder), seed=3)
        wrap(model, mesh, zero=3)
        recipe.materialise(model, {}, mesh.tensor, CPU)
        whole, held = _state(expected), _state(model)
        assert held.keys() == whole.keys(), name
        for key, tensor in held.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert is_same(full.detach(), whole[key].detach()), (name, key)
            assert tensor.requires_grad == whole[key].requires_grad, (name, key)
            assert _marks(whole[key]) <= _marks(tensor), (name, key)


def _marks(tensor: Tensor) -> set[tuple[str, str]]:
    """Return the classes and the attributes of a tensor."""
    classes = {("class", kind.__name__) for kind in type(tensor).__mro__}
    classes -= {("class", "Parameter")}  # a DTensor says so in another way
    own = {name: one for name, one in vars(tensor).items() if name != "_is_hf_initialized"}
    return classes | {(name, repr(one)) for name, one in own.items()}


def test_two_ranks_that_share_all_weights_have_their_rows_of_it(folder: Path) -> None:
    run_on_ranks(_fully_sharded, 2, folder, timeout_seconds=240)
