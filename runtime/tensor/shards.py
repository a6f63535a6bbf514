"""Which part of which parameter a rank holds.

Tells which chunks of a global tensor the shard in this process holds.

The record lives on the module that owns the parameter: `fully_shard` replaces parameter objects
but leaves modules in place.

Turns whole parameters into the shards that this rank of the tensor axis holds.

Shards are plain local parameters, so that the user's own nn.Linear works on its share; what a
shard holds of the whole is recorded (see chunks.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.slices import Parts, Ranges, cut, pick

QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def put_into(tensor: Tensor, source: Tensor) -> None:
    """Have a tensor be what another one is now: its memory, sizes, type and device.

    The object stays, so whoever holds it sees the new contents: modules, lists, other objects. So
    do its class, its attributes and its hooks, and whether it takes gradients. The source is used
    up. This is what torch.utils.swap_tensors does, without the class and the attributes.
    """
    fresh = source.detach().requires_grad_(tensor.requires_grad)
    one: Any = tensor
    hooks, behind = one._backward_hooks, one._post_accumulate_grad_hooks
    one._backward_hooks = one._post_accumulate_grad_hooks = None
    torch._C._swap_tensor_impl(tensor, fresh)
    if has_own_ops(source) and not isinstance(tensor, type(source)):  # such contents need the class
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor.__class__ = type(source)
        tensor.__dict__.update(source.__dict__, _is_param=is_parameter)
    for name in getattr(type(source), "__slots__", ()):
        setattr(tensor, name, getattr(source, name))
    one._backward_hooks, one._post_accumulate_grad_hooks = hooks, behind


def made_like(tensor: AnyTensor, original: Tensor) -> AnyTensor:
    """Let a tensor that takes the place of another one be of its class, with its attributes.

    A DTensor stays one: it takes a class that is both.
    """
    own: Any = type(tensor)
    wanted = next(one for one in type(original).__mro__ if not _computes(one))
    if has_own_ops(tensor):
        if wanted not in (Tensor, nn.Parameter):
            tensor.__class__ = type(wanted.__name__, (own, wanted), {})
    elif issubclass(wanted, own):
        tensor.__class__ = wanted
    tensor.__dict__.update(original.__dict__)
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Whether something tells a tensor from others of its contents: a class, or attributes."""
    return bool(tensor.__dict__) or type(tensor) not in (Tensor, nn.Parameter)


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie in one storage as they are, unlike those of sparse ones."""
    is_plain = tensor.layout is torch.strided and tensor.dtype not in QUANTIZED
    return is_plain and not has_own_ops(tensor)


def has_own_ops(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that computes in its own way, as DTensor is."""
    return _computes(type(tensor))


