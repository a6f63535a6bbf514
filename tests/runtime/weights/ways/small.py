"""The model that most ways fill, and the files from which they do."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ROWS = 4
MAPPED = 160  # columns of a weight that is large enough to be mapped from a file


class Net(nn.Module):
    """Two layers, a norm and tables of which one is no part of the state."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.second = nn.Linear(8, ROWS)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("angles", 1 / 10 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return numbers for every entry of a model's state, the same in every process."""
    made = {}
    for place, (name, tensor) in enumerate(model.state_dict().items()):
        counted = torch.arange(tensor.numel(), dtype=torch.float64) + place
        made[name] = torch.sin(counted).reshape(tensor.shape).to(tensor.dtype)
    return made


def large(place: int = 0) -> Tensor:
    """Return numbers of a weight of 100 KB."""
    return torch.cos(torch.arange(MAPPED * MAPPED) + place).reshape(MAPPED, MAPPED)


def write_files(folder: Path) -> None:
    """Write the files that ways read."""
    numbers = state(Net())
    save_file(numbers, folder / "net.safetensors")
    torch.save(numbers, folder / "net.pt")
    torch.save(numbers, folder / "old.pt", _use_new_zipfile_serialization=False)
    weights = {name: large(place) for place, name in enumerate(("a", "b", "c"))}
    save_file(weights, folder / "large.safetensors")
    torch.save(weights, folder / "large.pt")
    np.save(folder / "large.npy", weights["a"].numpy())
    weights["a"].numpy().tofile(folder / "large.bin")
    torch.save(nn.Linear(3, 3).requires_grad_(False), folder / "module.pt")
