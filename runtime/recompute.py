"""Turns a module that keeps its activations into one that computes them again in the backward."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial, wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Mode: TypeAlias = Literal["none", "selective", "full"]

MARK = "_autopar_recomputes"
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
    contexts: dict[str, Any] = {}
    if mode == "selective":
        ops = frozenset(keep)
        contexts["context_fn"] = partial(
            create_selective_checkpoint_contexts, partial(_policy, ops)
        )
    forward = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    module.forward = recomputed
    module.__dict__[MARK] = True


def recomputes(module: nn.Module) -> bool:
    """Tell whether a module or one inside it computes its activations again in the backward."""
    return any(MARK in child.__dict__ for child in module.modules())


def _policy(keep: frozenset[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say for one op of the forward whether its result is kept."""
    del args, kwargs
    namespace, _, name = op.name().partition("::")
    if namespace == "aten" and name.partition(".")[0] in keep:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
