"""The layouts of a tensor on the tensor axis, and conversions between them.

    I      the same value on every rank; its gradient is whole on every rank
    R      the same value on every rank; its gradient is a partial sum on each rank
    S      split along a logical axis, and so is its gradient
    P      a partial sum of the value on each rank; its gradient is whole on every rank

If an op needs an input in another layout than the input was made in, the input is converted. Each
conversion also converts the gradient, in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from autopar.planner.cluster.cluster import Collective


class LayoutKind(StrEnum):
    """How a tensor is distributed over the ranks of the tensor axis."""

    WHOLE = "I"
    REPLICATED = "R"
    SPLIT = "S"
    PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout. If the tensor is split, `axis` is the logical axis, and `dim` the tensor's dim."""

    kind: LayoutKind
    axis: str = ""
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.axis}@{self.dim})" if self.kind is LayoutKind.SPLIT else self.kind.value


WHOLE = Layout(LayoutKind.WHOLE)
REPLICATED = Layout(LayoutKind.REPLICATED)
PARTIAL = Layout(LayoutKind.PARTIAL)


def split(axis: str, dim: int) -> Layout:
    """Return the layout of a tensor that is split along an axis, which lies in its dim `dim`."""
    return Layout(LayoutKind.SPLIT, axis, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLayout:
    """How an op is split: along a letter of its rule, whose axis is `axis`; "" if it is not split.

    `needs` are the layouts that its inputs are converted to, in the order of `op.inputs`; `gives`
    are those of its outputs. Before its conversion, an input has the layout in the `gives` of the
    op that made it.
    """

    letter: str
    axis: str
    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The layout of a parameter or buffer on the tensor axis (never P)."""

    name: str
    layout: Layout


class LocalAction(StrEnum):
    """What a rank does in a conversion without communication."""

    NOTHING = "nothing"
    SLICE = "slice"
    PAD = "pad"  # the rank's shard, and zeros for the rest of the tensor
    MASK = "mask"  # the value on the first rank, zeros on the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion between layouts: the runtime's function, and what it does in each direction."""

    function: str
    forward: Collective | LocalAction
    backward: Collective | LocalAction


_I, _R, _S, _P = LayoutKind.WHOLE, LayoutKind.REPLICATED, LayoutKind.SPLIT, LayoutKind.PARTIAL
_SUM, _GATHER = Collective.ALL_REDUCE, Collective.ALL_GATHER
_SCATTER, _EXCHANGE = Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL

CONVERSIONS: Mapping[tuple[LayoutKind, LayoutKind], Conversion] = MappingProxyType(
    {
        pair: Conversion(function=function, forward=forward, backward=backward)
        for *pair_, function, forward, backward in (
            (_I, _R, "sum_gradients", LocalAction.NOTHING, _SUM),
            (_I, _S, "take_shard", LocalAction.SLICE, _GATHER),
            (_I, _P, "first_only", LocalAction.MASK, LocalAction.NOTHING),
            (_R, _I, "first_gradient", LocalAction.NOTHING, LocalAction.MASK),
            (_R, _S, "take_own", LocalAction.SLICE, LocalAction.PAD),
            (_R, _P, "first_whole", LocalAction.MASK, LocalAction.MASK),
            (_S, _I, "gather_whole", _GATHER, LocalAction.SLICE),
            (_S, _R, "gather", _GATHER, _SCATTER),
            (_S, _P, "place_own", LocalAction.PAD, LocalAction.SLICE),
            (_S, _S, "exchange", _EXCHANGE, _EXCHANGE),
            (_P, _I, "sum_partials", _SUM, LocalAction.NOTHING),
            (_P, _R, "sum_both", _SUM, _SUM),
            (_P, _S, "scatter_sum", _SCATTER, _GATHER),
        )
        for pair in [(pair_[0], pair_[1])]
    }
)


def conversion(produced: Layout, needed: Layout) -> Conversion | None:
    """Return the conversion between two layouts, or None if they are equal."""
    if produced == needed:
        return None
    return CONVERSIONS[produced.kind, needed.kind]
