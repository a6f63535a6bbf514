"""A part of a model keeps the names of the whole."""

import pytest
import torch
from torch import nn

from autopar.runtime.model.parts import (
    Crossing,
    StagePart,
    freeze,
    keep_only,
    names_of,
    submodules,
    use_classes,
)
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.shards import Split

TENSOR = Axis(1, 2, None)


class Doubled(nn.Linear):
    tensor: Axis


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_modules_take_the_classes_of_their_pattern() -> None:
    found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    use_classes(found, {"*": Doubled}, TENSOR)
    assert all(isinstance(one, Doubled) and one.tensor is TENSOR for one in found)


def test_a_class_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="Doubled is no kind of Sequential"):
        use_classes(model(), {"1": Doubled}, TENSOR)


def test_what_is_not_held_is_let_go_and_places_stay() -> None:
    part = model()
    keep_only(part, ("1.0", "1.1.weight"))
    assert names_of(part) == ("1.0.weight", "1.0.bias", "1.1.weight")
    assert len(part) == 2
    assert submodules(part, ("0", "1.0")) == [part[1][0]]  # type: ignore[index]


def test_what_is_frozen_is_named_by_itself_or_by_a_module_around_it() -> None:
    found = model()
    freeze(found, ("0.bias", "1.1"))
    learning = [name for name, one in found.named_parameters() if one.requires_grad]
    assert learning == ["0.weight", "1.0.weight", "1.0.bias"]


def test_a_stage_takes_its_class_and_bounds() -> None:
    part = StagePart(Doubled, ("weight",), bounds={"first": 3}).taken_from(nn.Linear(2, 2), TENSOR)
    assert isinstance(part, Doubled)
    assert part.__dict__["first"] == 3
    assert names_of(part) == ("weight",)


def test_a_split_tensor_crosses_as_the_shard_that_a_rank_has() -> None:
    split = Crossing((4, 7), Split(1, ((7, 1),)))
    assert split.described(TENSOR, torch.float64).shape == (4, 3)
    whole = Crossing((4, 7), dtype=torch.float16).described(TENSOR, torch.float64)
    assert (whole.shape, whole.dtype, whole.requires_grad) == ((4, 7), torch.float16, True)
    before_a_batch = Crossing((4, 1 - 5)).described(TENSOR, torch.float64)  # `h - 4`
    assert before_a_batch.shape == (4, 0)
    assert not Crossing((4,), has_gradient=False).described(TENSOR, torch.float64).requires_grad


def test_a_module_in_two_places_is_held_where_one_of_them_is() -> None:
    shared = nn.Linear(2, 2)
    found = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), nn.Linear(2, 2))
    keep_only(found, ["1.0"])
    assert list(found.state_dict()) == ["0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"]