def _computes(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


Box: TypeAlias = tuple[tuple[int, int], ...]  # per dim, [start, stop)

RECORD = "_autopar_chunks"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A shard: the ranges of every dim of the global tensor, laid end to end."""

    global_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]  # per dim, [start, stop) in the global tensor, in local order

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(sum(stop - start for start, stop in held) for held in self.ranges)

    @property
    def elements(self) -> int:
        """How many elements the shard has."""
        return math.prod(self.local_shape)

    def within_box(self, box: Box) -> Chunks:
        """Narrow them to a box of the shard."""
        ranges = zip(self.ranges, box, strict=True)
        return Chunks(self.global_shape, tuple(within(held, *sides) for held, sides in ranges))


def whole(shape: tuple[int, ...]) -> Chunks:
    """Describe a tensor that this process holds in full."""
    return Chunks(shape, tuple(((0, size),) for size in shape))


def record_chunks(module: nn.Module, name: str, chunks: Chunks) -> None:
    """Remember what the module's own parameter or buffer holds."""
    module.__dict__.setdefault(RECORD, {})[name] = chunks


def recorded_chunks(module: nn.Module, name: str) -> Chunks | None:
    """Recall what the module's own tensor holds on the tensor axis, if it was cut."""
    chunks: Chunks | None = module.__dict__.get(RECORD, {}).get(name)
    return chunks


def chunks_by_name(model: nn.Module) -> dict[str, Chunks]:
    """Tell what every parameter and buffer holds, the rows of `fully_shard` included."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                chunks = recorded_chunks(module, attribute) or whole(tuple(tensor.shape))
                name = f"{prefix}.{attribute}" if prefix else attribute
                found[name] = with_rows(chunks, tensor)
    return found


def with_rows(chunks: Chunks, tensor: Tensor) -> Chunks:
    """Narrow the chunks of a whole shard to the rows that `fully_shard` left here."""
    if not isinstance(tensor, DTensor):
        return chunks
    with unset_fake_temporarily():  # torch counts with tensors whose values it reads
        local, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    ranges = tuple(
        within(held, offset, offset + size)
        for held, offset, size in zip(chunks.ranges, offsets, local, strict=True)
    )
    return Chunks(chunks.global_shape, ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Keep the elements start … stop − 1 of ranges that are laid end to end."""
    kept, offset = [], 0
    for low, high in ranges:
        first, last = max(start, offset), min(stop, offset + high - low)
        if first < last:
            kept.append((low + first - offset, low + last - offset))
        offset += high - low
    return tuple(kept)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the elements start … stop − 1 of a flattened tensor into boxes, in their order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _boxes_of_row(shape, last, start, stop)
        return
    yield from _boxes_of_row(shape, first - 1, start, first * row)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _boxes_of_row(shape, last, last * row, stop)


def _boxes_of_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    offset = number * math.prod(shape[1:])
    for box in boxes(shape[1:], start - offset, stop - offset):
        yield ((number, number + 1), *box)


_TIES = "tied_names"  # where a model that is a part of one has the names of that


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter or buffer is cut over the tensor axis."""

    dim: int
    parts: Parts  # see cuts.py


@dataclass(frozen=True, slots=True)
class TensorPlace:
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


def places(model: nn.Module) -> Iterator[TensorPlace]:
    """Find every parameter and buffer under all of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield TensorPlace(name, module, attribute, tensor)


def group_aliases(found: Iterable[TensorPlace]) -> list[list[TensorPlace]]:
    """Gather the places that hold the same tensor."""
    groups: dict[int, list[TensorPlace]] = {}
    for place in found:
        groups.setdefault(id(place.tensor), []).append(place)
    return list(groups.values())


def note_ties(model: nn.Module, found: Iterable[TensorPlace]) -> None:
    """Note which names of a whole model stand for one tensor, before a part of it is let go."""
    names = (tuple(place.name for place in group) for group in group_aliases(found))
    ties = {name: group for group in names for name in group if len(group) > 1}
    model.__dict__.setdefault(_TIES, ties)


def tied_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return all names that a tensor has in the whole model, its own first."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    return (name, *(other for other in ties.get(name, ()) if other != name))


def whole_names(model: nn.Module, group: list[TensorPlace]) -> tuple[str, ...]:
    """Return all names that a tensor has in the whole model, in the order of its modules there."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    own = tuple(place.name for place in group)
    return ties.get(own[0], own)


def check_names(splits: Mapping[str, Split], known: Collection[str]) -> None:
    """Refuse a split of something that the model does not have."""
    unknown = sorted(set(splits) - set(known))
    if unknown:
        raise KeyError(f"the model has no parameter or buffer {', '.join(unknown)}")


def split_of(group: list[TensorPlace], splits: Mapping[str, Split]) -> Split | None:
    """Find how a tensor is cut; its aliases may not disagree."""
    asked = {splits[place.name] for place in group if place.name in splits}
    if len(asked) > 1:
        names = ", ".join(place.name for place in group)
        raise ValueError(f"{names} are one tensor and cannot be cut in different ways: {asked}")
    return asked.pop() if asked else None


def put(group: list[TensorPlace], tensor: Tensor, chunks: Chunks) -> None:
    """Hang a part in all places of the tensor that it replaces, and remember what it holds."""
    hang(group, tensor)
    for place in group:
        record_chunks(place.module, place.attribute, chunks)


def hang(group: list[TensorPlace], tensor: Tensor) -> None:
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
