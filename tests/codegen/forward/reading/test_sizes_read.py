"""Which sizes of which arguments a forward reads, as its source proves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.reading import SizesRead, sizes_read
from autopar.codegen.forward.reading.modules import modules_of

UNKNOWN = SizesRead()
UNKNOWN_AT_1 = SizesRead(first=1, last=2)


def of_x(first: int | None = None, last: int | None = None) -> SizesRead:
    return SizesRead(argument="x", first=first, last=last)


def places_of(x: Tensor) -> int:
    return x.shape[1]


LOOP = "for _ in range(2):\n    x = x.mT / x.shape[1]"
NESTED = "def scaled(x):\n    return x / x.shape[1]\nreturn scaled(x.mT)"


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ("return x / 2", set()),
        ("return [x[:, t] for t in range(x.shape[1])]", {of_x(1, 2)}),
        ("return x.size(-2)", {of_x(-2, -1)}),
        ("return x.size()[-1]", {of_x(-1, None)}),
        ("_, places, width = x.shape\nreturn places", {of_x(1, 2)}),
        ("rows, *_ = x.size()\nreturn rows", {of_x()}),
        ("return x.new_zeros(x.shape[:-1])", {of_x(None, -1)}),
        ("return x.shape[1::2]", {of_x()}),
        ("return len(x)", {of_x(0, 1)}),
        ("return x.numel()", {of_x()}),
        ("return x.shape[x.ndim - 1]", {of_x()}),
        ("return x.size(dim=1)", {UNKNOWN}),
        ("return x.size", {UNKNOWN}),
        ("return x / self.weight.shape[1]", {UNKNOWN_AT_1}),
        ("y = x.flatten(1)\nreturn y / y.shape[1]", {UNKNOWN_AT_1}),
        ("x = x.mT / x.shape[1]\nreturn x", {of_x(1, 2)}),
        ("x = x.mT\nreturn x / x.shape[1]", {UNKNOWN_AT_1}),
        ("if self.training:\n    x = x.mT\nreturn x / x.shape[1]", {UNKNOWN_AT_1}),
        ("for x in x.unbind():\n    print(x.shape[1])", {UNKNOWN_AT_1}),
        ("with self.held(x) as x:\n    print(x.shape[1])", {UNKNOWN_AT_1}),
        ("import math as x\nreturn x.shape[1]", {UNKNOWN_AT_1}),
        ("return (x := x.mT).sum() / x.shape[1]", {UNKNOWN_AT_1}),
        ("x.data = x.mT\nreturn x / x.shape[1]", {UNKNOWN_AT_1}),
        ("return [x.shape[1] for x in x]", {UNKNOWN_AT_1}),
        ("return x / places_of(x)", {UNKNOWN}),
        ("return x / here.places_of(x)", {UNKNOWN}),
        (LOOP, {UNKNOWN_AT_1}),
        (NESTED, {UNKNOWN_AT_1}),
    ],
)
def test_sizes_are_an_arguments_only_where_no_other_tensor_can_have_its_name(
    body: str, read: set[SizesRead]
) -> None:
    source = f"def forward(self, x):\n{indent(body, '    ')}"
    names: dict[str, Any] = {"places_of": places_of, "here": sys.modules[__name__]}
    exec(source, names)
    assert set(sizes_read(names["forward"], nn.Module, source)) == read


def turned(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Any:
        return forward(self, x.mT)

    return wrapper


def turned_unnamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: nn.Module, x: Tensor) -> Any:
        return forward(self, x.mT)

    return wrapper


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class Decorated(nn.Module):
    @turned
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class DecoratedUnnamed(nn.Module):
    @turned_unnamed
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


class Inheriting(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(super().forward(x.mT))


def hooked() -> nn.Module:
    module = Steps()
    module.register_forward_pre_hook(lambda _, given: (given[0].mT,))
    return module


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (Steps, of_x(1, 2)),
        (Decorated, UNKNOWN),
        (DecoratedUnnamed, UNKNOWN),
        (Inheriting, UNKNOWN),
        (hooked, UNKNOWN),
    ],
)
def test_code_around_a_forward_may_give_it_other_tensors(
    made: Callable[[], nn.Module], read: SizesRead
) -> None:
    assert modules_of(made())[""].sizes_read == {read}
