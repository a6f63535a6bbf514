"""Logits that a cross entropy makes in chunks of rows, so that they never exist all at once.

`chunk_logits(linear, chunks)` makes an `nn.Linear` return `ChunkedLogits`: a tensor with the shape
of the logits and without memory. Views, slices of rows, casts and products with a number give
`ChunkedLogits` again. A cross entropy whose result is one number computes the logits, the loss and
the gradients chunk by chunk, and keeps the gradients until the backward: nothing is computed twice.
Any other op gets the logits as an ordinary tensor, and gradients flow through it as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

__all__ = ["chunk_logits"]  # for scripts

Change = Callable[[Tensor], Tensor]
RowLosses = Callable[[Tensor, Tensor], Tensor]  # of a chunk's logits and targets

# Names of functions that treat each row by itself: they move rows (_OF_ROWS), leave the logits as
# they are (_SAME), or change their values (_OF_NUMBERS).
_OF_ROWS = frozenset({"view", "reshape", "flatten", "unsqueeze", "squeeze", "__getitem__"})
_SAME = frozenset({"contiguous"})
_OF_NUMBERS = frozenset(
    {"float", "double", "half", "bfloat16", "to", "type", "mul", "multiply", "div", "divide"}
    | {"true_divide", "tanh", "__mul__", "__rmul__", "__truediv__"}
)
_ABOUT = frozenset(  # functions that read properties of a tensor, not its values
    {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex"}
    | {"register_hook", "__hash__", "__len__", "element_size"}
)
_TENSORS = frozenset({"T", "H", "mT", "mH", "real", "imag", "data"})  # attributes that are tensors


def chunk_logits(module: nn.Module, chunks: int) -> None:
    """Let the loss make the results of a linear layer in chunks of rows.

    The module must compute like an nn.Linear, from a `weight` and perhaps a `bias`. Call this
    before `wrap`.
    """

    def forward(x: Tensor) -> Tensor:
        bias = getattr(module, "bias", None)
        made: Tensor = _Linear.apply(x, module.weight, bias, chunks)  # type: ignore[no-untyped-call]
        return made

    module.forward = forward
    module.__dict__[_CHUNKS] = chunks


def chunks_logits(module: nn.Module) -> bool:
    """Whether the loss makes the results of a module, or of one inside it, in chunks."""
    return any(_CHUNKS in child.__dict__ for child in module.modules())


_CHUNKS = "_autopar_logits_in_chunks"


Gradients = tuple[Tensor | None, ...]  # of a linear layer's input, weight and bias


class _Source:
    """The input, weight and bias from which logits are made.

    `ready` are gradients that the backward of a loss leaves for the linear layer's backward.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int) -> None:
        self.x, self.weight, self.bias, self.chunks = x.detach(), weight.detach(), bias, chunks
        self.wanted: tuple[bool, ...] = (False, False, False)
        self.ready: list[Gradients] = []

    def whole(self) -> Tensor:
        """Return all logits."""
        return linear(self.x, self.weight, self.bias)

    def no_gradients(self) -> Gradients:
        """Return zeros for the gradients that are wanted."""
        pairs = zip((self.x, self.weight, self.bias), self.wanted, strict=True)
        return tuple(torch.zeros_like(o) if w and o is not None else None for o, w in pairs)

    def add(self, sums: Gradients, rows: Tensor | slice, hidden: Tensor, gradient: Tensor) -> None:
        """Add the gradients of a chunk to the sums, from the gradient of its logits."""
        of_x, of_weight, of_bias = sums
        if of_x is not None:
            of_x.flatten(0, -2)[rows] = gradient @ self.weight
        if of_weight is not None:
            of_weight.addmm_(gradient.t(), hidden)
        if of_bias is not None:
            of_bias += gradient.sum(0)


