"""Compares what the ranks of a script hold, saw and drew with one process.

Ranks that hold the same elements may disagree, so each is compared by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.codegen.proof.draw_audit import Axes, draw_faults
from autopar.codegen.proof.draws import Draw
from autopar.codegen.proof.reference import Trained
from autopar.runtime.tensor.chunks import Chunks


@dataclass(frozen=True, slots=True)
class Block:
    """What a rank holds of a tensor, or a part of that."""

    name: str
    chunks: Chunks
    value: Tensor


Held: TypeAlias = Sequence[Block]
Place: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrained:
    """What one rank saw, drew and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before each step clips them
    gradients: Held  # of the first step, clipped
    parameters: Held  # after the last
    draws: tuple[Draw, ...]  # of one step more
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference among the tensors of one kind, and which one has it."""

    largest: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a script is from one process; `losses` are those of one process.

    `faults` are sentences: what the script draws otherwise, or does not clip.
    """

    loss: Difference
    norm: Difference  # of all gradients, before they are clipped
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]
    faults: tuple[str, ...]

    def is_within(self, tolerance: float) -> bool:
        """Whether nothing differs by more; what is not a number differs."""
        differences = (self.loss, self.norm, self.gradient, self.parameter)
        return not self.faults and all(one.largest <= tolerance for one in differences)


def compared(ranks: Sequence[RankTrained], expected: Trained, axes: Axes) -> Comparison:
    """Return how far the ranks of a script are from one process."""
    norms = [_by_step(rank.norms, expected.norms) for rank in ranks]
    return Comparison(
        loss=_by_step(ranks[0].losses, expected.losses),
        norm=max(norms, key=lambda one: (one.largest != one.largest, one.largest)),
        gradient=_largest(_apart([rank.gradients for rank in ranks], expected.gradients)),
        parameter=_largest(_apart([rank.parameters for rank in ranks], expected.parameters)),
        losses=expected.losses,
        faults=(
            *dict.fromkeys(fault for rank in ranks for fault in rank.faults),
            *draw_faults([rank.draws for rank in ranks], expected.draws, axes),
        ),
    )


def assembled(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Put what the ranks hold together to whole tensors; what nobody holds is not a number."""
    whole: dict[str, Tensor] = {}
    for block in (block for held in ranks for block in held):
        shape = block.chunks.global_shape
        full = whole.setdefault(block.name, torch.full(shape, torch.nan).double())
        for target, source in _places(block.chunks):
            full[target] = block.value[source]
    return whole


def _by_step(found: Sequence[float], expected: Sequence[float]) -> Difference:
    """Return the largest difference among the steps; one that is missing differs by infinity."""
    return _largest(
        {
            f"step {step}": float("inf") if None in (own, one) else abs(own - one)
            for step, (own, one) in enumerate(zip_longest(found, expected), start=1)
        }
    )


def _apart(ranks: Sequence[Held], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the differences by name; what no rank holds, or only a part of, by infinity."""
    apart = {name: 0.0 for name, value in expected.items() if value.numel()}
    missing = {name: torch.ones_like(expected[name], dtype=torch.bool) for name in apart}
    for block in (block for held in ranks for block in held if block.name in apart):
        whole = expected[block.name]
        if tuple(whole.shape) != block.chunks.global_shape:
            continue
        for target, source in _places(block.chunks):
            difference = (block.value[source] - whole[target]).abs()
            missing[block.name][target] = False
            if difference.numel():
                apart[block.name] = _worse(apart[block.name], difference.max().item())
    return {
        name: float("inf") if missing[name].any() else largest for name, largest in apart.items()
    }


def _worse(one: float, other: float) -> float:
    """Return the larger of two differences; not a number is worse than any number."""
    return max(one, other, key=lambda value: (value != value, value))


def _largest(differences: Mapping[str, float]) -> Difference:
    if not differences:
        return Difference(largest=0.0, name="")
    name = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]))
    return Difference(largest=differences[name], name=name)


def _places(chunks: Chunks) -> Iterator[tuple[Place, Place]]:
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
