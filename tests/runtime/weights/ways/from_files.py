"""Models that are filled from files of weights."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from tests.runtime.weights.ways.by_hand import counted
from tests.runtime.weights.ways.small import MAPPED, Net


def _stack() -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(MAPPED, MAPPED, bias=False) for name in ("a", "b", "c")})


def _loaded(folder: Path) -> nn.Module:
    model = Net()
    model.load_state_dict(load_file(folder / "net.safetensors"))
    return model


def _loaded_by_library(folder: Path) -> nn.Module:
    model = Net()
    load_model(model, str(folder / "net.safetensors"))
    return model


def _assigned(folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(load_file(folder / "net.safetensors"), assign=True)
    model.angles = torch.ones(4) / 7
    return model


def _torch_load(name: str) -> Any:
    def build(folder: Path) -> nn.Module:
        model = Net()
        model.load_state_dict(torch.load(folder / name, map_location="cpu"))
        return model

    return build


def _from_bytes(folder: Path) -> nn.Module:
    model = Net()
    model.load_state_dict(torch.load(io.BytesIO((folder / "net.pt").read_bytes())))
    return model


def _with_module(folder: Path) -> nn.Module:
    trunk: nn.Module = torch.load(folder / "module.pt", weights_only=False)
    return nn.Sequential(trunk, counted(nn.Linear(3, 2)))


def _opened(folder: Path) -> nn.Module:
    model = _stack()
    with safe_open(folder / "large.safetensors", framework="pt") as file, torch.no_grad():
        model.get_parameter("a.weight").copy_(file.get_tensor("a"))
        model.get_parameter("b.weight").copy_(file.get_slice("b")[:, :].to(torch.bfloat16))
        half = MAPPED // 2
        model.get_parameter("c.weight")[:half].copy_(file.get_slice("c")[half:])
        model.get_parameter("c.weight")[half:].copy_(file.get_slice("a")[:half, :].t()[:half, :1])
    return model


def _renamed(folder: Path) -> nn.Module:
    """Rename, transpose, scale, cut and join, as converters of checkpoints do."""
    stored, model = load_file(folder / "large.safetensors"), _stack()
    merged = torch.cat((stored["a"][: MAPPED // 2], stored["b"][: MAPPED // 2]))
    numbers = {"a": merged, "b": stored["b"].t() * 2, "c": stored["c"].flip(0).double()}
    model.load_state_dict({f"{name}.weight": one for name, one in numbers.items()})
    return model


def _changed_after_copying(folder: Path) -> nn.Module:
    """Write to what was read from a file, before and after it is copied."""
    stored, model = load_file(folder / "large.safetensors"), _stack()
    stored["a"].mul_(3)
    with torch.no_grad():
        for name in ("a", "b"):
            model.get_parameter(f"{name}.weight").copy_(stored[name])
            stored[name].zero_()
        model.get_parameter("c.weight").copy_(stored["b"] + stored["c"])
    return model


def _held_as_it_is(folder: Path) -> nn.Module:
    stored, model = load_file(folder / "large.safetensors"), _stack()
    for name in ("a", "b", "c"):
        model.get_submodule(name).weight = nn.Parameter(stored[name], requires_grad=name != "b")
    return model.to(torch.bfloat16)


def _in_threads(folder: Path) -> nn.Module:
    stored, model = load_file(folder / "large.safetensors"), _stack()

    def fill(name: str) -> None:
        with torch.no_grad():
            model.get_parameter(f"{name}.weight").copy_(stored[name]).mul_(2)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, ("a", "b")))
    thread = Thread(target=fill, args=("c",))
    thread.start()
    thread.join()
    return model


def _made_in_threads(folder: Path) -> nn.Module:
    """Read and make tensors in threads, and use them here, as transformers does."""
    del folder

    def make(place: int) -> Tensor:
        return torch.full((4,), float(place)) + torch.arange(4)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(3)))
    return nn.ParameterList(nn.Parameter(one * 2) for one in made)


def _pickled(folder: Path) -> nn.Module:
    del folder
    model: nn.Module = pickle.loads(pickle.dumps(counted(Net())))
    return model


def _saved_and_loaded(folder: Path) -> nn.Module:
    del folder
    kept, model = io.BytesIO(), Net()
    torch.save(counted(Net()).state_dict(), kept)
    kept.seek(0)
    model.load_state_dict(torch.load(kept))
    return model


CERTAIN = {
    "load_file": _loaded,
    "load_model": _loaded_by_library,
    "load_file, assigned": _assigned,
    "torch.load": _torch_load("net.pt"),
    "torch.load of an old file": _torch_load("old.pt"),
    "torch.load of bytes": _from_bytes,
    "torch.load of a module": _with_module,
    "safe_open, by slices": _opened,
    "names and shapes converted": _renamed,
    "a file's tensor is written to": _changed_after_copying,
    "a file's tensors held as they are": _held_as_it_is,
    "filled in threads": _in_threads,
    "made in threads": _made_in_threads,
    "pickled": _pickled,
    "saved and loaded": _saved_and_loaded,
}
# Numbers that go through the bytes of a pickle are those of a model that was built in full.
IN_FULL = ("pickled", "saved and loaded")