class _Linear(torch.autograd.Function):
    """A linear layer whose result has no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, chunks: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        source = _Source(x, weight, bias, chunks)
        source.wanted, ctx.ready = ctx.needs_input_grad[:3], source.ready
        rows = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:-1])
        return ChunkedLogits(source, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = list(ctx.ready)
        ctx.ready.clear()
        if gradients[0] is not None:  # something other than a loss has read the logits
            x, weight = ctx.saved_tensors
            flat = gradients[0].flatten(0, -2)
            found.append((gradients[0] @ weight, flat.t() @ x.flatten(0, -2), flat.sum(0)))
        wanted = ctx.needs_input_grad[:3]
        own = zip(*found, strict=True) if found else ((),) * 3
        pairs = zip(own, wanted, strict=True)
        return (*(reduce(torch.add, sums) if sums and w else None for sums, w in pairs), None)


class ChunkedLogits(Tensor):
    """Logits that are made when they are read; a cross entropy reads them chunk by chunk."""

    source: _Source
    rows: Tensor  # the index of each row among those of the linear layer
    numbers: tuple[Change, ...]  # the functions that changed values, in order
    changes: tuple[Change, ...]  # all functions applied to the linear layer's result, in order
    before: ChunkedLogits | None  # the linear layer's result; None if this is it

    @staticmethod
    def __new__(
        cls,
        source: _Source,
        rows: Tensor,
        numbers: tuple[Change, ...] = (),
        changes: tuple[Change, ...] = (),
        before: ChunkedLogits | None = None,
    ) -> ChunkedLogits:
        shape = (*rows.shape, len(source.weight))
        dtype = _changed(torch.empty(0, dtype=source.weight.dtype), numbers).dtype
        made: ChunkedLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=source.x.device
        )
        made.source, made.rows, made.numbers, made.changes = source, rows, numbers, changes
        made.before = before
        return made

    @property
    def origin(self) -> ChunkedLogits:
        """The linear layer's result."""
        return self.before if self.before is not None else self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep logits in chunks if the function allows it, else make them."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_tensor = name == "__get__" and func.__self__.__name__ in _TENSORS
        if name in _ABOUT and not is_tensor:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        first = args[0] if args else None
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if func is cross_entropy and isinstance(kwargs.get("input", first), cls):
            return _cross_entropy(*args, **kwargs)
        if isinstance(first, cls) and len(tensors) == 1:
            change = partial(_called, func, args[1:], kwargs)
            if name in _SAME:
                return first
            if name in _OF_NUMBERS:
                return first._changed_to(first.rows, (*first.numbers, change), change)
            if name in _OF_ROWS and (moved := first._with_rows(change)) is not None:
                return moved
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            raise TypeError(f"{name} would write to logits that are made in chunks")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(_made, args), **{key: _made(one) for key, one in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call an op (below autograd) with all logits in place of this tensor."""
        del types
        every = (*args, *(kwargs or {}).values())
        if any(isinstance(one, cls) and one.changes for one in every):
            raise TypeError(f"{func} cannot read logits that are made in chunks")
        given = (one.source.whole() if isinstance(one, cls) else one for one in args)
        return func(*given, **(kwargs or {}))

    # printing must not make the logits
    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ChunkedLogits({tuple(self.shape)}, {self.dtype})"

    def chunks(self, targets: Tensor) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield the rows and the targets of each chunk."""
        rows, count = self.rows.flatten(), self.rows.numel()
        size = max(1, -(-count // self.source.chunks))
        is_whole = count == self.source.x[..., 0].numel()  # no row was left out: all are in order
        for start in range(0, count, size):
            chosen = slice(start, min(count, start + size))
            yield chosen if is_whole else rows[chosen], targets[chosen]

    def sum_of(self, row_losses: RowLosses, targets: Tensor) -> Tensor:
        """Return the sum of all rows' losses, at least in fp32."""
        total: Tensor = _Loss.apply(self.origin, self, targets, row_losses)  # type: ignore[no-untyped-call]
        return total

    def _with_rows(self, change: Change) -> ChunkedLogits | None:
        """Return these logits after a change that moves rows; None if it moves classes, too."""
        classes = self.shape[-1]
        try:
            spread = change(self.rows.unsqueeze(-1).expand(*self.rows.shape, classes))
        except RuntimeError:  # a view that moves classes, too
            return None
        is_of_rows = spread.dim() > 1 and spread.shape[-1] == classes and not spread.stride(-1)
        return self._changed_to(spread[..., 0], self.numbers, change) if is_of_rows else None

    def _changed_to(
        self, rows: Tensor, numbers: tuple[Change, ...], change: Change
    ) -> ChunkedLogits:
        changes = (*self.changes, change)
        return ChunkedLogits(self.source, rows.contiguous(), numbers, changes, self.origin)


def _called(func: Any, args: tuple[Any, ...], kwargs: Any, first: Tensor) -> Tensor:
    result: Tensor = func(first, *args, **kwargs)
    return result


def _changed(made: Tensor, changes: tuple[Change, ...]) -> Tensor:
    for change in changes:
        made = change(made)
    return made


def _made(value: Any) -> Any:
    """Return logits as an ordinary tensor that autograd knows; other values as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_made, value))
    if not isinstance(value, ChunkedLogits):
        return value
    return _changed(_AllLogits.apply(value.origin), value.changes)  # type: ignore[no-untyped-call]


class _AllLogits(torch.autograd.Function):
    """All logits of a linear layer, for an op that needs them."""

    @staticmethod
    def forward(ctx: Any, origin: ChunkedLogits) -> Tensor:
        del ctx
        return origin.source.whole()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


class _Loss(torch.autograd.Function):
    """The sum of the losses of all rows; leaves the gradients to the linear layer's backward."""

    @staticmethod
    def forward(
        ctx: Any, origin: Tensor, logits: ChunkedLogits, targets: Tensor, row_losses: RowLosses
    ) -> Tensor:
        del origin
        source, needs_gradient = logits.source, ctx.needs_input_grad[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        sums = source.no_gradients() if needs_gradient else ()
        hidden = source.x.flatten(0, -2)
        for rows, own in logits.chunks(targets):
            made = linear(hidden[rows], source.weight, source.bias)
            with torch.set_grad_enabled(needs_gradient):
                made.requires_grad_(needs_gradient)
                loss = row_losses(_changed(made, logits.numbers), own).sum(dtype=wide)
            total += loss.detach()
            if needs_gradient:
                (gradient,) = torch.autograd.grad(loss, made)
                del made, loss
                source.add(sums, rows, hidden[rows], gradient)
                del gradient
        ctx.sums, ctx.ready = sums, source.ready
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("a loss whose logits are made in chunks has only one backward")
        for one in sums:
            if one is not None:
                one.mul_(gradients[0])
        ctx.ready.append(sums)
        return None, None, None, None


def _cross_entropy(
    input: Tensor,  # noqa: A002  # torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute F.cross_entropy in chunks if each row has one target and the result is one number."""
    losses = partial(
        cross_entropy, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    is_one = reduction in ("mean", "sum") and size_average is reduce is None
    is_plain = input.dim() == 2 and not target.is_floating_point() and target.dim() == 1
    if not (isinstance(input, ChunkedLogits) and is_one and is_plain):
        whole = _made(input), target
        return losses(*whole, size_average=size_average, reduce=reduce, reduction=reduction)
    total = input.sum_of(partial(losses, reduction="none"), target)
    if reduction == "sum":
        return total.to(input.dtype)
    valid = target != ignore_index
    if weight is None:
        return (total / valid.sum()).to(input.dtype)
    weights = weight[torch.where(valid, target, 0)].masked_fill(~valid, 0)
    return (total / weights.sum()).to(input.dtype)
