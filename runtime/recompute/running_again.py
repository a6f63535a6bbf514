"""Turns a module that keeps its activations into one that computes them again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce, wraps
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _StopRecomputationError,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.runtime.model.own_forward import OUTERMOST, class_with_forward
from autopar.runtime.recompute.drawing_again import DrawnNumbers
from autopar.runtime.recompute.given_objects import run_alike
from autopar.runtime.recompute.written_buffers import WrittenBuffers
from autopar.runtime.tensor.lengths import remembered

Mode: TypeAlias = Literal["none", "selective", "full"]
IsKept: TypeAlias = Callable[[Any], bool]

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
    is_kept = partial(_is_kept, frozenset(keep)) if mode == "selective" else None
    contexts = partial(_contexts, WrittenBuffers(module), is_kept)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Of the class that the instance has by then: batch norms may take a synchronised one.
        return type(module).forward(module, *args, **kwargs)

    @wraps(module.forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run, args, kwargs = run_alike(forward, args, kwargs)
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # `contexts` do that, for keywords and kept ops too
            context_fn=contexts,
            **kwargs,
        )

    module.forward = recomputed
    module.__dict__[OUTERMOST] = True


def recomputes(module: nn.Module) -> bool:
    """Tell whether a module or one inside it computes its activations again in the backward."""
    return any(OUTERMOST in child.__dict__ for child in module.modules())


def _contexts(
    buffers: WrittenBuffers, is_kept: IsKept | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what surrounds the forward, and what surrounds it when it runs again."""
    numbers = DrawnNumbers()
    first, again = buffers.contexts()
    again = reduce(_both, (_Stopping(), numbers.again(), remembered()(), again))
    if is_kept is None:
        return first, again
    keeping, kept = create_selective_checkpoint_contexts(partial(_policy, is_kept))  # type: ignore[no-untyped-call]
    numbers.follow(keeping, kept, is_kept)
    return _both(first, keeping), _both(again, kept)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Stopping:
    """Stops a forward that runs again where torch stops it, though the forward catches that.

    As soon as all that the backward needs is there, torch leaves the forward by an exception, and
    so saves its last matmul; code that catches every exception raises another instead. A class,
    because a generator's frames would keep the error alive, and with it what the forward made.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _is_stop(error):
            raise _StopRecomputationError from None


def _is_stop(error: BaseException | None) -> bool:
    """Whether an error is torch's stop, or was raised while that was handled."""
    while error is not None and not isinstance(error, _StopRecomputationError):
        error = error.__context__
    return error is not None


def _policy(is_kept: IsKept, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say for one op of the forward whether its result is kept."""
    del args, kwargs
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(keep: Collection[str], op: Any) -> bool:
    namespace, _, name = op.name().partition("::")
    return namespace == "aten" and name.partition(".")[0] in keep
