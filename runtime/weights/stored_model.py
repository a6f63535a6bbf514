"""Reads a model from files of `save_pretrained`, slice by slice.

Inverts `save_pretrained`: finds the model's tensors in its files. A tensor of a file may be a box
(a range of indices in each dim) of a model's tensor: an expert of a stack, or a part of a fused
weight, under any name. It may also have the elements in another order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.runtime.weights.recording.recorded_ops import RecordedOp, Value
from autopar.runtime.weights.saved_form import SavedForm, SavedTensor
from autopar.runtime.weights.stored_tensors import ShapeError

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A view that takes one range of indices in each dim of a tensor."""

    start: tuple[int, ...]  # the first index in each dim of the tensor
    dims: tuple[int | None, ...]  # for each dim of the view, the tensor's dim; None at size 1

    def overlap(self, ranges: Sequence[Range], size: tuple[int, ...]) -> list[Range]:
        """Return the overlap of ranges of the tensor's dims with this box, of size `size`."""
        sizes = dict(zip(self.dims, size, strict=True))
        return [
            (low := max(first, begin), max(low, min(last, begin + sizes.get(dim, 1))))
            for dim, (begin, (first, last)) in enumerate(zip(self.start, ranges, strict=True))
        ]


def box_of(view: Value, tensor: Value) -> Box | None:
    """Return a view of a tensor's memory as a box of the tensor, or None if it is not a box."""
    start = [0] * len(tensor.size)
    offset = view.offset - tensor.offset
    for dim in sorted(range(len(start)), key=lambda one: -tensor.stride[one]):
        if tensor.size[dim] > 1:
            start[dim], offset = divmod(offset, tensor.stride[dim])
    dims = tuple(
        None if size == 1 else _dim_of(stride, tensor)
        for size, stride in zip(view.size, view.stride, strict=True)
    )
    taken = [dim for dim in dims if dim is not None]
    is_box = offset == 0 and len(set(taken)) == sum(size != 1 for size in view.size)
    sizes = {dim: size for dim, size in zip(dims, view.size, strict=True) if dim is not None}
    fits = all(
        begin >= 0 and begin + sizes.get(dim, 1) <= tensor.size[dim]
        for dim, begin in enumerate(start)
    )
    return Box(start=tuple(start), dims=dims) if is_box and fits else None


def _dim_of(stride: int, tensor: Value) -> int | None:
    found = [d for d, own in enumerate(tensor.stride) if own == stride and tensor.size[d] > 1]
    return found[0] if len(found) == 1 else None


def same_view(view: Value, of: Value, other: Value) -> Value | None:
    """Return the box of `other` with the same indices as `view` in `of`; None if `view` is no box.

    `of` and `other` have the same size.
    """
    box = box_of(view, of)
    if box is None:
        return None
    offset = sum(begin * stride for begin, stride in zip(box.start, other.stride, strict=True))
    strides = tuple(0 if dim is None else other.stride[dim] for dim in box.dims)
    return replace(other, size=view.size, stride=strides, offset=other.offset + offset)


def is_whole(view: Value, tensor: Value) -> bool:
    """Whether a view has all elements of a tensor in order, in any shape."""
    return (
        view.offset == tensor.offset
        and math.prod(view.size) == math.prod(tensor.size)
        and view.stride == _contiguous(view.size)
        and tensor.stride == _contiguous(tensor.size)
    )


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of that size."""
    return tuple(max(math.prod(size[dim + 1 :]), 1) for dim in range(len(size)))


COPIES = {"alias", "clone", "detach", "_to_copy"}
JOINS = {"cat", "stack"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A box of a tensor in a file, and the matching elements of a model's tensor."""

    name: str  # in the file
    shape: tuple[int, ...]
    viewed: tuple[int, ...]  # the shape to which the file's tensor is reshaped after reading
    start: tuple[int, ...]
    view: Value  # of the model's tensor, in the shape of the box

    def box(self, tensor: Value) -> Box | None:
        """Return the piece as a box of the model's tensor, or None if it must be read whole."""
        return box_of(self.view, tensor) if self.viewed == self.shape else None

    def read(self, stored: Any) -> Tensor:
        """Read the whole piece."""
        whole: Tensor = stored[...]
        ends = zip(self.start, self.view.size, strict=True)
        return whole.reshape(self.viewed)[tuple(slice(at, at + size) for at, size in ends)]

    def read_part(self, stored: Any, common: Sequence[Range], box: Box) -> Tensor:
        """Read the part of the piece within `common`, the ranges of the model's tensor.

        The result has that tensor's dims, in its order.
        """
        slices, order = [], []
        for start, dim in zip(self.start, box.dims, strict=True):
            low, high = (0, 1) if dim is None else common[dim]
            begin = start if dim is None else start - box.start[dim]
            slices.append(slice(begin + low, begin + high))
            order += [] if dim is None else [dim]
        part: Tensor = stored[tuple(slices) if slices else ...]
        sizes = [high - low for low, high in common]
        part = part.reshape([sizes[dim] for dim in order])
        places = sorted(range(len(order)), key=order.__getitem__)
        return part.permute(places).reshape(sizes)


