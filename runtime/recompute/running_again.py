"""Layers that run again: on what they were given, drawing what they drew.

Has a layer that runs again in the backward draw the random numbers of its first forward.

torch.utils.checkpoint keeps the generators of the GPUs that positional tensors lie on, and none
where a layer is called by keywords alone. Here the generators of the CPU and of the GPU are kept,
whatever the layer is given. With selective recomputation an op whose result is kept does not run
again. If it drew numbers (attention with dropout), the second forward sets the generators to where
the op left them in the first one, for what is drawn after it.

Lets a forward that runs again find the objects that it is given as they were the first time.

A cache of keys and values, a dict that layers share: what the first run wrote there, the second
would find. Tensors and modules are not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import lru_cache, partial, reduce, wraps
from io import BytesIO
from types import FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _StopRecomputationError,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.runtime.model.parts import OUTERMOST, class_with_forward
from autopar.runtime.ranks.randomness import States, generator_states, set_generator_states
from autopar.runtime.recompute.written_buffers import WrittenBuffers
from autopar.runtime.tensor.slices import remembered


class DrawnNumbers:
    """The states of the generators before a forward, and after each of its kept ops that draw."""

    def __init__(self) -> None:
        self._before = generator_states()
        self._after_ops: list[States] = []
        self._to_come: Iterator[States] = iter(())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround the second forward; afterwards the generators are as they were before it."""
        now = generator_states()
        set_generator_states(self._before)
        self._to_come = iter(self._after_ops)
        try:
            yield
        finally:
            set_generator_states(now)

    def follow(
        self, first: TorchDispatchMode, again: TorchDispatchMode, is_kept: Callable[[Any], bool]
    ) -> None:
        """Note the states after kept ops of the first forward, and set them in the second."""

        def note(op: Any) -> None:
            if is_kept(op):
                self._after_ops.append(generator_states())

        def skip(op: Any) -> None:
            if is_kept(op):
                set_generator_states(next(self._to_come))

        for mode, after_draw in ((first, note), (again, skip)):
            mode.__class__ = _followed(type(mode))  # type: ignore[arg-type]  # mypy: no Hashable
            mode.__dict__["after_draw"] = after_draw


@lru_cache
def _followed(kind: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """Return the class of modes that call `after_draw` with each op that may draw numbers."""

    class Followed(kind):  # type: ignore[valid-type, misc]
        after_draw: Callable[[Any], None]

        def __torch_dispatch__(
            self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
        ) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                self.after_draw(func)
            return made

    return Followed


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]

_SHARED = (Tensor, nn.Module, FunctionType)
_PLAIN = (
    *_SHARED, type(None), bool, int, float, complex, str, bytes, type, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def run_alike(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """Return a forward that runs on the arguments, then on what these were, and the latter.

    It is handed the latter each time: that is what is kept until the backward.
    """
    copied = _copies((args, kwargs))
    if copied is None:
        return forward, args, kwargs
    given = [(args, kwargs)]

    def run(*_: Any, **__: Any) -> Any:
        own_args, own_kwargs = given.pop() if given else copied()
        return forward(*own_args, **own_kwargs)

    return run, *copied()


def _copies(given: Arguments) -> Callable[[], Arguments] | None:
    """Return what makes arguments as these are now; None where they cannot be written to."""
    args, kwargs = given
    if all(map(_is_plain, (*args, *kwargs.values()))):
        return None
    shared, written = list[Any](), BytesIO()
    try:
        _ObjectWriter(written, shared).dump(given)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None  # of a local class, say: the layer has to do without copies

    def copied() -> Arguments:
        found: Arguments = _ObjectReader(BytesIO(written.getbuffer()), shared).load()
        return found

    return copied


def _is_plain(value: Any) -> bool:
    """Whether nothing can be written to a value, or it is a tensor or a module."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


class _ObjectWriter(pickle.Pickler):
    """Writes the structure of objects, and lists what they share with their copies."""

    def __init__(self, file: BytesIO, shared: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of what is not copied."""
        if not isinstance(obj, _SHARED):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _ObjectReader(pickle.Unpickler):
    """Reads what a writer wrote."""

    def __init__(self, file: BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> Any:
        """Return what was not copied."""
        return self.shared[pid]


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
