"""Tensors that hang on modules without having been registered are found wherever they lie."""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.model.plain_tensors import move_plain_tensors, replace_plain_tensors


class Table:
    """An object that holds a tensor."""

    def __init__(self) -> None:
        self.angles = torch.ones(1)

    def turned(self, x: Tensor) -> Tensor:
        return x * self.angles


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.plain = torch.ones(1)
        self.listed = [torch.ones(1), (torch.ones(1), "text")]
        self.named = {"a": deque([torch.ones(1)])}
        self.table = Table()
        self.method = Table().turned
        offset = torch.ones(1)
        self.closed = lambda x: x + offset
        self.hidden = (nn.Linear(2, 2, bias=False),)
        self.again = [self.plain, self.layer.weight]
        self.itself = [self]


def _places(model: nn.Module) -> list[str]:
    found = list[str]()

    def note(place: str, tensor: Tensor) -> Tensor:
        found.append(place)
        return tensor

    replace_plain_tensors(model, note)
    return sorted(found)


def test_each_plain_tensor_is_found_once_under_its_attribute() -> None:
    expected = ["closed", "hidden", "listed", "listed", "method", "named", "plain", "table"]
    assert _places(Holding()) == expected
    names = [place.partition(".")[2] for place in _places(nn.Sequential(nn.ReLU(), Holding()))]
    assert names == expected


def test_each_plain_tensor_is_replaced_wherever_it_is_held() -> None:
    model: Any = Holding()
    replace_plain_tensors(model, lambda _, tensor: tensor * 2)
    assert [model.plain.item(), model.listed[0].item(), model.listed[1][0].item()] == [2, 2, 2]
    assert [model.named["a"][0].item(), model.table.angles.item()] == [2, 2]
    assert [model.closed(1).item(), model.method(1).item()] == [3, 2]
    assert model.again[0] is model.plain
    assert model.again[1] is model.layer.weight


def test_plain_tensors_that_are_moved_stay_the_same_objects() -> None:
    model: Any = Holding()
    plain, weight = model.plain, model.hidden[0].weight
    move_plain_tensors(model, torch.device("meta"))
    assert plain is model.plain
    assert plain.is_meta
    assert isinstance(weight, nn.Parameter)
    assert weight.is_meta
    assert not model.layer.weight.is_meta


def test_tensors_in_a_partial_function_are_not_found() -> None:
    model: Any = nn.ReLU()
    model.shifted = partial(torch.add, torch.ones(1))
    assert _places(model) == []