def pieces_by_name(form: SavedForm) -> Mapping[str, tuple[SavedPiece, ...]]:
    """Return the pieces of each tensor that the files contain completely."""
    names = {view.storage: name for name, view in form.sources.items()}
    tracer, found = _TensorTracer(form), defaultdict[str, list[SavedPiece]](list)
    for tensor in form.tensors:
        for piece in tracer.pieces(tensor):
            found[names[piece.view.storage]].append(piece)
    sizes = {name: math.prod(view.size) for name, view in form.sources.items()}
    return {name: own for name, one in found.items() if (own := _tiling(one, sizes[name]))}


def _tiling(pieces: Sequence[SavedPiece], size: int) -> tuple[SavedPiece, ...]:
    """Return pieces that make up `size` elements: a single piece, or all together; else ()."""
    whole = next((one for one in pieces if math.prod(one.view.size) == size), None)
    if whole is not None:
        return (whole,)
    return tuple(pieces) if sum(math.prod(one.view.size) for one in pieces) == size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenBox:
    """A box of a tensor in a file, and the model's view that it was computed from."""

    start: tuple[int, ...]
    view: Value


class _TensorTracer:
    """Traces tensors of files back to the tensors of the model."""

    def __init__(self, form: SavedForm) -> None:
        self._sources = {view.storage for view in form.sources.values()}
        self._ops = defaultdict[int, list[RecordedOp]](list)
        for op in form.history.ops:
            for memory in op.writes:
                self._ops[memory].append(op)

    def pieces(self, tensor: SavedTensor) -> Iterator[SavedPiece]:
        """Yield the pieces of a tensor; none unless only copies, joins and reshapes made it."""
        seen = tensor.value
        found = self._taken(seen)
        made = self._made(seen.storage)
        if not found and made is not None and is_whole(seen, made[1]):
            seen = made[1]  # the op's result, which was then reshaped into the tensor
            found = self._taken(seen)
        for one in found:
            yield SavedPiece(
                name=tensor.name,
                shape=tensor.value.size,
                viewed=seen.size,
                start=one.start,
                view=one.view,
            )

    def _taken(self, view: Value) -> list[_TakenBox]:
        if view.storage in self._sources:
            return [_TakenBox(start=(0,) * len(view.size), view=view)]
        made = self._made(view.storage)
        if made is None:
            return []
        op, out = made
        kind, first = op.name, op.arguments[0]
        if kind in COPIES and isinstance(first, Value) and first.size == out.size:
            inner = same_view(view, of=out, other=first)
            return [] if inner is None else self._taken(inner)
        if kind in JOINS and view == out:
            dim = op.arguments[1] if len(op.arguments) > 1 else 0
            parts = [_unsqueezed(one, dim) if kind == "stack" else one for one in first]
            return list(self._joined(parts, dim % len(out.size)))
        return []

    def _joined(self, parts: Sequence[Value], dim: int) -> Iterator[_TakenBox]:
        """Yield the boxes of a tensor that concatenates `parts` along a dim."""
        begin = 0
        for part in parts:
            for one in self._taken(part):
                start = (*one.start[:dim], one.start[dim] + begin, *one.start[dim + 1 :])
                yield replace(one, start=start)
            begin += part.size[dim]

    def _made(self, memory: int) -> tuple[RecordedOp, Value] | None:
        """Return the only op that has written to a memory, and its result; None if several have."""
        ops = self._ops[memory]
        results = [one for op in ops for one in op.makes if one and one.storage == memory]
        return (ops[0], results[0]) if len(ops) == len(results) == 1 else None


def _unsqueezed(view: Value, dim: int) -> Value:
    """Return a view with an additional dim of one element."""
    dim %= len(view.size) + 1
    size = (*view.size[:dim], 1, *view.size[dim:])
    return replace(view, size=size, stride=(*view.stride[:dim], 0, *view.stride[dim:]))


