"""Turns a module that keeps its activations into one that computes them again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.runtime.given_objects import run_alike
from autopar.runtime.own_forward import OUTERMOST, class_with_forward

Mode: TypeAlias = Literal["none", "selective", "full"]
Policy: TypeAlias = Callable[..., CheckpointPolicy]

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)


def recompute(
    module: nn.Module, mode: Mode, *, keep: Collection[str] = MATMULS + ATTENTION
) -> None:
    """Have a module (a layer) keep only its inputs, and under "selective" the results of `keep`.

    `keep` names aten ops, without the overload. Only this instance's forward changes, beneath its
    hooks: fully_shard has gathered the parameters before the forward is run again.
    """
    if mode == "none":
        return
    module.__class__ = class_with_forward(module)
    policy = partial(_policy, frozenset(keep)) if mode == "selective" else None
    contexts = partial(_contexts, module, policy)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Of the class that the instance has by then: batch norms may take a synchronised one.
        return type(module).forward(module, *args, **kwargs)

    @wraps(module.forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run, args, kwargs = run_alike(forward, args, kwargs)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = recomputed
    module.__dict__[OUTERMOST] = True


def recomputes(module: nn.Module) -> bool:
    """Tell whether a module or one inside it computes its activations again in the backward."""
    return any(OUTERMOST in child.__dict__ for child in module.modules())


def _contexts(
    module: nn.Module, policy: Policy | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what surrounds the forward, and what surrounds it when it runs again."""
    if policy is None:
        return nullcontext(), _again(module, nullcontext())
    first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return first, _again(module, again)


@contextmanager
def _again(module: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Leave running statistics as they are: the batch was counted the first time."""
    norms = [child for child in module.modules() if isinstance(child, _NormBase)]
    kept = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        norm._buffers.update({n: b if b is None else b.clone() for n, b in buffers.items()})
    try:
        with inner:
            yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def _policy(keep: frozenset[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say for one op of the forward whether its result is kept."""
    del args, kwargs
    namespace, _, name = op.name().partition("::")
    if namespace == "aten" and name.partition(".")[0] in keep:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
