"""A tensor that is given other contents stays the object that it was."""

from typing import Any

import torch
from torch import nn

from autopar.runtime.tensor.shards import made_like, put_into


class Own(nn.Parameter):
    """A parameter of a class of the user's."""


def _parameter(size: int = 3) -> Any:
    made: Any = Own(torch.empty(size, device="meta"))
    made.note = "kept"
    return made


def test_a_tensor_with_new_contents_keeps_its_class_attributes_and_holders() -> None:
    parameter = _parameter()
    held = [parameter]
    put_into(parameter, torch.arange(4.0))
    assert held[0].tolist() == [0, 1, 2, 3]
    assert (type(parameter), parameter.note, parameter.is_leaf) == (Own, "kept", True)


def test_a_frozen_parameter_stays_frozen_and_numbers_of_another_type_are_taken() -> None:
    parameter = _parameter().requires_grad_(False)
    put_into(parameter, torch.arange(2))
    assert (parameter.dtype, parameter.requires_grad) == (torch.int64, False)


def test_hooks_of_a_tensor_run_on_the_gradients_of_its_new_contents() -> None:
    parameter, seen = _parameter(), list[float]()
    handle = parameter.register_hook(lambda gradient: gradient * 2)
    parameter.register_post_accumulate_grad_hook(lambda one: seen.append(float(one.grad.sum())))
    put_into(parameter, torch.ones(3))
    parameter.sum().backward()
    handle.remove()
    parameter.sum().backward()
    assert seen == [6, 9]


def test_a_new_parameter_takes_the_class_and_the_attributes_of_another() -> None:
    fresh: Any = made_like(nn.Parameter(torch.ones(2)), _parameter())
    assert (type(fresh), fresh.note, fresh.tolist()) == (Own, "kept", [1, 1])