@dataclass(frozen=True, kw_only=True)
class PiecedTensor:
    """A tensor of the model, read from its pieces.

    Only the requested slice of each piece is read. If a piece is no box of the tensor, the whole
    tensor is assembled first.
    """

    tensor: Value
    pieces: tuple[
        tuple[SavedPiece, Any], ...
    ]  # with the file's tensors, from which slices are read

    def get_shape(self) -> list[int]:
        """Return the tensor's shape; raise if a piece in a file has a wrong one."""
        for piece, stored in self.pieces:
            found, wanted = tuple(stored.get_shape()), piece.shape
            if found != wanted:
                raise ShapeError(f"{piece.name} is {wanted} here and {found} in its source")
        return list(self.tensor.size)

    def __getitem__(self, index: Any) -> Tensor:
        boxes = [box for one, _ in self.pieces if (box := one.box(self.tensor)) is not None]
        if len(boxes) < len(self.pieces):
            return self._whole[index]
        given = index if isinstance(index, tuple) else ()
        slices = (*given, *[slice(None)] * (len(self.tensor.size) - len(given)))
        wanted = [one.indices(size)[:2] for one, size in zip(slices, self.tensor.size, strict=True)]
        found: Tensor | None = None
        for (piece, stored), box in zip(self.pieces, boxes, strict=True):
            common = box.overlap(wanted, piece.view.size)
            if any(low >= high for low, high in common):
                continue
            part = piece.read_part(stored, common, box)
            if found is None:
                found = part.new_empty([last - first for first, last in wanted])
            place = zip(common, wanted, strict=True)
            found[tuple(slice(low - at, high - at) for (low, high), (at, _) in place)] = part
        return torch.empty([last - first for first, last in wanted]) if found is None else found

    @cached_property
    def _whole(self) -> Tensor:
        parts = [piece.read(stored) for piece, stored in self.pieces]
        whole = torch.empty_strided(self.tensor.size, self.tensor.stride, dtype=parts[0].dtype)
        for (piece, _), part in zip(self.pieces, parts, strict=True):
            view = piece.view
            whole.as_strided(view.size, view.stride, view.offset).copy_(part)
        return whole


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """Finds a model's tensors in files, by what `save_pretrained` would write for each.

    A name in the files may be both that of a model's tensor and one that `save_pretrained` writes,
    with different contents (transposed, say). A folder is read as `save_pretrained` writes it, a
    single file as having the model's own tensors.
    """

    stored: Mapping[str, Any]  # the open file of each tensor
    saved_form: Callable[[], SavedForm | None]  # None if there is none, or none that is traced
    is_folder: bool

    def source(self, names: Sequence[str]) -> Any:
        """Return a sliceable tensor of the model, or None if the files lack it."""
        own = next((name for name in names if name in self.stored), None)
        saved = next((name for name in names if name in self._pieces), None)
        if saved is not None and self._form is not None and (self.is_folder or own is None):
            pieces = tuple(
                (one, self._slice(self._places[one.name])) for one in self._pieces[saved]
            )
            return PiecedTensor(tensor=self._form.sources[saved], pieces=pieces)
        return None if own is None else self._slice(own)

    def is_expected(self, names: Collection[str]) -> bool:
        """Whether the files should have the tensor with these names.

        Files of an adapter, for example, lack the base model.
        """
        return self._form is None or self._has_all or not self._saved.isdisjoint(names)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the tensors of the files that a model with these names does not use."""
        left = sorted(name for name in self.stored if name not in names)
        used = set(self._places.values()) if left else set()
        return [name for name in left if name not in used]

    def _slice(self, name: str) -> Any:
        return self.stored[name].get_slice(name)

    @cached_property
    def _form(self) -> SavedForm | None:
        return self.saved_form()

    @cached_property
    def _saved(self) -> frozenset[str]:
        """The tensors of the model that `save_pretrained` writes."""
        tensors = self._form.tensors if self._form is not None else ()
        return frozenset(name for one in tensors for name in one.sources)

    @cached_property
    def _has_all(self) -> bool:
        """Whether the files have tensors of the model that `save_pretrained` leaves out."""
        every = self._form.sources if self._form is not None else {}
        return any(name in self.stored for name in every if name not in self._saved)

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """Maps names of `save_pretrained` to names in the files."""
        tensors = self._form.tensors if self._form is not None else ()
        found = ((one.name, self._place(one.name)) for one in tensors)
        return {name: place for name, place in found if place is not None}

    def _place(self, name: str) -> str | None:
        """Return a tensor's name in the files, with or without the base model's prefix."""
        prefix = f"{self._form.prefix}." if self._form is not None and self._form.prefix else ""
        names = (name, f"{prefix}{name}", name.removeprefix(prefix))
        return next((one for one in names if one in self.stored), None)

    @cached_property
    def _pieces(self) -> Mapping[str, tuple[SavedPiece, ...]]:
        """The pieces of the model's tensors that the files contain completely."""
        every = pieces_by_name(self._form) if self._form is not None else {}
        return {
            name: pieces
            for name, pieces in every.items()
            if all(one.name in self._places for one in pieces)
        }
