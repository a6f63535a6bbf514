"""Collects all states of a training: weights, optimizer states, random states."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.checkpointing.owners import (
    LocalPart,
    NamedTensor,
    local_weights,
    named_tensors,
    parts_of,
    parts_of_span,
    stepped_tensors,
)
from autopar.runtime.data_parallel.buckets import MEAN, Bucket, gradient_dtype
from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.optimizer.outer import outer_of
from autopar.runtime.optimizer.pieces import (
    ParameterPiece,
    changed_settings,
    changes_settings,
)
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.metrics import as_json
from autopar.runtime.tensor.shards import Chunks, whole

RANDOM = "random/"


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    others = [random.getstate()]
    if numpy:
        kind, words, *rest = numpy.random.get_state()
        others.append((kind, words.tolist(), *rest))
    text = json.dumps(others).encode()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return {RANDOM + name: state for name, state in found.items()}


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states of the generators."""
    torch.set_rng_state(states[RANDOM + "torch"])
    if device.type == "cuda" and RANDOM + "cuda" in states:
        torch.cuda.set_rng_state(states[RANDOM + "cuda"], device)
    python, *others = json.loads(bytes(states[RANDOM + "python"].tolist()))
    version, words, gauss = python
    random.setstate((version, tuple(words), gauss))
    if others and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(others[0]))


