"""Compares a script with plain PyTorch in one process: tensors, losses, random numbers.

Ranks that hold the same elements may disagree, so each rank is compared separately.

In 16 bits two trainings round differently, so they are not equal. Instead, their distances from an
fp32 training after some steps are compared. A script may be at most twice as far from it as plain
PyTorch, which corresponds to one bit.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.codegen.proof.draws import AxisSizes, NotedDraw, draw_faults
from autopar.codegen.proof.plain import TrainedAlone
from autopar.codegen.proof.plain_half import PlainHalf
from autopar.runtime.tensor.shards import Chunks


@dataclass(frozen=True, slots=True)
class RankBlock:
    """A rank's shard of a tensor, or a part of it."""

    name: str
    chunks: Chunks
    value: Tensor


RankBlocks: TypeAlias = Sequence[RankBlock]
Region: TypeAlias = tuple[slice, ...]

_MOST_SHOWN = 4  # further kinds of tensors are only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference among tensors of one kind, and the tensor that has it."""

    largest: float
    name: str


def gap(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference of two tensors: 0 where both have the same infinity (as in a mask)."""
    return (one - other).masked_fill(one == other, 0)


def assembled(ranks: Iterable[RankBlocks]) -> dict[str, Tensor]:
    """Assemble the ranks' shards to whole tensors; elements that no rank has are nan."""
    whole: dict[str, Tensor] = {}
    for block in (block for blocks in ranks for block in blocks):
        shape = block.chunks.global_shape
        full = whole.setdefault(block.name, torch.full(shape, torch.nan, dtype=block.value.dtype))
        for target, source in regions_of(block.chunks):
            full[target] = block.value[source]
    return whole


def initial_value_faults(names: Iterable[str]) -> Iterator[str]:
    """Yield sentences on tensors whose initial values differ, one for all layers."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    for pattern, alike in islice(kinds.items(), _MOST_SHOWN):
        shown = alike[0] if len(alike) == 1 else f"{pattern} × {len(alike)}"
        yield f"{shown}: begins with other numbers than build_model() gives it"
    if len(kinds) > _MOST_SHOWN:
        yield f"and so do {len(kinds) - _MOST_SHOWN} other kinds of tensors"


def apart(ranks: Sequence[RankBlocks], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each tensor's largest difference; infinite if no rank has some of its elements."""
    found = {name: 0.0 for name, value in expected.items() if value.numel()}
    missing = {name: torch.ones_like(expected[name], dtype=torch.bool) for name in found}
    for block in (block for blocks in ranks for block in blocks if block.name in found):
        whole = expected[block.name]
        if tuple(whole.shape) != block.chunks.global_shape:
            continue
        for target, source in regions_of(block.chunks):
            difference = gap(block.value[source], whole[target]).abs()
            missing[block.name][target] = False
            if difference.numel():
                found[block.name] = max(found[block.name], difference.max().item(), key=_badness)
    return {
        name: float("inf") if missing[name].any() else largest for name, largest in found.items()
    }


def _badness(difference: float) -> tuple[bool, float]:
    """Return a key to sort differences by: nan counts as larger than any number."""
    return difference != difference, difference


def largest_of(differences: Mapping[str, float]) -> Difference:
    """Return the largest of several differences."""
    name = max(differences, key=lambda one: _badness(differences[one]), default="")
    return Difference(largest=differences.get(name, 0.0), name=name)


def regions_of(chunks: Chunks) -> Iterator[tuple[Region, Region]]:
    """Yield each piece of a shard: its region of the whole tensor, and of the shard."""
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
    """The numbers that one rank computed, drew and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before clipping
    initial: RankBlocks  # parameters, buffers and plain tensors of modules, before the first step
    gradients: RankBlocks  # of the first step, clipped
    parameters: RankBlocks  # and buffers, after the last step
    draws: tuple[NotedDraw, ...]  # of one additional step
    faults: tuple[str, ...]
    messages: tuple[SentMessages, ...] = ()  # in each graph that inductor compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A message between tensor ranks in a graph of a compiled layer."""

    what: str  # gather, sum
    is_backward: bool
    is_fused: bool  # with the products beside it
    line: int  # of the script, in the forward; 0 if it is not in the script


SentMessages: TypeAlias = tuple[SentMessage, ...]  # of one graph


def fusing_notes(ranks: Iterable[RankTrained], script: Path) -> Iterator[str]:
    """Yield for each class of a script which of its messages inductor fuses with products.

    Equal graphs count once.
    """
    graphs = dict.fromkeys(graph for rank in ranks for graph in rank.messages if graph)
    if not graphs:
        return
    text = script.read_text(encoding="utf-8")
    classes = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)]
    of_class: dict[str, list[SentMessage]] = defaultdict(list)
    for one in (one for graph in graphs for one in graph):
        own = (k.name for k in classes if k.lineno <= one.line <= (k.end_lineno or 0))
        of_class[next(own, "other code")].append(one)
    for name, messages in of_class.items():
        fused = sum(one.is_fused for one in messages)
        yield f"inductor fuses {fused} of {len(messages)} messages of {name} with products"
        for one in messages:
            if not one.is_fused:
                code = text.splitlines()[one.line - 1].strip() if one.line else "not in the script"
                where = "the backward" if one.is_backward else "the forward"
                yield f"not fused: the {one.what} in {where} of line {one.line}: {code}"
    yield "GPUs alone have the fused ops: here, messages and products ran one after another"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingComparison:
    """How far a script is from plain PyTorch in one process, whose losses are `losses`.

    `initial` is the difference before the first step, and must be zero. `faults` are sentences
    about other initial values, other random numbers, or missing clipping. `half` compares the same
    script in the plan's own 16 bits. `notes` say what could not be compared, and why.
    """

    initial: Difference
    loss: Difference
    norm: Difference  # of all gradients, before clipping
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]
    faults: tuple[str, ...]
    half: InHalf | None = None
    notes: tuple[str, ...] = ()

    def is_within(self, tolerance: float) -> bool:
        """Whether no difference exceeds the tolerance or is nan, and no fault was found."""
        differences = (self.loss, self.norm, self.gradient, self.parameter)
        is_equal = not self.faults and all(one.largest <= tolerance for one in differences)
        return is_equal and (self.half is None or self.half.is_as_near)


