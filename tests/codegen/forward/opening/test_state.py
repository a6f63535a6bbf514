"""Calls that read what others have left behind are printed where nobody leaves it any longer."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.opening.opener import open_calls
from autopar.codegen.forward.reading.forward_source import LOSS, call_tree
from autopar.codegen.forward.reading.modules import modules_of
from autopar.codegen.forward.reading.split import split_graph
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of


class Noting(nn.Module):
    """Leaves the mean of its rows, and finds it in its next call."""

    def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            self._note(x)
            return x
        return x * self.kept

    def _note(self, x: Tensor) -> None:
        self.kept: Tensor | int = x.mean(1, keepdim=True)


class Counting(Noting):
    """Leaves a number."""

    def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            self.kept = x.shape[1]
            return x
        return x * self.kept


class Posting(nn.Module):
    """Leaves it on a board that other modules see."""

    board: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        if is_first:
            self.board["kept"] = x.mean(1, keepdim=True)
            return x
        return x * self.board["kept"]


class Side(nn.Module):
    """Calls what another one calls, too."""

    def __init__(self, noting: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.linear, self.noting, self.is_first = nn.Linear(4, 4), noting, is_first

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.noting(self.linear(x), is_first=self.is_first))


class Sides(nn.Module):
    """Leaves something in its first half, and finds it in its second."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        noting = kind()
        self.left = Side(noting, is_first=True)
        self.right = Side(kind() if kind is Posting else noting, is_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.right(self.left(x)))


class Around(nn.Module):
    """Has such sides in one module."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.sides = nn.Embedding(8, 4), Sides(kind)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.sides(self.embed(ids)).square().mean()
        return out


def opening(*opened: str, kind: type[nn.Module]) -> Opening:
    """Return what is opened of a model beside some calls."""
    split = split_graph(trace(file_of(lambda: Around(kind))), modules_of(Around(kind)))
    return open_calls(split, call_tree(split.graph), opened=opened)


KINDS = pytest.mark.parametrize(
    ("kind", "reader"),
    [
        (Noting, "sides.left.noting@1"),
        (Counting, "sides.left.noting@1"),
        (Posting, "sides.right.noting"),
    ],
)


@KINDS
def test_code_between_two_calls_that_share_state_is_printed_too(
    kind: type[nn.Module], reader: str
) -> None:
    assert {"sides.right", reader} <= opening("sides", kind=kind).printed


@KINDS
@pytest.mark.parametrize("opened", [(), ("",)], ids=["nothing printed", "root printed"])
def test_state_that_one_module_leaves_and_reads_itself_prints_no_other(
    opened: tuple[str, ...], kind: type[nn.Module], reader: str
) -> None:
    printed = opening(*opened, kind=kind).printed
    assert reader not in printed
    assert printed - {LOSS} == {*opened}  # a loss is printed that reads what is left


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [
        (Noting, "sides.left.noting", "sides.left.noting@1"),
        (Posting, "sides.left.noting", "sides.right.noting"),
    ],
)
def test_printed_code_leaves_nothing_so_that_its_reader_is_printed(
    kind: type[nn.Module], writer: str, reader: str
) -> None:
    assert reader in opening(writer, kind=kind).printed
