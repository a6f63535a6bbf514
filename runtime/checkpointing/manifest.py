"""Writes, reads and validates the manifest of a checkpoint: which tensor lies in which file."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

import torch

from autopar.runtime.checkpointing.owners import overlaps
from autopar.runtime.checkpointing.safetensors_file import WrittenFile
from autopar.runtime.checkpointing.states import BASIS, ERRORS, STATE, WEIGHT, Scalar
from autopar.runtime.ranks.locations import MANIFEST, MARK, Location, text_of
from autopar.runtime.ranks.metrics import (
    NOT_FINITE,
    Check,
    Count,
    Named,
    NotARecordError,
    parsed,
    record,
)
from autopar.runtime.tensor.shards import shape_of
from autopar.runtime.tensor.slices import Ranges
from autopar.runtime.texts import in_a_line
from autopar.runtime.weights.stored_tensors import DTYPES, KINDS

NAME = MANIFEST
FORMAT = 1
MOST_STEPS = 10**9
_MOST_BYTES = 2**28

Steps: TypeAlias = Annotated[
    int, Check(f"0 to {MOST_STEPS:,}", lambda steps: 0 <= steps <= MOST_STEPS)
]
Positive: TypeAlias = Annotated[float, Check("above 0", lambda number: number > 0)]
DType: TypeAlias = Annotated[torch.dtype, Named("a type of elements", DTYPES)]
Word: TypeAlias = Annotated[
    str, Check("a line of at most 200 characters", lambda t: len(t) <= 200 and t.isprintable())
]
Range: TypeAlias = tuple[Count, Count]


class BrokenError(Exception):
    """A checkpoint is broken; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """A shard of a logical tensor (explained in owners.py) in a file."""

    file: str
    entry: str
    ranges: tuple[tuple[Range, ...], ...]  # per dim, [start, stop) in the logical tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return shape_of(self.ranges)

    @property
    def elements(self) -> int:
        """How many elements the shard has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """A logical tensor, and the files of its shards."""

    dtype: DType
    shape: tuple[Count, ...]
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The position of a training."""

    step: Steps
    rows: Count  # the position in the dataset's rows, which counts dropped rows, too (`Epochs`)
    updates: Steps  # steps that the optimizer took; with fp16 some are skipped
    loss_scale: Positive | None = None
    calm_steps: Steps = 0
    evaluation: float | None = None  # the evaluation loss after this step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOrigin:
    """The code and the plan that wrote a checkpoint."""

    torch: Word
    model: Word  # the digest of its model file
    plan: Word  # a digest of the degrees, and of which rank writes which shard
    degrees: Word = ""  # the plan's degrees as text: dp 2 · tp 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeight:
    """A weight of the exported model."""

    dtype: DType  # as the constructor made it
    aliases: tuple[str, ...] = ()  # other names of a tied weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is known of a checkpoint except the values of its tensors.

    The fields are written as JSON in this order.
    """

    moment: Moment
    origin: CheckpointOrigin
    files: Mapping[str, WrittenFile]
    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, Logical]
    exported: Mapping[str, ExportedWeight] = field(default_factory=dict)  # by the weight's name


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def to_text(manifest: Manifest) -> str:
    """Return a manifest as JSON, with a digest that reveals changes."""
    exported = {key: one for key, one in manifest.exported.items() if one.dtype in KINDS}
    content = {**MARK, "format": FORMAT, **_as_data(replace(manifest, exported=exported))}
    digest = {"sha256": _digest(content)}
    return json.dumps({**content, **digest}, indent=1, default=_as_data) + "\n"


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint; may raise BrokenError."""
    with _raised_as_broken():
        content = _content(folder)
        if content.pop("sha256") != _digest(content):
            raise BrokenError(f"{NAME} has been changed")
        if content.get("format") != FORMAT:
            told = str(content.get("format"))[:20]
            raise BrokenError(f"{NAME} is of format {told}, and this reads {FORMAT}")
        own = {key: value for key, value in content.items() if key not in ("format", *MARK)}
        return record(Manifest, own)


def read_moment(folder: Location) -> Moment:
    """Read only the position from a manifest; checking the rest takes seconds for large models."""
    with _raised_as_broken():
        return record(Moment, _content(folder).get("moment"), where="moment")


def _content(folder: Location) -> dict[str, Any]:
    content = parsed(text_of(folder / NAME, most_bytes=_MOST_BYTES))
    if not isinstance(content, dict) or "sha256" not in content:
        raise BrokenError(f"{NAME} is no description of a checkpoint")
    return content


@contextmanager
def _raised_as_broken() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BrokenError(f"it has no {NAME}") from None
    except OSError as error:
        raise BrokenError(f"{NAME} cannot be read: {error.strerror}") from None
    except NotARecordError as error:
        raise BrokenError(f"{NAME} has a wrong value: {error}") from None
    except (ValueError, RecursionError):
        raise BrokenError(f"{NAME} is no description of a checkpoint") from None


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_as_data)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_data(one: Any) -> Any:
    """Return a dtype or a dataclass as JSON has it."""
    if isinstance(one, torch.dtype):
        return KINDS[one]
    return {field.name: getattr(one, field.name) for field in fields(one)}


