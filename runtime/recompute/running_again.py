"""Recomputes layers in the backward, with the inputs and random numbers of the first forward.

torch.utils.checkpoint saves a GPU's generator only if a positional argument is a tensor on this
GPU, so not if a layer is called with keywords only. Here the CPU's and the GPU's generators are
always saved. With selective recomputation, an op whose result is saved is not run again. If the op
draws random numbers (attention with dropout), the second forward sets the generators to their
states after the op.

A layer may change its arguments: a cache of keys and values, a dict that layers share. The second
forward gets them as they were before the first. Tensors and modules are not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

__all__ = ["recompute"]  # for scripts


class DrawnNumbers:
    """The generator states before a forward, and after each saved op that draws random numbers."""

    def __init__(self) -> None:
        self._before = generator_states()
        self._after_ops: list[States] = []
        self._to_come: Iterator[States] = iter(())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the code inside with the generator states of the first forward, then restore them."""
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
        """Record the states after saved ops of the first forward, and set them in the second."""

        def note(op: Any) -> None:
            if is_kept(op):
                self._after_ops.append(generator_states())

        def skip(op: Any) -> None:
            if is_kept(op):
                set_generator_states(next(self._to_come))

        for mode, after_draw in ((first, note), (again, skip)):
            # mypy does not take a class for the Hashable that lru_cache wants
            mode.__class__ = _followed(type(mode))  # type: ignore[arg-type]
            mode.__dict__["after_draw"] = after_draw


@lru_cache
def _followed(kind: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """Return a subclass of a mode that calls `after_draw` with each op that may draw numbers."""

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


Forward = Callable[..., Any]

_SHARED = (Tensor, nn.Module, FunctionType)
_PLAIN = (
    *_SHARED, type(None), bool, int, float, complex, str, bytes, type, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def run_alike(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, Sequence[Any]]:
    """Return a function for checkpoint() and its arguments, so that both runs get equal ones.

    checkpoint() keeps the arguments until the backward, and passes them in both runs. They are all
    positional, because only such tensors can be kept in the host's memory. If the forward may
    change some of its arguments, checkpoint() gets only the tensors and modules in them. The
    function gives the forward the original arguments in the first run, and a copy with these
    tensors and modules in the second.
    """
    places, names = len(args), tuple(kwargs)

    def run(*own: Any) -> Any:
        return forward(*own[:places], **dict(zip(names, own[places:], strict=True)))

    plain = run, (*args, *kwargs.values())
    if all(map(_is_plain, plain[1])):
        return plain
    shared, written = list[Any](), BytesIO()
    try:
        _ObjectWriter(written, shared).dump((args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError):
        return plain  # pickle cannot copy an object of a local class, for example
    given = [(args, kwargs)]

    def run_copied(*own: Any) -> Any:
        own_args, own_kwargs = (
            given.pop() if given else _ObjectReader(BytesIO(written.getbuffer()), own).load()
        )
        return forward(*own_args, **own_kwargs)

    return run_copied, shared


def _is_plain(value: Any) -> bool:
    """Whether a value is immutable, a tensor or a module, and need not be copied."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


class _ObjectWriter(pickle.Pickler):
    """Pickles the structure of objects, and lists the parts that copies share."""

    def __init__(self, file: BytesIO, shared: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of an object that is not copied."""
        if not isinstance(obj, _SHARED):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _ObjectReader(pickle.Unpickler):
    """Unpickles objects that an _ObjectWriter has pickled."""

    def __init__(self, file: BytesIO, shared: Sequence[Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> Any:
        """Return an object that is not copied."""
        return self.shared[pid]


Mode: TypeAlias = Literal["none", "selective", "full"]
IsSaved: TypeAlias = Callable[[str], bool]  # of an aten op's name, without the overload

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)
# The ops whose results each mode saves, so that they do not run again; None: the mode saves none.
SAVED: Mapping[Mode, IsSaved | None] = {
    "selective": frozenset(MATMULS + ATTENTION).__contains__,
    "full": None,
}


def recompute(module: nn.Module, mode: Mode, *, keep: Collection[str] | None = None) -> None:
    """Recompute a module (a layer) in the backward.

    `keep` names the aten ops, without the overload, whose results are saved in place of those that
    the mode saves. Only this instance's `forward` is replaced, so its hooks run outside the
    recomputation: fully_shard's hook before the backward gathers the parameters before the forward
    runs again.
    """
    if mode == "none":
        return
    is_saved = SAVED[mode] if keep is None else frozenset(keep).__contains__
    is_kept = None if is_saved is None else partial(_is_kept, is_saved)
    contexts = partial(_contexts, WrittenBuffers(module), is_kept)

    def around(forward: Forward) -> Forward:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            run, own = run_alike(forward, args, kwargs)
            return checkpoint(
                run,
                *own,
                use_reentrant=False,
                # `contexts` restores generators: torch misses a GPU whose tensors are all keyword
                # arguments, and numbers drawn by saved ops
                preserve_rng_state=False,
                context_fn=contexts,
            )

        return recomputed

    wrap_forward(module, around)


def wrap_forward(module: nn.Module, around: Callable[[Forward], Forward]) -> None:
    """Put a function around this instance's forward, and around functions already put there."""
    inner = module.__dict__.get("forward") if OUTERMOST in module.__dict__ else None
    module.__class__ = class_with_forward(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # looked up at each call, because batch norms may get a synchronised class later
        return type(module).forward(module, *args, **kwargs)

    module.forward = wraps(module.forward)(around(inner or forward))
    module.__dict__[OUTERMOST] = True


def recomputes(module: nn.Module) -> bool:
    """Whether a module, or one inside it, is recomputed, or saves tensors on the host."""
    return any(OUTERMOST in child.__dict__ for child in module.modules())


def _contexts(
    buffers: WrittenBuffers, is_kept: Callable[[Any], bool] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the context managers of the first forward and of the second."""
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
    """Ends a recomputed forward where torch stops it, even if it catches torch's exception.

    As soon as everything that the backward needs is computed, torch leaves the forward with an
    exception, so that the last matmul does not run. If the layer's code catches every exception and
    raises another, torch's exception is raised in its place. This is a class, because a generator's
    frames would keep the exception and its tensors alive.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if _is_stop(error):
            raise _StopRecomputationError from None


def _is_stop(error: BaseException | None) -> bool:
    """Whether an error is torch's stop, or was raised while handling it."""
    while error is not None and not isinstance(error, _StopRecomputationError):
        error = error.__context__
    return error is not None


def _policy(
    is_kept: Callable[[Any], bool], _: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return whether the result of an op is saved."""
    del args, kwargs
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(is_saved: IsSaved, op: Any) -> bool:
    namespace, _, name = op.name().partition("::")
    return namespace == "aten" and is_saved(name.partition(".")[0])
