"""What emission knows of a module's class."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from torch import Tensor, autograd, nn

from autopar.codegen.forward.reading.modules import modules_of


class Checking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ValueError("four channels are needed")
        return x


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1)


class Told(nn.Module):
    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        return x.view(self.rows, -1)


class Telling(nn.Module):
    """Leaves a number where another module reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.other = Told(), Reading()
        self.told.rows = 1

    def forward(self, x: Tensor) -> Tensor:
        self.told.rows = x.shape[0]
        out: Tensor = self.other(self.told(x))
        return out


class Defaulted(nn.Module):
    """Has defaults whose plain text would not be the same value."""

    def forward(self, x: Tensor, quoted: str = "it's", top: float = float("inf")) -> Tensor:
        return x if quoted else x.clamp(max=top)


class Tying(nn.Module):
    """Its constructor calls one method that sets another module's attribute; a step runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self._tell()

    def _tell(self) -> None:
        self.told.rows = 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.told(x)
        return out


class Hooked(Tying):
    """A hook runs such a method in each step."""

    def __init__(self) -> None:
        super().__init__()
        self._listen()

    def _listen(self) -> None:
        self.register_forward_pre_hook(lambda *_: self._count())

    def _count(self) -> None:
        self.told.rows += 1


class Mode(IntEnum):
    CAUSAL = 1


class Kind(StrEnum):
    PLAIN = "plain"


TOP = np.sqrt(4.0)


class OddlyDefaulted(nn.Module):
    """Has defaults of subclasses of numbers and strings."""

    def forward(
        self, x: Tensor, mode: int = Mode.CAUSAL, kind: str = Kind.PLAIN, top: Any = TOP
    ) -> Tensor:
        return x.clamp(max=top) if kind == Kind.PLAIN else x * mode


def halved(x: Tensor) -> Tensor:
    return x / 2


def counted(x: Tensor) -> Tensor:
    return x / x.shape[0]


class Doubled(autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x


def test_a_forward_that_may_raise_over_sizes_is_known() -> None:
    found = modules_of(nn.Sequential(Checking(), Reading(), nn.MultiheadAttention(4, 2)))
    assert [found[path].checks_sizes for path in "012"] == [True, False, False]


def test_what_a_caller_leaves_on_a_module_that_reads_it_is_state() -> None:
    found = modules_of(Telling())
    assert [found[path].keeps_state for path in ("", "told", "other")] == [False, True, False]
    assert not modules_of(nn.Sequential(Told()))["0"].keeps_state  # which nobody tells anything


def test_methods_that_only_a_constructor_calls_leave_no_state() -> None:
    assert not modules_of(Tying())["told"].keeps_state
    assert modules_of(Hooked())["told"].keeps_state


def test_a_class_that_was_made_at_run_time_is_known() -> None:
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 3))
    found = modules_of(nn.Sequential(convolution, nn.Conv1d(2, 2, 3)))
    assert [found[path].is_importable for path in ("", "0", "1")] == [True, False, True]


def test_the_functions_of_a_forwards_file_are_known_and_which_of_them_read_sizes() -> None:
    found = modules_of(nn.Sequential(Reading(), nn.Linear(2, 2)))
    names = {one.name for one in found["0"].functions}
    assert {"Doubled", "halved", "counted"} <= names
    assert "modules_of" in names  # wherever it is defined
    reading = {one.name for one, reads in found["0"].functions.items() if reads}
    assert "counted" in reading
    assert "halved" not in reading
    assert found["1"].functions == {}


def test_printed_defaults_have_the_values_of_the_authors() -> None:
    _, quoted, top = modules_of(Defaulted())[""].arguments
    assert quoted.default is not None
    assert top.default is not None
    assert (eval(quoted.default), eval(top.default)) == ("it's", float("inf"))


def test_defaults_of_subclasses_are_printed_as_their_plain_values() -> None:
    _, *arguments = modules_of(OddlyDefaulted())[""].arguments
    assert [one.default for one in arguments] == ["1", '"plain"', "2.0"]


def test_classes_come_in_the_order_of_their_modules() -> None:
    """In a set they are ordered by address, so names of classes change from run to run."""
    made = [type("Block", (nn.Module,), {"__module__": f"a{n}.model"}) for n in range(20)]
    found = modules_of(nn.Sequential(*(kind() for kind in made)))
    names = [found[str(number)].home.name for number in range(20)]
    assert names == ["ModelBlock" + "_" * number for number in range(20)]
