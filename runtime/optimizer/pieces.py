"""fp32 or sharded pieces of parameters, which optimizers step in place of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import (
    HALF_DTYPES,
    Bucket,
    Span,
    gradient_dtype,
    own_part,
)
from autopar.runtime.ranks.transport import started_gather

# attributes of an optimizer: its pieces, the functions that copy their values to parameters, and
# the settings of its groups that its own steps change
_PIECES, _SPREADING, _CHANGED = "stepped_pieces", "spreading", "changed_settings"
_OWN = "self."  # before the name of an attribute of an optimizer, which is no key of a group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalPiece:
    """A piece that is the whole local shard of a parameter."""

    parameter: nn.Parameter
    target: nn.Parameter

    @property
    def place(self) -> Tensor:
        """The memory of the parameter's local shard.

        It changes before the first forward: fully_shard moves shards to pad them to one size.
        """
        return local_tensor(self.parameter).detach()

    @property
    def is_far(self) -> bool:
        """False: if fully_shard offloads, target and `place` both lie in the host's memory."""
        return False

    def take_gradient(self) -> None:
        """Point the target's .grad to the gradient; it is copied only if dtypes differ."""
        place = self.place
        if place.dtype == self.target.dtype:
            self.target.data = place
        gradient = self.parameter.grad
        if gradient is None:
            self.target.grad = None
            return
        held = local_tensor(gradient)
        self.target.grad = held if held.dtype == self.target.dtype else held.to(self.target.dtype)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this piece's part of a tensor with the parameter's shape."""
        return local_tensor(whole)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatPiece:
    """The elements of one parameter in this rank's part of a bucket."""

    parameter: nn.Parameter
    target: nn.Parameter
    place: Tensor
    bucket: Bucket
    span: Span

    @property
    def is_far(self) -> bool:
        """Whether the target lies in the host's memory, and `place` on the device."""
        return self.bucket.link is not None

    def take_gradient(self) -> None:
        """Point the target's .grad to this piece's part of the gradient."""
        self.target.grad = self.bucket.reduced_part(self.span.place)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this piece's part of a tensor with the parameter's shape."""
        return whole.reshape(-1)[self.span.start : self.span.stop]


# What an optimizer steps in place of a parameter. `place` is the part of the parameter's memory
# that belongs to the piece; `target`, the optimizer's tensor, is a view of it or a copy.
ParameterPiece: TypeAlias = LocalPiece | FlatPiece


def is_copy(piece: ParameterPiece) -> bool:
    """Whether a piece's target has memory of its own."""
    return piece.is_far or piece.target.dtype != piece.place.dtype


def value_of(piece: ParameterPiece) -> Tensor:
    """Return the values that an optimizer steps: its fp32 copy, or the parameter's own memory."""
    return piece.target.detach() if is_copy(piece) else piece.place


def spread_after_steps(optimizer: Optimizer, spread: Callable[..., None]) -> None:
    """Call a function that copies the pieces' values to parameters after each step."""
    optimizer.register_step_post_hook(spread)
    optimizer.__dict__.setdefault(_SPREADING, []).append(spread)


def spread_values(optimizer: Optimizer) -> None:
    """Copy the pieces' values to all parameters, as after a step."""
    for spread in optimizer.__dict__.get(_SPREADING, ()):
        spread()


def note_pieces(optimizer: Optimizer, pieces: Sequence[ParameterPiece]) -> None:
    """Store an optimizer's pieces."""
    optimizer.__dict__[_PIECES] = tuple(pieces)


def pieces_of(optimizer: Optimizer) -> tuple[ParameterPiece, ...] | None:
    """Return an optimizer's pieces, or None if it steps parameters."""
    pieces: tuple[ParameterPiece, ...] | None = optimizer.__dict__.get(_PIECES)
    return pieces


def watch_settings(optimizer: Optimizer) -> None:
    """Note which numbers an optimizer's own steps change, in its groups or as its attributes.

    These numbers are states, too.
    """
    changed: set[str] = optimizer.__dict__.setdefault(_CHANGED, set())
    before: list[dict[str, Any]] = []

    def begin(*_: Any) -> None:
        before[:] = map(_numbers_of, (*optimizer.param_groups, _attributes_of(optimizer)))

    def end(*_: Any) -> None:
        now = map(_numbers_of, (*optimizer.param_groups, _attributes_of(optimizer)))
        for own, numbers in zip(before, now, strict=False):
            changed.update(key for key, number in numbers.items() if own.get(key) != number)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)


def changes_settings(optimizer: Optimizer) -> bool:
    """Whether an optimizer's own steps have changed numbers in its groups or attributes."""
    return bool(optimizer.__dict__.get(_CHANGED))


