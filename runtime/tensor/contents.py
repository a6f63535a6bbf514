"""Gives a tensor the contents of another one, and leaves it what hangs on it and who holds it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
