"""Turns whole parameters into the shards that this rank of the tensor axis holds.

Shards are plain local parameters, so that the user's own nn.Linear works on its share; what a
shard holds of the whole is recorded (see chunks.py).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.chunks import Chunks, record_chunks, whole
from autopar.runtime.tensor.contents import made_like, put_into
from autopar.runtime.tensor.cuts import Parts, Ranges, cut
from autopar.runtime.tensor.slices import pick

_TIES = "tied_names"  # where a model that is a part of one has the names of that


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter or buffer is cut over the tensor axis."""

    dim: int
    parts: Parts  # see cuts.py


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor hangs in a model."""

    name: str  # the whole dotted name
    module: nn.Module
    attribute: str
    tensor: Tensor


def ranges(split: Split, rank: int, size: int) -> Ranges:
    """Find the ranges of the split dim that a rank holds."""
    return cut(split.parts, size).ranges[rank]


def local_size(parts: Parts, axis: Axis) -> int:
    """Count the elements of a dim that this rank holds."""
    return cut(parts, axis.size).sizes[axis.rank]


def local_part(tensor: Tensor, split: Split, axis: Axis) -> Tensor:
    """Copy this rank's part of a whole tensor."""
    held = cut(split.parts, axis.size)
    if not -tensor.ndim <= split.dim < tensor.ndim or tensor.shape[split.dim] != held.whole:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dim {split.dim} "
            f"into parts {split.parts}, which add up to {held.whole}"
        )
    return pick(tensor, split.dim % tensor.ndim, held.ranges[axis.rank])


def local_chunks(shape: tuple[int, ...], split: Split | None, axis: Axis) -> Chunks:
    """Describe what this rank holds of a tensor of that global shape."""
    chunks = whole(shape)
    if split is None:
        return chunks
    held = list(chunks.ranges)
    held[split.dim] = ranges(split, axis.rank, axis.size)
    return Chunks(shape, tuple(held))


def shard_parameters(model: nn.Module, splits: Mapping[str, Split], axis: Axis) -> None:
    """Replace every named parameter or buffer by this rank's part, all its aliases alike."""
    aliases = group_aliases(places(model))
    check_names(splits, {place.name for group in aliases for place in group})
    for group in aliases:
        split = split_of(group, splits)
        if split is not None:
            first = group[0].tensor
            with torch.no_grad():
                part = local_part(first.detach(), split, axis)
            put(group, part, local_chunks(tuple(first.shape), split, axis))


def places(model: nn.Module) -> Iterator[Place]:
    """Find every parameter and buffer under all of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield Place(name, module, attribute, tensor)


def group_aliases(found: Iterable[Place]) -> list[list[Place]]:
    """Gather the places that hold the same tensor."""
    groups: dict[int, list[Place]] = {}
    for place in found:
        groups.setdefault(id(place.tensor), []).append(place)
    return list(groups.values())


def note_ties(model: nn.Module, found: Iterable[Place]) -> None:
    """Note which names of a whole model stand for one tensor, before a part of it is let go."""
    names = (tuple(place.name for place in group) for group in group_aliases(found))
    ties = {name: group for group in names for name in group if len(group) > 1}
    model.__dict__.setdefault(_TIES, ties)


def tied_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return all names that a tensor has in the whole model, its own first."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    return (name, *(other for other in ties.get(name, ()) if other != name))


def whole_names(model: nn.Module, group: list[Place]) -> tuple[str, ...]:
    """Return all names that a tensor has in the whole model, in the order of its modules there."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    own = tuple(place.name for place in group)
    return ties.get(own[0], own)


def check_names(splits: Mapping[str, Split], known: Collection[str]) -> None:
    """Refuse a split of something that the model does not have."""
    unknown = sorted(set(splits) - set(known))
    if unknown:
        raise KeyError(f"the model has no parameter or buffer {', '.join(unknown)}")


def split_of(group: list[Place], splits: Mapping[str, Split]) -> Split | None:
    """Find how a tensor is cut; its aliases may not disagree."""
    asked = {splits[place.name] for place in group if place.name in splits}
    if len(asked) > 1:
        names = ", ".join(place.name for place in group)
        raise ValueError(f"{names} are one tensor and cannot be cut in different ways: {asked}")
    return asked.pop() if asked else None


def put(group: list[Place], tensor: Tensor, chunks: Chunks) -> None:
    """Hang a part in all places of the tensor that it replaces, and remember what it holds."""
    hang(group, tensor)
    for place in group:
        record_chunks(place.module, place.attribute, chunks)


def hang(group: list[Place], tensor: Tensor) -> None:
    """Hang new contents in all places of a tensor; a parameter stays the object that it was.

    A buffer that others may hold as well, such as a global table, keeps its numbers for them: the
    modules get another one, of its class and with its attributes.
    """
    old = group[0].tensor
    if isinstance(old, nn.Parameter) or old.is_meta:
        put_into(old, tensor)
        return
    fresh = made_like(tensor, old)
    for place in group:
        setattr(place.module, place.attribute, fresh)
