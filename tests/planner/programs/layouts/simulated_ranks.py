"""The conversions between layouts as functions of the lists of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.planner.programs.layouts.strategies import Parts

Ranks = list[Tensor]


def positions(parts: Parts, rank: int, ranks: int) -> Tensor:
    """Return the positions of a dim that one rank holds: its blocks of each part."""
    found, start = [], 0
    for blocks, unit in parts:
        share, more = divmod(blocks, ranks)
        first = rank * share + min(rank, more)
        count = share + (rank < more)
        found.append(torch.arange(start + first * unit, start + (first + count) * unit))
        start += blocks * unit
    return torch.cat(found)


class Cut:
    """How a tensor is cut over the ranks."""

    def __init__(self, dim: int, parts: Parts, ranks: int) -> None:
        self.dim = dim
        self.places = [positions(parts, rank, ranks) for rank in range(ranks)]
        self.size = sum(blocks * unit for blocks, unit in parts)

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        return whole.index_select(self.dim, self.places[rank])

    def padded(self, shard: Tensor, rank: int) -> Tensor:
        shape = list(shard.shape)
        shape[self.dim] = self.size
        return shard.new_zeros(shape).index_copy(self.dim, self.places[rank], shard)

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        pieces = [self.padded(shard, rank) for rank, shard in enumerate(shards)]
        return _total(pieces)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _same(value: Tensor, ranks: int) -> Ranks:
    return [value.clone() for _ in range(ranks)]


def _first_only(values: Sequence[Tensor]) -> Ranks:
    return [v.clone() if r == 0 else torch.zeros_like(v) for r, v in enumerate(values)]


def moved(values: Sequence[Tensor], steps: str, before: Cut | None, after: Cut | None) -> Ranks:
    """Apply one direction of a conversion to the tensors of all ranks."""
    n = len(values)
    match steps:
        case "nothing":
            return [v.clone() for v in values]
        case "all-reduce":
            return _same(_total(values), n)
        case "mask":
            return _first_only(values)
        case "slice":
            assert after is not None
            return [after.shard(v, r) for r, v in enumerate(values)]
        case "pad":
            assert before is not None
            return [before.padded(v, r) for r, v in enumerate(values)]
        case "all-gather":
            assert before is not None
            return _same(before.joined(values), n)
        case "reduce-scatter":
            assert after is not None
            return [after.shard(_total(values), r) for r in range(n)]
        case "all-to-all":
            assert before is not None
            assert after is not None
            return [after.shard(before.joined(values), r) for r in range(n)]
    raise ValueError(steps)


# what the table of layouts says, written down again on purpose
STEPS = {
    "IR": ("nothing", "all-reduce"), "IS": ("slice", "all-gather"), "IP": ("mask", "nothing"),
    "RI": ("nothing", "mask"), "RS": ("slice", "pad"), "RP": ("mask", "mask"),
    "SI": ("all-gather", "slice"), "SR": ("all-gather", "reduce-scatter"),
    "SP": ("pad", "slice"), "SS": ("all-to-all", "all-to-all"),
    "PI": ("all-reduce", "nothing"), "PR": ("all-reduce", "all-reduce"),
    "PS": ("reduce-scatter", "all-gather"),
}  # fmt: skip


class Converted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: str, before: Any, after: Any, *values: Tensor) -> Any:
        ctx.steps, ctx.before, ctx.after = steps, before, after
        return tuple(moved(values, STEPS[steps][0], before, after))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = moved(gradients, STEPS[ctx.steps][1], ctx.after, ctx.before)
        return (None, None, None, *back)
