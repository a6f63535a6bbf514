"""Turns two checkpoints into what differs between them: tensors, by how much at most, numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.keeping.finding import Checkpoint
from autopar.runtime.keeping.manifest import Logical
from autopar.runtime.keeping.overlaps import overlaps
from autopar.runtime.keeping.reading import Reader
from autopar.runtime.keeping.states import STATE, WEIGHT
from autopar.runtime.shown import in_a_line


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How far a tensor of one checkpoint is from that of another.

    `largest` is of one element, and `largest_value` of the elements of the first checkpoint.
    """

    kind: str  # weight, or the optimizer's name of a state: exp_avg
    name: str
    elements: int
    unequal: int
    largest: float
    largest_value: float

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same."""
        return self.unequal == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberDifference:
    """A number that an optimizer keeps of a parameter, in both checkpoints; None: not there."""

    kind: str
    name: str
    before: float | int | bool | None
    after: float | int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """What sets two checkpoints apart."""

    tensors: tuple[TensorDifference, ...]  # all that both have in the same shape
    numbers: tuple[NumberDifference, ...]  # that differ
    unlike: tuple[str, ...]  # tensors that one of them lacks, or has in another shape

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same."""
        return not (self.numbers or self.unlike) and all(one.is_equal for one in self.tensors)


def difference(before: Checkpoint, after: Checkpoint) -> CheckpointDifference:
    """Compare all weights and states of two checkpoints, of whatever plans, shard by shard."""
    one, other = before.manifest, after.manifest
    keys = sorted(one.tensors.keys() | other.tensors.keys())
    unlike = tuple(_unlike(one.tensors.get(key), other.tensors.get(key), key) for key in keys)
    common = [
        key
        for key, logical in one.tensors.items()
        if key in other.tensors and other.tensors[key].shape == logical.shape
    ]
    with ExitStack() as files:
        readers = Reader(before, files), Reader(after, files)
        tensors = tuple(_compared(key, *readers) for key in sorted(common, key=_weights_first))
    numbers = tuple(_numbers(before, after))
    return CheckpointDifference(
        tensors=tensors, numbers=numbers, unlike=tuple(text for text in unlike if text)
    )


def _unlike(one: Logical | None, other: Logical | None, key: str) -> str:
    what = " of ".join(_parts(key))
    if one is None or other is None:
        return f"only {'B' if one is None else 'A'} has {what}"
    if one.shape != other.shape:
        return f"{what} is {list(one.shape)} in A and {list(other.shape)} in B"
    return ""


def _compared(key: str, before: Reader, after: Reader) -> TensorDifference:
    """Compare a tensor box by box: what a shard of the one has in common with one of the other."""
    one, other = (reader.checkpoint.manifest.tensors[key] for reader in (before, after))
    unequal, largest, largest_value = 0, 0.0, 0.0
    for shard in one.shards:
        for its in other.shards:
            for place, its_place in overlaps(shard.chunks, its.chunks):
                here, there = before.box(shard, place), after.box(its, its_place)
                count, most = _apart(here, there)
                unequal += count
                largest = max(largest, most, key=_with_nan_last)
                largest_value = max(largest_value, _largest(here))
    kind, name = _parts(key)
    return TensorDifference(
        kind=kind,
        name=name,
        elements=math.prod(one.shape),
        unequal=unequal,
        largest=largest,
        largest_value=largest_value,
    )


def _apart(one: Tensor, other: Tensor) -> tuple[int, float]:
    """Return how many elements differ, and by how much at most; nan is equal to nan."""
    same = (one == other) | ((one != one) & (other != other))
    count = int(same.numel() - same.sum())
    if not count:
        return 0, 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    return count, float((one[~same].to(wide) - other[~same].to(wide)).abs().max())


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    wide = values if values.is_complex() else values.double()
    return float(wide.abs().nan_to_num(0.0).max())


def _weights_first(key: str) -> tuple[bool, str]:
    return not key.startswith(WEIGHT), key


def _with_nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _numbers(before: Checkpoint, after: Checkpoint) -> Iterator[NumberDifference]:
    one, other = before.manifest.scalars, after.manifest.scalars
    for key in sorted(one.keys() | other.keys()):
        values = [found[key].value if key in found else None for found in (one, other)]
        if values[0] != values[1]:
            kind, name = _parts(key)
            yield NumberDifference(kind=kind, name=name, before=values[0], after=values[1])


def _parts(key: str) -> tuple[str, str]:
    """Return what a key is of, and the name of the parameter."""
    if key.startswith(WEIGHT):
        return "weight", in_a_line(key.removeprefix(WEIGHT))
    kind, _, name = key.removeprefix(STATE).partition("/")
    return in_a_line(kind), in_a_line(name)
