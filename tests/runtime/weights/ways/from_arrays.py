"""Models that are filled from arrays and lists of numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.runtime.weights.ways.by_hand import counted
from tests.runtime.weights.ways.small import MAPPED, Net

TABLE = torch.linspace(0, 1, 8)  # of this file, whoever reads it


class _Tables(nn.Module):
    def __init__(self, **tables: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        for name, table in tables.items():
            self.register_buffer(name, table)


def _from_numpy(_: Path) -> nn.Module:
    angles = torch.from_numpy(np.sqrt(np.arange(6.0)))
    halved = torch.arange(4.0).numpy() / 2
    summed = np.asarray(torch.ones(3)).cumsum()
    return _Tables(angles=angles, halved=torch.as_tensor(halved), summed=torch.tensor(summed))


def _buffer_used_again(_: Path) -> nn.Module:
    """Read rows through one array, as loops over files do."""
    model, row = counted(Net()), np.zeros(6, dtype=np.float32)
    with torch.no_grad():
        for place in range(8):
            row[:] = place
            model.get_parameter("first.weight")[place].copy_(torch.from_numpy(row))
            row += 100
    return model


def _array_changed_later(_: Path) -> nn.Module:
    numbers = np.zeros(4)
    model = _Tables(numbers=torch.from_numpy(numbers))
    numbers[:] = 5
    return model


def _array_of_a_parameter(_: Path) -> nn.Module:
    model = counted(Net())
    bias = model.get_parameter("first.bias")
    bias.data = torch.from_numpy(bias.detach().numpy() * 2)
    shown = model.get_parameter("second.bias").detach().numpy()
    model.total = float(shown.sum())  # type: ignore[assignment]
    return model


def _table_of_the_file(_: Path) -> nn.Module:
    model = _Tables(table=TABLE, halves=TABLE / 2, one=TABLE[1:3])
    model.register_parameter("own", nn.Parameter(TABLE.clone()))
    return model


def _written_to_real(_: Path) -> nn.Module:
    """Put what the constructor made into tensors that it has not made."""
    total = torch.tensor([0.0, 0.0])
    total += torch.ones(2) * 3
    grid = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grid[torch.arange(1)] = torch.full((2,), 9.0)
    torch.add(torch.ones(2), torch.ones(2), out=total[:])
    return _Tables(total=total, grid=grid, squared=grid @ torch.eye(2))


def _read_from_the_disk(folder: Path) -> nn.Module:
    model = nn.Linear(MAPPED, MAPPED)
    array: Any = np.load(folder / "large.npy", mmap_mode="r")
    flat = np.fromfile(folder / "large.bin", dtype=np.float32)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(array.copy()))
        model.bias.copy_(torch.from_numpy(flat[:MAPPED]))
    return model


def _mapped_from_the_disk(folder: Path) -> nn.Module:
    model = nn.Linear(MAPPED, MAPPED)
    array: Any = np.memmap(folder / "large.bin", np.float32, "c", shape=(MAPPED, MAPPED))
    weight = torch.from_numpy(array)
    size = MAPPED * MAPPED
    flat = torch.from_file(str(folder / "large.bin"), size=size, dtype=torch.float32)
    model.weight = nn.Parameter(weight.to(torch.float64).float() * 2)
    model.bias = nn.Parameter(flat[-MAPPED:].clone())
    weight.mul_(0)
    return model


def _mapped_array_changed_later(folder: Path) -> nn.Module:
    model = nn.Linear(MAPPED, MAPPED)
    array: Any = np.memmap(folder / "large.bin", np.float32, "c", shape=(MAPPED, MAPPED))
    values = torch.from_numpy(array)
    with torch.no_grad():
        model.weight.copy_(values)
        array *= 2
        model.bias.copy_(values[0])
    array *= 2
    return model


CERTAIN = {
    "from_numpy": _from_numpy,
    "one array for all rows": _buffer_used_again,
    "an array that changes later": _array_changed_later,
    "an array of a parameter": _array_of_a_parameter,
    "a table of the file": _table_of_the_file,
    "written into what was there": _written_to_real,
    "an array from the disk": _read_from_the_disk,
    "an array mapped from the disk": _mapped_from_the_disk,
    "a mapped array that changes later": _mapped_array_changed_later,
}
