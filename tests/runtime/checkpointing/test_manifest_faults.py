"""Shards cover a tensor once: what is found of random ones, beside a count of every element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
import torch

from autopar.runtime.checkpointing import manifest as faults
from autopar.runtime.checkpointing.manifest import (
    CheckpointOrigin,
    Logical,
    Manifest,
    Moment,
    StoredShard,
    rank_file,
)
from autopar.runtime.checkpointing.safetensors_file import WrittenFile
from autopar.runtime.tensor.slices import Ranges


def manifest_of(shape: tuple[int, ...], shards: Sequence[tuple[Ranges, ...]]) -> Manifest:
    """Return the description of one tensor, each of whose shards is in the file of a rank."""
    stored = tuple(
        StoredShard(file=rank_file(rank), entry="x", ranges=ranges)
        for rank, ranges in enumerate(shards)
    )
    return Manifest(
        moment=Moment(step=1, rows=1, updates=1),
        origin=CheckpointOrigin(torch="", model="", plan=""),
        files={one.file: WrittenFile(size_bytes=10**6, sha256="") for one in stored},
        tensors={"weight/x": Logical(dtype=torch.float32, shape=shape, shards=stored)},
        scalars={},
        exported={},
    )


def cut(ranges: Ranges, random: Random) -> tuple[Ranges, Ranges]:
    """Cut the elements of ranges in two, as they lie or mixed."""
    elements = [n for low, high in ranges for n in range(low, high)]
    if random.random() < 0.3:
        chosen = set(random.sample(elements, len(elements) // 2))
    else:
        chosen = set(elements[: random.randrange(1, len(elements))])
    halves = [n for n in elements if n in chosen], [n for n in elements if n not in chosen]
    first, second = (tuple((n, n + 1) for n in half) for half in halves)
    return first, second


def random_shards(shape: tuple[int, ...], random: Random) -> list[tuple[Ranges, ...]]:
    """Cut a tensor into shards, one cut after another, along dims that are long enough."""
    shards: list[tuple[Ranges, ...]] = [tuple(((0, size),) for size in shape)]
    for _ in range(random.randrange(6)):
        number = random.randrange(len(shards))
        own = shards[number]
        dims = [d for d, held in enumerate(own) if sum(b - a for a, b in held) > 1]
        if dims:
            dim = random.choice(dims)
            halves = cut(own[dim], random)
            shards[number : number + 1] = [(*own[:dim], h, *own[dim + 1 :]) for h in halves]
    return shards


def is_covered_once(shape: tuple[int, ...], shards: list[tuple[Ranges, ...]]) -> bool:
    """Count how often each element is there."""
    times = dict.fromkeys(product(*map(range, shape)), 0)
    for ranges in shards:
        held = [[n for low, high in own for n in range(low, high)] for own in ranges]
        for element in product(*held):
            times[element] = times.get(element, 0) + 1
    return set(times.values()) == {1}


@pytest.mark.parametrize("seed", range(60))
def test_a_cover_is_one_exactly_where_every_element_is_there_once(seed: int) -> None:
    random = Random(seed)
    shape = tuple(random.randrange(1, 6) for _ in range(random.randrange(1, 4)))
    shards = random_shards(shape, random)
    assert not list(faults.manifest_faults(manifest_of(shape, shards)))
    other = [list(map(list, own)) for own in shards]
    number, dim = random.randrange(len(other)), random.randrange(len(shape))
    place = random.randrange(len(other[number][dim]))
    low = random.randrange(shape[dim])
    other[number][dim][place] = (low, random.randrange(low + 1, shape[dim] + 1))
    moved = [tuple(map(tuple, own)) for own in other]
    found = list(faults.manifest_faults(manifest_of(shape, moved)))
    assert bool(found) != is_covered_once(shape, moved)


def test_a_number_and_an_empty_tensor_are_covered() -> None:
    for shape, shards in (((), [()]), ((0, 3), [(((0, 0),), ((0, 3),))])):
        assert not list(faults.manifest_faults(manifest_of(shape, shards)))
    assert list(faults.manifest_faults(manifest_of((), [(), ()])))


def test_thousands_of_ranks_are_looked_at_in_seconds() -> None:
    rows, columns = 2048, 8
    shards = [
        (((row, row + 1),), ((column, column + 1),))
        for row in range(rows)
        for column in range(columns)
    ]
    random = Random(0)
    random.shuffle(shards)
    assert math.prod((rows, columns)) == len(shards)
    assert not list(faults.manifest_faults(manifest_of((rows, columns), shards)))
