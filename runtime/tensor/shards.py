"""Turns whole parameters into this rank's shards on the tensor axis.

Records which part of a parameter a rank holds. Shards are plain local parameters, so that an
unchanged nn.Linear computes with them.

The chunks of a shard are recorded on the module that owns the parameter: `fully_shard` replaces
parameter objects but keeps modules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.slices import Cut, Parts, Ranges, cut, cut_of_share, pick

__all__ = ["Split", "local_size", "whole_length"]  # for scripts

QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Value = TypeVar("Value")


def put_into(tensor: Tensor, source: Tensor) -> None:
    """Replace a tensor's memory, sizes, dtype and device by those of another tensor.

    The tensor stays the same object, so that modules, lists and other holders see the new contents.
    It keeps its class, attributes, hooks and requires_grad. The source must not be used afterwards.
    Unlike torch.utils.swap_tensors, the class and the attributes are not swapped.
    """
    fresh = source.detach().requires_grad_(tensor.requires_grad)
    one: Any = tensor
    hooks, behind = one._backward_hooks, one._post_accumulate_grad_hooks
    one._backward_hooks = one._post_accumulate_grad_hooks = None
    torch._C._swap_tensor_impl(tensor, fresh)
    # some contents need the class of their tensor, for example those of a DTensor
    if has_own_ops(source) and not isinstance(tensor, type(source)):
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor.__class__ = type(source)
        tensor.__dict__.update(source.__dict__, _is_param=is_parameter)
    for name in getattr(type(source), "__slots__", ()):
        setattr(tensor, name, getattr(source, name))
    one._backward_hooks, one._post_accumulate_grad_hooks = hooks, behind


def made_like(tensor: AnyTensor, original: Tensor) -> AnyTensor:
    """Give a replacement tensor the class and the attributes of the original.

    A DTensor gets a class that derives from both.
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
    """Whether a tensor has attributes or a class beyond Tensor and Parameter."""
    return bool(tensor.__dict__) or type(tensor) not in (Tensor, nn.Parameter)


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor is strided in one storage, unlike sparse, quantised or mapped ones."""
    is_plain = tensor.layout is torch.strided and tensor.dtype not in QUANTIZED
    is_mapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # as in torch.vmap
    return is_plain and not is_mapped and not has_own_ops(tensor)


def has_own_ops(tensor: Tensor) -> bool:
    """Whether a tensor's class implements its own ops, as DTensor does."""
    return _computes(type(tensor))


