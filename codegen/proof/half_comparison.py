"""Compares a script in 16 bits with plain PyTorch in 16 bits: where it begins, and how far it gets.

Two trainings in 16 bits round otherwise, so they are not equal. What is compared is how far each is
from fp32 after some steps. A script may be twice as far as plain PyTorch: one bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autopar.codegen.proof.held import (
    Block,
    Difference,
    Held,
    apart,
    assembled,
    begins_otherwise,
    gap,
    largest_of,
)
from autopar.codegen.proof.plain_half import PlainHalf

TIMES = 2.0  # as far from fp32 as plain PyTorch in 16 bits
FEW = 64  # numbers; of more the norms of two trainings' errors are nearly equal
LOSSES, ALL = "losses", "all together"


@dataclass(slots=True, kw_only=True)
class RankInHalf:
    """What one rank held and saw of a training in 16 bits."""

    initial: Held = ()  # parameters, in fp32 where the optimizer has that, and buffers
    types: Mapping[str, str] = field(default_factory=dict)  # of the buffers
    losses: tuple[float, ...] = ()
    final: Held = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InHalf:
    """A script in 16 bits beside plain PyTorch with fp32 masters.

    `initial` differs by nothing where both begin alike. `loss` and `weights` are how many times as
    far from fp32 the script is after its steps.
    """

    dtype: str
    steps: int
    initial: Difference
    loss: float
    weights: Difference
    faults: tuple[str, ...]  # what begins otherwise, a sentence each

    @property
    def is_as_near(self) -> bool:
        """Whether it begins alike, and stays as near to fp32 as plain PyTorch does."""
        return not self.faults and self.loss <= TIMES and self.weights.largest <= TIMES


def compared_in_half(ranks: Sequence[RankInHalf], half: PlainHalf, single: PlainHalf) -> InHalf:
    """Return how the ranks of a script compare with one process in 16 bits, and one in fp32."""
    initial = apart([list(_begun(rank.initial, half)) for rank in ranks], half.initial)
    types = dict.fromkeys(text for rank in ranks for text in _other_types(rank, half))
    found = assembled(rank.final for rank in ranks)
    times = times_as_far(with_losses(found, ranks[0].losses), half, single)
    return InHalf(
        dtype=half.dtype,
        steps=len(half.losses),
        initial=largest_of(initial),
        loss=times.pop(LOSSES),
        weights=largest_of(times),
        faults=(*begins_otherwise(name for name, far in initial.items() if far != 0), *types),
    )


def times_as_far(
    found: Mapping[str, Tensor], half: PlainHalf, single: PlainHalf
) -> dict[str, float]:
    """Return how many times as far from fp32 each tensor is, all together, and the losses.

    What plain PyTorch happens to hit counts as missed by the share of all movement that it misses.
    Of tensors with few numbers chance decides who is nearer: they count among all alone.
    """
    ends = with_losses(single.final, single.losses)
    far, missed = _distances(found, ends), _distances(with_losses(half.final, half.losses), ends)
    loss_times = _times(far.pop(LOSSES), missed.pop(LOSSES))
    moved = _distances(single.initial, single.final)
    share = _times(math.hypot(*missed.values()), math.hypot(*moved.values()))
    times = {
        name: _times(far[name], missed[name] + share * moved[name])
        for name, end in single.final.items()
        if end.numel() >= FEW or far[name] == math.inf
    }
    whole = _times(math.hypot(*far.values()), math.hypot(*missed.values()))
    return {**times, ALL: whole, LOSSES: loss_times}


def with_losses(tensors: Mapping[str, Tensor], losses: Sequence[float]) -> dict[str, Tensor]:
    """Return tensors by their names, and the losses of all steps as one of them."""
    return {**tensors, LOSSES: torch.tensor(losses, dtype=torch.float64)}


def _distances(found: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far tensors are from others; one that is not there is infinitely far."""
    return {
        name: float(gap(found[name], end).norm())
        if name in found and found[name].shape == end.shape
        else math.inf
        for name, end in ends.items()
    }


def _times(far: float, allowed: float) -> float:
    return far / allowed if allowed else (math.inf if far else 0.0)


def _begun(held: Held, half: PlainHalf) -> Iterator[Block]:
    """Yield what a rank began with; frozen weights may be there in more than 16 bits."""
    dtype: torch.dtype = getattr(torch, half.dtype)
    for block in held:
        is_frozen = block.name in half.frozen
        yield replace(block, value=block.value.to(dtype).double()) if is_frozen else block


def _other_types(rank: RankInHalf, half: PlainHalf) -> Iterator[str]:
    for name, dtype in rank.types.items():
        if half.types.get(name, dtype) != dtype:
            yield f"{name}: is {dtype} in the script, and {half.types[name]} in plain PyTorch"