WEIGHT, STATE = "weight/", "state/"
BASIS = "basis/"  # of PowerSGD
ERRORS = "lost/"  # of compressed gradients: lost/RANK/PARAMETER, or lost/mean/PARAMETER
_PLAIN = (bool, int, float, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A number that an optimizer keeps for a parameter, plain or as a tensor."""

    value: float | int | bool | str | None  # a string for inf, -inf and nan
    dtype: str | None = None
    on_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedTensor:
    """A tensor that an optimizer steps: a parameter, or a piece of one."""

    name: str  # of the parameter in the whole model
    parameter: nn.Parameter  # the tensor in the optimizer's groups
    chunks: Chunks  # of the whole parameter, on this rank
    piece: ParameterPiece | None

    def parts(self, key: str, value: Tensor) -> Iterator[LocalPart]:
        """Yield a tensor of the shape of `parameter` as parts of a logical tensor."""
        if self.piece is None:
            yield LocalPart(key=key, chunks=self.chunks, tensor=value)
        else:
            yield from parts_of(self.piece, key, self.chunks, value)

    @property
    def is_whole(self) -> bool:
        """Whether this rank's optimizer steps the whole parameter."""
        shape = self.chunks.global_shape
        return self.chunks == whole(shape) and tuple(self.parameter.shape) == shape


def targets(parts: Iterable[nn.Module], optimizer: Optimizer) -> Iterator[SteppedTensor]:
    """Yield everything that an optimizer steps on this rank."""
    for one, pieces in stepped_tensors(parts, optimizer):
        tensor, name = one.place.tensor, one.names[0]
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            continue
        if pieces is None:
            yield SteppedTensor(name=name, parameter=tensor, chunks=one.chunks, piece=None)
        for piece in pieces or ():
            yield SteppedTensor(name=name, parameter=piece.target, chunks=one.chunks, piece=piece)


def local_parts(parts: Sequence[nn.Module], optimizer: Optimizer) -> list[LocalPart]:
    """Return the parts on this rank of all logical tensors of a training."""
    weights = [replace(one, key=WEIGHT + one.key) for one in local_weights(parts, optimizer)]
    states = [one for target in targets(parts, optimizer) for one in _states_of(target, optimizer)]
    return weights + states + list(errors_held(parts))


def _states_of(target: SteppedTensor, optimizer: Optimizer) -> Iterator[LocalPart]:
    for key, value in _state(target, optimizer).items():
        name = f"{STATE}{key}/{target.name}"
        if is_scalar(value, target):
            continue
        if isinstance(value, Tensor) and value.shape == target.parameter.shape:
            yield from target.parts(name, value)
        elif isinstance(value, Tensor) and target.is_whole:
            chunks = whole(tuple(value.shape))
            yield LocalPart(key=name, chunks=chunks, tensor=value, is_buffer=True)
        else:
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            refuse(
                f"{type(optimizer).__name__} keeps {found or type(value).__name__} as {key!r} of "
                f"{target.name}, which no checkpoint can store",
                fix="train without --checkpoint, or with an optimizer whose states are shaped like "
                "the parameters",
            )


def errors_held(parts: Sequence[nn.Module]) -> Iterator[LocalPart]:
    """Yield this rank's errors of compressed gradients, and the bases of PowerSGD."""
    names = {id(one.place.tensor): one for one in named_tensors(parts)}
    for bucket in (one for part in parts for one in _buckets(part)):
        for whose, flat, first in bucket.errors():
            for span in bucket.spans_within(first, first + flat.numel()):
                of = names[id(bucket.parameters[span.place])]
                key = f"{ERRORS}{whose}/{of.names[0]}"
                yield from parts_of_span(span, key, of.chunks, span.of(flat, first))
        for parameter, basis in zip(bucket.parameters, bucket.feedback.bases, strict=False):
            of = names[id(parameter)]
            yield LocalPart(key=_basis_key(of), chunks=whole(tuple(basis.shape)), tensor=basis)


def _basis_key(of: NamedTensor) -> str:
    """Return the key of PowerSGD's Q for a rank's shard of a parameter."""
    shard = "" if of.chunks == whole(of.chunks.global_shape) else f" {of.chunks.ranges}"
    return f"{BASIS}{of.names[0]}{shard}"


class TensorReader(Protocol):
    """Reads the logical tensors of a checkpoint."""

    @property
    def keys(self) -> Collection[str]:
        """The keys of all logical tensors."""

    def fill(self, key: str, held: Chunks, tensor: Tensor) -> None:
        """Fill a tensor that holds these chunks of a logical tensor."""


def restore_errors(reader: TensorReader, parts: Sequence[nn.Module]) -> str | None:
    """Restore the errors of compressed gradients; return a note if they are not as they were.

    Under another number of ranks, each begins with an even share of the sum over all ranks, so that
    nothing is dropped.
    """
    stored = {
        one.removeprefix(ERRORS).partition("/")[0] for one in reader.keys if one.startswith(ERRORS)
    }
    before = len(stored - {MEAN})
    for bucket in (one for part in parts for one in _buckets(part)):
        _restore_bases(reader, bucket, parts)
    ranks = max((one.allocate_errors() for part in parts for one in _buckets(part)), default=0)
    if not (before and ranks):
        return "the errors of compressed gradients are dropped" if before else None
    held = [one for one in errors_held(parts) if one.key.startswith(ERRORS)]
    has_mean = any(one.key.startswith(f"{ERRORS}{MEAN}/") for one in held)
    is_same = before == ranks and has_mean == (MEAN in stored)
    for part in held:
        whose, _, name = part.key.removeprefix(ERRORS).partition("/")
        sources = {whose} if is_same or whose == MEAN else (stored - {MEAN} if has_mean else stored)
        share = 1.0 if is_same or whose == MEAN else 1 / ranks
        for key in sorted(f"{ERRORS}{one}/{name}" for one in sources):
            if key in reader.keys:
                value = torch.empty_like(part.tensor)
                reader.fill(key, part.chunks, value)
                part.tensor.add_(value, alpha=share)
    if is_same:
        return None
    return f"the errors of compressed gradients on {before} ranks are shared out among {ranks}"


def _restore_bases(reader: TensorReader, bucket: Bucket, parts: Sequence[nn.Module]) -> None:
    """Restore a bucket's PowerSGD bases; a matrix that is split differently gets a new one."""
    if bucket.compressor is None:
        return
    names = {id(one.place.tensor): one for one in named_tensors(parts)}
    bucket.feedback.bases = bucket.compressor.first_bases(
        bucket.parameters, gradient_dtype(bucket.parameters[0])
    )
    for parameter, basis in zip(bucket.parameters, bucket.feedback.bases, strict=False):
        key = _basis_key(names[id(parameter)])
        if key in reader.keys:
            reader.fill(key, whole(tuple(basis.shape)), basis)


def _buckets(part: nn.Module) -> Sequence[Bucket]:
    """Return the buckets of a module, if it compresses gradients."""
    buckets = buckets_of(part)
    if buckets is None or buckets.compressor is None:
        return ()
    buckets.attach()
    return buckets.buckets


def scalars(parts: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, Scalar]:
    """Return the scalar states that an optimizer keeps for this rank's parameters."""
    found = {
        f"{STATE}{key}/{target.name}": value
        for target in targets(parts, optimizer)
        for key, value in {**_state(target, optimizer), **_of_group(target, optimizer)}.items()
        if is_scalar(value, target)
    }
    read = numbers_of([value for value in found.values() if isinstance(value, Tensor)])
    return {key: _scalar(value, read) for key, value in found.items()}


def is_scalar(value: Any, target: SteppedTensor) -> bool:
    """Whether a state is a plain number, or a 0-dim tensor beside a parameter with dims."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.shape != target.parameter.shape
    return isinstance(value, _PLAIN)


def numbers_of(tensors: Sequence[Tensor]) -> dict[int, float | int | bool]:
    """Return the numbers in one-element tensors, by their ids; the host waits once per dtype."""
    alike: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for one in tensors:
        alike[one.dtype, one.device].append(one)
    return {
        id(one): number
        for same in alike.values()
        for one, number in zip(same, torch.stack(same).tolist(), strict=True)
    }


def _scalar(value: Any, read: Mapping[int, float | int | bool]) -> Scalar:
    if not isinstance(value, Tensor):
        return Scalar(value=as_json(value))
    dtype, number = str(value.dtype).removeprefix("torch."), as_json(read[id(value)])
    return Scalar(value=number, dtype=dtype, on_device=value.device.type != "cpu")


REPLICA = "@"  # before a replica's number, at the end of a key


def _state(target: SteppedTensor, optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the states of a tensor by key.

    With local steps, each replica has states of its own, and all share the outer optimizer's.
    """
    state: Mapping[str, Any] = optimizer.state.get(target.parameter, {})
    if (outer := outer_of(optimizer)) is None:
        return state
    mark = f"{REPLICA}{outer.replica.rank}"
    own = {key if is_scalar(v, target) else f"{key}{mark}": v for key, v in state.items()}
    return {**own, **outer.state_of(target.parameter)}


GROUP = "group:"  # before the key of a number in the group of a parameter, or of an attribute


def _of_group(target: SteppedTensor, optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the numbers that the optimizer's own steps change, in a parameter's group or on it."""
    if not changes_settings(optimizer):
        return {}
    found = changed_settings(optimizer, group_of(target, optimizer))
    return {f"{GROUP}{key}": number for key, number in found.items()}


def group_of(target: SteppedTensor, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's group that has a parameter."""
    groups = optimizer.param_groups
    return next(g for g in groups if any(one is target.parameter for one in g["params"]))


def made_scalar(scalar: Scalar, target: SteppedTensor, optimizer: Optimizer) -> Any:
    """Return a number as the optimizer stores it; fused kernels read it on the device."""
    value = float(scalar.value) if isinstance(scalar.value, str) else scalar.value
    if scalar.dtype is None:
        return value
    group = group_of(target, optimizer)
    there = scalar.on_device or group.get("fused") or group.get("capturable")
    device = target.parameter.device if there else torch.device("cpu")
    return torch.tensor(value, dtype=getattr(torch, scalar.dtype), device=device)
