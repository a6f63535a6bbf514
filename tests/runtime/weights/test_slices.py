"""A rank reads of a file what it holds, and keeps no copy of the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.shards import Split
from autopar.runtime.weights.initial_weights import record

ROWS, COLUMNS = 512, 256
CPU = torch.device("cpu")
Way = Callable[[Path], nn.Module]


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest storage that an op makes in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = any(one.alias_info is not None for one in func._schema.returns)
        if isinstance(out, Tensor) and out.device == CPU and not aliases:
            self.largest_bytes = max(self.largest_bytes, out.untyped_storage().nbytes())
        return out


def _layer() -> nn.Linear:
    return nn.Linear(COLUMNS, ROWS, bias=False)


def _by_state(read: Callable[[Path], Tensor]) -> Way:
    def build(folder: Path) -> nn.Module:
        model = _layer()
        model.load_state_dict({"weight": read(folder)})
        return model

    return build


def _held(folder: Path) -> nn.Module:
    model = _layer()
    model.weight = nn.Parameter(load_file(folder / "w.safetensors")["w"])
    return model


def _cast(folder: Path) -> nn.Module:
    stored = load_file(folder / "w.safetensors")["w"]
    model = _layer().to(torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(stored.double().half())
    return model


def _opened(folder: Path) -> Tensor:
    with safe_open(folder / "w.safetensors", framework="pt") as file:
        found: Tensor = file.get_slice("w")[:]
    return found


def _mapped(folder: Path) -> Tensor:
    array: Any = np.load(folder / "w.npy", mmap_mode="r")
    return torch.from_numpy(array)


WAYS: dict[str, Way] = {
    "load_file": _by_state(lambda folder: load_file(folder / "w.safetensors")["w"]),
    "safe_open": _by_state(_opened),
    "torch.load": _by_state(lambda folder: torch.load(folder / "w.pt")["w"]),
    "turned": _by_state(lambda folder: load_file(folder / "t.safetensors")["w"].t()),
    "an array": _by_state(_mapped),
    "held as it is": _held,
    "cast twice": _cast,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("weights")
    weight = torch.sin(torch.arange(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    save_file({"w": weight}, place / "w.safetensors")
    save_file({"w": weight.t().contiguous()}, place / "t.safetensors")
    torch.save({"w": weight}, place / "w.pt")
    np.save(place / "w.npy", weight.numpy())
    return place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("error:the model is built in full")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_rank_reads_no_more_than_its_rows(way: str, folder: Path) -> None:
    expected = WAYS[way](folder).get_parameter("weight")
    with _Made() as building:
        model, recipe = record(lambda: WAYS[way](folder), seed=0)
    whole = ROWS * COLUMNS * 4
    assert building.largest_bytes < whole / 8
    with _Made() as making:
        recipe.materialise(model, {"weight": Split(0, ((ROWS, 1),))}, Axis(2, 4, None), CPU)
    assert making.largest_bytes <= 2 * whole / 4  # through float64 for the one that is cast twice
    held = model.get_parameter("weight")
    assert torch.equal(held, expected[ROWS // 2 : ROWS * 3 // 4])
    assert held.untyped_storage().nbytes() == held.numel() * held.element_size()


def test_numbers_that_are_read_again_and_again_are_those_of_a_model_built_in_full() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        while float(model.weight.detach().sum()) < 10_000:
            model.weight.data += 1
        return model

    with pytest.warns(UserWarning, match="values are read too often"):
        _, recipe = record(build, seed=0)
    assert recipe.make("weight").tolist() == [[2500.0, 2500.0], [2500.0, 2500.0]]
