"""Compares trainings: what they hold, their losses, in float64 and in 16 bits.

Compares what the ranks of a script hold, saw and drew with one process.

Ranks that hold the same elements may disagree, so each is compared by itself.

Compares a script in 16 bits with plain PyTorch in 16 bits: where it begins, and how far it gets.

Two trainings in 16 bits round otherwise, so they are not equal. What is compared is how far each is
from fp32 after some steps. A script may be twice as far as plain PyTorch: one bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product, zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.codegen.proof.draws import AxisSizes, NotedDraw, draw_faults
from autopar.codegen.proof.plain import TrainedAlone
from autopar.codegen.proof.plain_half import PlainHalf
from autopar.runtime.tensor.shards import Chunks


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """What a rank holds of a tensor, or a part of that."""

    name: str
    chunks: Chunks
    value: Tensor


Held: TypeAlias = Sequence[HeldBlock]
Place: TypeAlias = tuple[slice, ...]

_MOST_TOLD = 4  # kinds of tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference among the tensors of one kind, and which one has it."""

    largest: float
    name: str


def gap(one: Tensor, other: Tensor) -> Tensor:
    """Return what is between two tensors: nothing where both are as infinite (a mask)."""
    return (one - other).masked_fill(one == other, 0)


def assembled(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Put what the ranks hold together to whole tensors; what nobody holds is not a number."""
    whole: dict[str, Tensor] = {}
    for block in (block for held in ranks for block in held):
        shape = block.chunks.global_shape
        full = whole.setdefault(block.name, torch.full(shape, torch.nan, dtype=block.value.dtype))
        for target, source in places_of(block.chunks):
            full[target] = block.value[source]
    return whole


def begins_otherwise(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each kind of tensor that a script begins with otherwise."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    for pattern, alike in islice(kinds.items(), _MOST_TOLD):
        shown = alike[0] if len(alike) == 1 else f"{pattern} × {len(alike)}"
        yield f"{shown}: begins with other numbers than build_model() gives it"
    if len(kinds) > _MOST_TOLD:
        yield f"and so do {len(kinds) - _MOST_TOLD} others"


def apart(ranks: Sequence[Held], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor; one that no rank holds whole is infinite."""
    found = {name: 0.0 for name, value in expected.items() if value.numel()}
    missing = {name: torch.ones_like(expected[name], dtype=torch.bool) for name in found}
    for block in (block for held in ranks for block in held if block.name in found):
        whole = expected[block.name]
        if tuple(whole.shape) != block.chunks.global_shape:
            continue
        for target, source in places_of(block.chunks):
            difference = gap(block.value[source], whole[target]).abs()
            missing[block.name][target] = False
            if difference.numel():
                found[block.name] = worse(found[block.name], difference.max().item())
    return {
        name: float("inf") if missing[name].any() else largest for name, largest in found.items()
    }


def worse(one: float, other: float) -> float:
    """Return the larger of two differences; not a number is worse than any number."""
    return max(one, other, key=lambda value: (value != value, value))


def largest_of(differences: Mapping[str, float]) -> Difference:
    """Return the largest of several differences; not a number is larger than any number."""
    if not differences:
        return Difference(largest=0.0, name="")
    name = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]))
    return Difference(largest=differences[name], name=name)


def places_of(chunks: Chunks) -> Iterator[tuple[Place, Place]]:
    """Yield where each piece of a shard belongs in the whole tensor, and where it lies here."""
    for block in product(*(_with_offsets(ranges) for ranges in chunks.ranges)):
        target = tuple(slice(low, high) for low, high, _ in block)
        source = tuple(slice(offset, offset + high - low) for low, high, offset in block)
        yield target, source


def _with_offsets(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    found, offset = [], 0
    for low, high in ranges:
        found.append((low, high, offset))
        offset += high - low
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrained:
    """What one rank saw, drew and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before each step clips them
    initial: Held  # parameters, buffers and plain tensors of modules, before the first step
    gradients: Held  # of the first step, clipped
    parameters: Held  # after the last, and buffers
    draws: tuple[NotedDraw, ...]  # of one step more
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingComparison:
    """How far a script is from one process; `losses` are those of one process.

    `initial` is of what the script has before its first step: nothing may differ there.
    `faults` are sentences: what begins otherwise, what the script draws otherwise, or does not
    clip. `half` compares the same script in the plan's own 16 bits. `notes` tell what could not be
    compared, and why.
    """

    initial: Difference
    loss: Difference
    norm: Difference  # of all gradients, before they are clipped
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]
    faults: tuple[str, ...]
    half: InHalf | None = None
    notes: tuple[str, ...] = ()

    def is_within(self, tolerance: float) -> bool:
        """Whether nothing differs by more; what is not a number differs."""
        differences = (self.loss, self.norm, self.gradient, self.parameter)
        is_equal = not self.faults and all(one.largest <= tolerance for one in differences)
        return is_equal and (self.half is None or self.half.is_as_near)


def compared(
    ranks: Sequence[RankTrained], expected: TrainedAlone, axes: AxisSizes
) -> TrainingComparison:
    """Return how far the ranks of a script are from one process."""
    norms = [_by_step(rank.norms, expected.norms) for rank in ranks]
    initial = apart([rank.initial for rank in ranks], expected.initial)
    return TrainingComparison(
        initial=largest_of(initial),
        loss=_by_step(ranks[0].losses, expected.losses),
        norm=max(norms, key=lambda one: (one.largest != one.largest, one.largest)),
        gradient=largest_of(apart([rank.gradients for rank in ranks], expected.gradients)),
        parameter=largest_of(apart([rank.parameters for rank in ranks], expected.parameters)),
        losses=expected.losses,
        faults=(
            *begins_otherwise(name for name, apart in initial.items() if apart != 0),
            *dict.fromkeys(fault for rank in ranks for fault in rank.faults),
            *draw_faults([rank.draws for rank in ranks], expected.draws, axes),
        ),
    )


def _by_step(found: Sequence[float], expected: Sequence[float]) -> Difference:
    """Return the largest difference among the steps; one that is missing differs by infinity."""
    return largest_of(
        {
            f"step {step}": float("inf") if None in (own, one) else abs(own - one)
            for step, (own, one) in enumerate(zip_longest(found, expected), start=1)
        }
    )


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


def _begun(held: Held, half: PlainHalf) -> Iterator[HeldBlock]:
    """Yield what a rank began with; frozen weights may be there in more than 16 bits."""
    dtype: torch.dtype = getattr(torch, half.dtype)
    for block in held:
        is_frozen = block.name in half.frozen
        yield replace(block, value=block.value.to(dtype).double()) if is_frozen else block


def _other_types(rank: RankInHalf, half: PlainHalf) -> Iterator[str]:
    for name, dtype in rank.types.items():
        if half.types.get(name, dtype) != dtype:
            yield f"{name}: is {dtype} in the script, and {half.types[name]} in plain PyTorch"
