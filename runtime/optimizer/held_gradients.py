"""Tells which elements of which gradient this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.data_parallel.buckets import Span
from autopar.runtime.data_parallel.wrapping import buckets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGradient:
    """The part of a parameter's gradient that is here, in its own memory."""

    name: str
    parameter: nn.Parameter
    held: Tensor
    span: Span | None = None  # of the flattened gradient; None: what this rank has of the parameter

    @property
    def is_sharded(self) -> bool:
        """Whether the other ranks of mesh.shard hold other elements."""
        if self.span is not None:
            return True
        gradient = self.parameter.grad
        return isinstance(gradient, DTensor) and any(one.is_shard() for one in gradient.placements)


def held_gradients(parts: Iterable[nn.Module]) -> list[HeldGradient]:
    """Find every gradient once, also that of a parameter that two parts share."""
    found: dict[int, HeldGradient] = {}
    for part in parts:
        for one in _held_by(part):
            found.setdefault(id(one.parameter), one)
    return list(found.values())


def gradient_memory(parts: Iterable[nn.Module]) -> list[Tensor]:
    """Return what this process holds of all gradients as few tensors: those of a bucket are one."""
    found, others = [], []
    for part in parts:
        buckets = buckets_of(part)
        if buckets is None or not buckets.buckets:
            others.append(part)
        else:
            found += [tensor for bucket in buckets.buckets for tensor in bucket.memory()]
    return found + [one.held for one in held_gradients(others)]


def made_gradient(part: nn.Module, parameter: nn.Parameter) -> Tensor:
    """Return what is here of a gradient, also where the loss did not reach the parameter.

    Under ZeRO-1 that is a part, and a part of the same elements on other stages only if the
    parameter has a bucket to itself.
    """
    buckets = buckets_of(part)
    for bucket in () if buckets is None else buckets.buckets:
        here = [n for n, other in enumerate(bucket.parameters) if other is parameter]
        if bucket.is_cut and here:
            if len(bucket.parameters) > 1:
                raise RuntimeError(
                    "a parameter that other pipeline stages hold too shares its bucket with others:"
                    " name it in wrap(…, apart=[tie.names for tie in ties])"
                )
            return bucket.made(here[0])
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return local(parameter.grad)


def shares_gradients_out(parts: Iterable[nn.Module]) -> bool:
    """Whether ranks of mesh.shard hold different elements of gradients; all ranks say the same."""
    for part in parts:
        buckets = buckets_of(part)
        if buckets is not None:  # then nothing is a DTensor
            if buckets.averaging.shard.size > 1:
                return True
        elif any(isinstance(parameter, DTensor) for parameter in part.parameters()):
            return True
    return False


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held_by(part: nn.Module) -> Iterator[HeldGradient]:
    buckets = buckets_of(part)
    if buckets is not None and buckets.trainable:  # found once: names take 0.1 ms for 30 parameters
        named = buckets.trainable
    else:
        named = dict(part.named_parameters())
    for name, parameter in named.items():
        if parameter.grad is not None:
            yield HeldGradient(name=name, parameter=parameter, held=local(parameter.grad))
    if buckets is None or buckets.averaging.shard.size == 1:
        return
    names = {id(parameter): name for name, parameter in named.items()}
    for bucket in buckets.buckets:
        for span, held in bucket.held():
            parameter = bucket.parameters[span.place]
            yield HeldGradient(name=names[id(parameter)], parameter=parameter, held=held, span=span)