def _computes(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


Box: TypeAlias = tuple[tuple[int, int], ...]  # per dim, [start, stop)

RECORD = "_autopar_chunks"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A shard of a global tensor: for each dim, the ranges of elements that it concatenates."""

    global_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]  # per dim, [start, stop) in the global tensor, in local order

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return shape_of(self.ranges)

    @property
    def elements(self) -> int:
        """How many elements the shard has."""
        return math.prod(self.local_shape)

    def within_box(self, box: Box) -> Chunks:
        """Return the chunks of a part of this shard; the box counts from the shard's start."""
        ranges = zip(self.ranges, box, strict=True)
        return Chunks(self.global_shape, tuple(within(held, *sides) for held, sides in ranges))


def shape_of(ranges: Iterable[Ranges]) -> tuple[int, ...]:
    """Return the shape of a shard with these ranges in each dim."""
    return tuple(sum(stop - start for start, stop in held) for held in ranges)


def whole(shape: tuple[int, ...]) -> Chunks:
    """Describe a tensor that this process holds in full."""
    return Chunks(shape, tuple(((0, size),) for size in shape))


def recorded_chunks(module: nn.Module, name: str) -> Chunks | None:
    """Return the recorded chunks of a module's own tensor on the tensor axis, or None."""
    chunks: Chunks | None = module.__dict__.get(RECORD, {}).get(name)
    return chunks


def chunks_by_name(model: nn.Module) -> dict[str, Chunks]:
    """Return the chunks of every parameter and buffer on this rank, also after `fully_shard`."""
    return {place.name: chunks_of(place) for place in places(model)}


def chunks_of(place: TensorPlace) -> Chunks:
    """Return the chunks of a tensor on this rank, also after `fully_shard`."""
    recorded = recorded_chunks(place.module, place.attribute)
    return with_rows(recorded or whole(tuple(place.tensor.shape)), place.tensor)


def with_rows(chunks: Chunks, tensor: Tensor) -> Chunks:
    """Restrict the chunks of a shard to the rows that `fully_shard` keeps on this rank."""
    # imported here, because it takes half a second that planning does not need
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return chunks
    with unset_fake_temporarily():  # torch counts with real tensors here
        local, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    ranges = tuple(
        within(held, offset, offset + size)
        for held, offset, size in zip(chunks.ranges, offsets, local, strict=True)
    )
    return Chunks(chunks.global_shape, ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the elements start … stop − 1 of ranges that are laid end to end."""
    kept, offset = [], 0
    for low, high in ranges:
        first, last = max(start, offset), min(stop, offset + high - low)
        if first < last:
            kept.append((low + first - offset, low + last - offset))
        offset += high - low
    return tuple(kept)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the elements start … stop − 1 of a flattened tensor into boxes, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first … last − 1
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


_TIES = "tied_names"  # an attribute of a stage: the tied names of the whole model


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter or buffer is cut over the tensor axis."""

    dim: int
    parts: Parts | None = None  # see slices.py; None: the dim may be cut between any elements

    def cut(self, shape: Sequence[int], axis: Axis) -> Cut:
        """Return the cut of a whole shape: the elements of each rank along the split dim."""
        return cut(self.parts or ((shape[self.dim], 1),), axis.size)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A place of a tensor in a model: a module, and an attribute."""

    name: str  # the full dotted name
    module: nn.Module
    attribute: str
    tensor: Tensor


def whole_length(x: Tensor, dim: int, axis: Axis) -> int:
    """Return how long a dim was before it was cut into the ranks' shards."""
    return cut_of_share(x.shape[dim], axis, x.device).whole


def local_size(parts: Parts, axis: Axis) -> int:
    """Return how many elements of a dim this rank holds."""
    return cut(parts, axis.size).sizes[axis.rank]


def local_part(tensor: Tensor, split: Split, axis: Axis) -> Tensor:
    """Copy this rank's part of a whole tensor."""
    shape = tuple(tensor.shape)
    if not -tensor.ndim <= split.dim < tensor.ndim:
        raise ValueError(f"a tensor of shape {shape} has no dim {split.dim} to be cut along")
    held = split.cut(shape, axis)
    if shape[split.dim] != held.whole:
        raise ValueError(
            f"a tensor of shape {shape} cannot be cut along dim {split.dim} "
            f"into parts {split.parts}, which add up to {held.whole}"
        )
    return pick(tensor, split.dim % tensor.ndim, held.ranges[axis.rank])


def local_chunks(shape: tuple[int, ...], split: Split | None, axis: Axis) -> Chunks:
    """Return the chunks that this rank holds of a tensor with a global shape."""
    chunks = whole(shape)
    if split is None:
        return chunks
    held = list(chunks.ranges)
    held[split.dim] = split.cut(shape, axis).ranges[axis.rank]
    return Chunks(shape, tuple(held))


def places(model: nn.Module) -> Iterator[TensorPlace]:
    """Yield every parameter and buffer under all of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                yield TensorPlace(name, module, attribute, tensor)


def group_aliases(found: Iterable[TensorPlace]) -> list[list[TensorPlace]]:
    """Group the places that hold the same tensor."""
    groups: dict[int, list[TensorPlace]] = {}
    for place in found:
        groups.setdefault(id(place.tensor), []).append(place)
    return list(groups.values())


def note_ties(model: nn.Module, found: Iterable[TensorPlace]) -> None:
    """Record the tied names of a whole model, before parts of it are removed."""
    names = (tuple(place.name for place in group) for group in group_aliases(found))
    ties = {name: group for group in names for name in group if len(group) > 1}
    model.__dict__.setdefault(_TIES, ties)


def tied_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return all names of a tensor in the whole model, the given one first."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    return (name, *(other for other in ties.get(name, ()) if other != name))


def whole_names(model: nn.Module, group: list[TensorPlace]) -> tuple[str, ...]:
    """Return all names of a tensor in the whole model, in the order of its modules there."""
    ties: Mapping[str, tuple[str, ...]] = model.__dict__.get(_TIES, {})
    own = tuple(place.name for place in group)
    return ties.get(own[0], own)


def check_names(splits: Mapping[str, Split], known: Collection[str]) -> None:
    """Raise for a split of a name that the model does not have."""
    unknown = sorted(set(splits) - set(known))
    if unknown:
        raise KeyError(f"the model has no parameter or buffer {', '.join(unknown)}")


def expand(pattern: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Put numbers in the place of the star: ("h.*", range(2)) gives ("h.0", "h.1")."""
    before, _, behind = pattern.partition("*")
    return tuple(f"{before}{number}{behind}" for number in numbers)


def starred(name: str) -> tuple[str, ...]:
    """Return the name with stars in place of some of its numbers, fewest stars first.

    "h.0.mlp.2" gives "h.*.mlp.2", "h.0.mlp.*", "h.*.mlp.*".
    """
    parts = name.split(".")
    places = [place for place, part in enumerate(parts) if part.isdecimal()]
    chosen = (some for count in range(len(places)) for some in combinations(places, count + 1))
    return tuple(
        ".".join("*" if place in some else part for place, part in enumerate(parts))
        for some in chosen
    )


def named(table: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Return the table's entry for each name, listed itself or with stars; omit other names."""
    found = (
        (name, next((n for n in (name, *starred(name)) if n in table), None)) for name in names
    )
    return {name: table[listed] for name, listed in found if listed is not None}


def is_listed(name: str, listed: Collection[str]) -> bool:
    """Whether a list has a name or a module around it, perhaps with stars for some numbers."""
    return any(one in listed for one in _forms(name))


@cache  # a step asks for every parameter
def _forms(name: str) -> tuple[str, ...]:
    """Return a name and the modules around it, each also with stars in place of numbers."""
    parts = name.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return tuple(form for one in around for form in (one, *starred(one)))


def split_of(group: list[TensorPlace], splits: Mapping[str, Split]) -> Split | None:
    """Return how a tensor is cut; its aliases must agree."""
    asked = {splits[place.name] for place in group if place.name in splits}
    if len(asked) > 1:
        names = ", ".join(place.name for place in group)
        raise ValueError(f"{names} are one tensor and cannot be cut in different ways: {asked}")
    return asked.pop() if asked else None


_ON_HOST = "_autopar_starts_on_host"


def start_on_host(parameter: nn.Parameter) -> None:
    """Mark a parameter on the meta device: its initial values are made in the host's memory."""
    setattr(parameter, _ON_HOST, True)


def starts_on_host(tensor: Tensor) -> bool:
    """Whether the initial values of a tensor are to be made in the host's memory."""
    return getattr(tensor, _ON_HOST, False)


def put(group: list[TensorPlace], tensor: Tensor, chunks: Chunks) -> None:
    """Put a part in all places of the tensor that it replaces, and record its chunks."""
    put_everywhere(group, tensor)
    for place in group:
        place.module.__dict__.setdefault(RECORD, {})[place.attribute] = chunks


def put_everywhere(group: list[TensorPlace], tensor: Tensor) -> None:
    """Put new contents in all places of a tensor.

    A parameter or a meta tensor stays the same object. For any other buffer, the modules get a new
    tensor with the class and the attributes of the old one. Code outside of the modules that has
    the old tensor, such as a global table, keeps the old values.
    """
    old = group[0].tensor
    if isinstance(old, nn.Parameter) or old.is_meta:
        put_into(old, tensor)
        return
    fresh = made_like(tensor, old)
    for place in group:
        setattr(place.module, place.attribute, fresh)