def compared(
    ranks: Sequence[RankTrained], expected: TrainedAlone, axes: AxisSizes
) -> TrainingComparison:
    """Return how far the ranks of a script are from plain PyTorch in one process.

    With local steps, ranks have the gradients and parameters of their own replica.
    """
    replicas = (expected, *expected.others)
    replica_of_rank = [
        (rank // axes.tensor % axes.data) * len(replicas) // axes.data for rank in range(len(ranks))
    ]
    groups = [
        (one, [rank for rank, its in zip(ranks, replica_of_rank, strict=True) if its == number])
        for number, one in enumerate(replicas)
    ]
    norms = [_by_step(rank.norms, one.norms) for one, members in groups for rank in members]
    gradients = [
        largest_of(apart([rank.gradients for rank in members], one.gradients))
        for one, members in groups
    ]
    parameters = [
        largest_of(apart([rank.parameters for rank in members], one.parameters))
        for one, members in groups
    ]
    initial = apart([rank.initial for rank in ranks], expected.initial)
    return TrainingComparison(
        initial=largest_of(initial),
        loss=_by_step(ranks[0].losses, expected.losses),
        norm=_largest(norms),
        gradient=_largest(gradients),
        parameter=_largest(parameters),
        losses=expected.losses,
        faults=(
            *initial_value_faults(name for name, apart in initial.items() if apart != 0),
            *dict.fromkeys(fault for rank in ranks for fault in rank.faults),
            *draw_faults([rank.draws for rank in ranks], expected.draws, axes),
        ),
    )


def _largest(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda one: _badness(one.largest))


def _by_step(found: Sequence[float], expected: Sequence[float]) -> Difference:
    """Return the largest difference over the steps; a missing step is infinite."""
    return largest_of(
        {
            f"step {step}": float("inf") if None in (own, one) else abs(own - one)
            for step, (own, one) in enumerate(zip_longest(found, expected), start=1)
        }
    )


TIMES = 2.0  # a script in 16 bits may be this many times as far from fp32 as plain PyTorch
FEW = 64  # elements; chance dominates the errors of smaller tensors
LOSSES, ALL = "losses", "all together"


@dataclass(slots=True, kw_only=True)
class RankInHalf:
    """The tensors and losses of one rank in a training in 16 bits."""

    initial: RankBlocks = ()  # buffers, and parameters (fp32 masters if the optimizer has them)
    types: Mapping[str, str] = field(default_factory=dict)  # of the buffers
    losses: tuple[float, ...] = ()
    final: RankBlocks = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InHalf:
    """A script in 16 bits compared with plain PyTorch in 16 bits with fp32 masters.

    `initial` is zero if both begin equally. `loss` and `weights` are the script's distance from
    fp32 after its steps, relative to plain PyTorch's.
    """

    dtype: str
    steps: int
    initial: Difference
    loss: float
    weights: Difference
    faults: tuple[str, ...]  # a sentence for each kind of tensor with other initial values

    @property
    def is_as_near(self) -> bool:
        """Whether the script begins equally, and ends at most TIMES times as far from fp32."""
        return not self.faults and self.loss <= TIMES and self.weights.largest <= TIMES


def compared_in_half(ranks: Sequence[RankInHalf], half: PlainHalf, single: PlainHalf) -> InHalf:
    """Return how a script's ranks in 16 bits compare with plain PyTorch in 16 bits and in fp32."""
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
        faults=(*initial_value_faults(name for name, far in initial.items() if far != 0), *types),
    )


def times_as_far(
    found: Mapping[str, Tensor], half: PlainHalf, single: PlainHalf
) -> dict[str, float]:
    """Return the relative distances from fp32: of each tensor, of all together, and of the losses.

    Plain PyTorch may happen to be exact in one tensor. Therefore its average error, scaled by how
    far training moves the tensor, is added to its distance. Tensors with few elements are dominated
    by chance, so they only count in the distance of all together.
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
    """Return tensors by name, with the losses of all steps as one of them."""
    return {**tensors, LOSSES: torch.tensor(losses, dtype=torch.float64)}


def _distances(found: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the distances of tensors from others; a missing one is infinite."""
    return {
        name: float(gap(found[name], end).norm())
        if name in found and found[name].shape == end.shape
        else math.inf
        for name, end in ends.items()
    }


def _times(far: float, allowed: float) -> float:
    return far / allowed if allowed else (math.inf if far else 0.0)


def _begun(blocks: RankBlocks, half: PlainHalf) -> Iterator[RankBlock]:
    """Yield a rank's initial tensors; round frozen weights to 16 bits, as plain PyTorch does."""
    dtype: torch.dtype = getattr(torch, half.dtype)
    for block in blocks:
        is_frozen = block.name in half.frozen
        yield replace(block, value=block.value.to(dtype).double()) if is_frozen else block


def _other_types(rank: RankInHalf, half: PlainHalf) -> Iterator[str]:
    for name, dtype in rank.types.items():
        if half.types.get(name, dtype) != dtype:
            yield f"{name}: is {dtype} in the script, and {half.types[name]} in plain PyTorch"
