"""What ranks hold of tensors: put together to whole ones, or each compared with a whole one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.runtime.tensor.chunks import Chunks


@dataclass(frozen=True, slots=True)
class Block:
    """What a rank holds of a tensor, or a part of that."""

    name: str
    chunks: Chunks
    value: Tensor


Held: TypeAlias = Sequence[Block]
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