_MOST_PAIRS = 10_000_000  # pairs of shards that are compared; more would take minutes
_LARGEST = 2**63  # integers of a tensor are smaller


def manifest_faults(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in a manifest, with their places."""
    names = [rank_file(rank) for rank in range(len(manifest.files))]
    if not names or sorted(manifest.files) != names:
        yield "files: their names are not those of ranks 0, 1, 2 …"
    if manifest.moment.updates > manifest.moment.step:
        yield "moment.updates: more updates than steps"
    yield from _tensor_faults(manifest)
    for key, scalar in manifest.scalars.items():
        if not key.startswith(STATE) or not _is_valid(scalar):
            yield f"scalars.{in_a_line(key)}: it is no number that an optimizer keeps"
    for name, one in manifest.exported.items():
        held = manifest.tensors.get(WEIGHT + name)
        if held is None or held.dtype.is_floating_point != one.dtype.is_floating_point:
            yield f"exported.{in_a_line(name)}: no weight of this name and kind is stored"


def _is_valid(scalar: Scalar) -> bool:
    """Whether a scalar's number is not too large, and its dtype exists in torch."""
    value = scalar.value
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return False
    kind = torch.float64 if scalar.dtype is None else getattr(torch, scalar.dtype, None)
    if isinstance(value, str):
        is_float = isinstance(kind, torch.dtype) and kind.is_floating_point
        return is_float and value in NOT_FINITE
    return scalar.dtype is None or (isinstance(kind, torch.dtype) and value is not None)


def _tensor_faults(manifest: Manifest) -> Iterator[str]:
    sizes: defaultdict[str, int] = defaultdict(int)
    pairs = _Pairs()
    for key, one in manifest.tensors.items():
        where = f"tensors.{in_a_line(key)}"
        if not key.startswith((WEIGHT, STATE, ERRORS, BASIS)):
            yield f"{where}: neither a weight nor a state"
        fault = _shard_fault(one, manifest) or _cover_fault(one, pairs)
        if fault:
            yield f"{where}: {fault}"
            return  # with a wrong shape, sizes are unknown
        for shard in one.shards:
            sizes[shard.file] += shard.elements * one.dtype.itemsize
    for name, size in sizes.items():
        if size > manifest.files[name].size_bytes:
            yield f"tensors: the shards in {name} have more bytes than that file"


def _shard_fault(one: Logical, manifest: Manifest) -> str:
    """Return the fault of one shard, or an empty string."""
    for shard in one.shards:
        if shard.file not in manifest.files:
            return f"a shard is in {in_a_line(shard.file)[:60]!r}, which is none of the files"
        ranges = shard.ranges
        if len(ranges) != len(one.shape):
            return f"a shard has {len(ranges)} dims, and the tensor {len(one.shape)}"
        for held, size in zip(ranges, one.shape, strict=True):
            if not _are_ranges(held, size):
                return f"a shard has ranges that do not fit a dim of {size}"
    return ""


def _are_ranges(held: Ranges, size: int) -> bool:
    """Whether ranges lie within a dim and do not overlap."""
    ends = sorted(held)
    meet = any(first[1] > second[0] for first, second in pairwise(ends))
    return not meet and all(low <= high <= size for low, high in held)


class _Pairs:
    """How many pairs of shards may still be compared, over all tensors."""

    def __init__(self) -> None:
        self.left = _MOST_PAIRS


def _cover_fault(one: Logical, pairs: _Pairs) -> str:
    """Return a fault if the shards of a tensor overlap or leave a gap, or an empty string."""
    held = sum(shard.elements for shard in one.shards)
    needed = math.prod(one.shape)
    if held != needed:
        return f"its shards hold {held:,} of {needed:,} elements"
    if needed and len(one.shards) > 1 and _overlap(one.shards, len(one.shape), pairs):
        return "some of its elements are in two shards"
    return "" if pairs.left > 0 else "it has more shards than can be compared"


def _overlap(shards: Sequence[StoredShard], dims: int, pairs: _Pairs) -> bool:
    """Whether two shards overlap, found by a sweep along the dim that is cut into most pieces.

    Once `pairs` is used up, the answer is False.
    """
    cuts = [{ends for shard in shards for ends in shard.ranges[dim]} for dim in range(dims)]
    along = max(range(dims), key=lambda dim: len(cuts[dim]), default=0)
    every = sorted(
        (low, high, number)
        for number, shard in enumerate(shards)
        for low, high in shard.ranges[along]
        if low < high
    )
    open_now: list[tuple[int, int]] = []  # the end of each open shard, and its index
    for low, high, number in every:
        open_now = [one for one in open_now if one[0] > low]
        pairs.left -= len(open_now)
        if pairs.left <= 0:
            return False
        for _, other in open_now:
            shared = overlaps(shards[number].ranges, shards[other].ranges)
            if other != number and any(True for _ in shared):
                return True
        open_now.append((high, number))
    return False