def changed_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group, and attributes, that an optimizer's own steps have changed."""
    held = {**group, **_attributes_of(optimizer)}
    return {key: held[key] for key in sorted(optimizer.__dict__[_CHANGED]) if key in held}


def put_setting(optimizer: Optimizer, group: dict[str, Any], key: str, value: Any) -> None:
    """Restore a number that an optimizer's own steps have changed."""
    name = key.removeprefix(_OWN)
    held = group if name == key else optimizer.__dict__
    held[name] = value
    optimizer.__dict__.setdefault(_CHANGED, set()).add(key)


def _attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    return {f"{_OWN}{key}": one for key, one in optimizer.__dict__.items()}


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in group.items() if isinstance(one, (bool, int, float))}


def state_of(piece: ParameterPiece, value: Any) -> Any:
    """Return this piece's part of a state that the optimizer created for the parameter."""
    if isinstance(value, Tensor) and value.shape == piece.parameter.shape and value.dim():
        return piece.slice(value).to(piece.target.dtype, copy=True)
    return value


def local_pieces(
    parameters: Iterable[nn.Parameter], masters: Mapping[int, Tensor]
) -> tuple[LocalPiece, ...]:
    """Return a piece of each parameter; its target is the given fp32 master, or the local shard."""
    pieces = []
    for parameter in parameters:
        place = local_tensor(parameter.detach())
        if place.numel():
            master = masters.get(id(parameter))
            target = target_of(place, place) if master is None else nn.Parameter(master)
            pieces.append(LocalPiece(parameter=parameter, target=target))
    return tuple(pieces)


def target_of(place: Tensor, held: Tensor) -> nn.Parameter:
    """Return a parameter that shares the memory of `place`, or an fp32 copy if `place` is 16-bit.

    The copy has the values of `held`, which may be more exact.
    """
    is_half = place.dtype in HALF_DTYPES
    return nn.Parameter(held.to(torch.float32, copy=True) if is_half else place)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor's local plain tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """The flattened parameters of a bucket, laid out like their gradients, and this rank's part."""

    bucket: Bucket
    buffer: Tensor
    pieces: tuple[FlatPiece, ...]
    values: Tensor | None = None  # of all pieces, in the host's memory; None without offloading

    def give_values(self) -> None:
        """With offloading, copy this rank's values from the host into the buffer.

        They are cast to the buffer's dtype on the host, in the memory of the gradients.
        """
        home = self.bucket.home
        if self.values is None or home is None:
            return
        sent = self.values
        if sent.dtype != self.buffer.dtype:
            room = home.memory.view(self.buffer.dtype)[: sent.numel()]
            sent = room.copy_(sent)
        own_part(self.buffer, self.bucket.shard).copy_(sent, non_blocking=True)


def gather_parameters(shards: Iterable[FlatShard]) -> None:
    """All-gather the new values of every rank's part."""
    cut = [shard for shard in shards if shard.bucket.shard.size > 1]
    works = [started_gather(one.buffer, one.bucket.shard) for one in cut]
    for work in filter(None, works):
        work.wait()


def forget_gradients(shards: Iterable[FlatShard]) -> None:
    """Drop the reduced gradients, so that the next step can reuse their memory."""
    for shard in shards:
        shard.bucket.forget()


def flat_shard(bucket: Bucket, half: torch.dtype | None, device: torch.device) -> FlatShard:
    """Move the parameters of a bucket into one flat buffer, in `half` if that is given.

    The buffer is cut like the gradients. Cuts may go through parameters, so that all ranks have
    equally many optimizer states. The result is unchanged if the optimizer works element by
    element.
    """
    first = bucket.parameters[0]
    buffer = torch.zeros(bucket.elements, dtype=half or first.dtype, device=device)
    spans = {span.place: span for span in bucket.spans}
    low = bucket.shard.rank * bucket.elements // bucket.shard.size
    values = None
    if bucket.link is not None:
        elements = bucket.elements // bucket.shard.size
        values = bucket.link.empty(elements, gradient_dtype(first)).zero_()
    pieces = []
    views = bucket.laid_out(buffer)
    for number, (parameter, view) in enumerate(zip(bucket.parameters, views, strict=True)):
        held = parameter.detach()
        view.copy_(held)
        parameter.data = view
        if number in spans:
            span = spans[number]
            place = span.of(buffer)
            own = held.reshape(-1)[span.start : span.stop]
            if values is None:
                target = target_of(place, own)
            else:
                target = nn.Parameter(span.of(values, low).copy_(own))
            pieces.append(
                FlatPiece(parameter=parameter, target=target, place=place, bucket=bucket, span=span)
            )
    return FlatShard(bucket=bucket, buffer=buffer, pieces=tuple(pieces), values=values)
