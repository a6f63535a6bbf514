"""Makes trainings comparable to the last digit, and explains how a script failed.

Also names and copies the tensors that are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from autopar.planner.errors import AutoparError, ExitCode
from autopar.runtime.ranks.randomness import undrawn

LAST_LINES = 15  # of a failed script's output
_KILLED = re.compile(r"exitcode\s*: -9\b")  # in torchrun's message about the first failure
_REFUSED = re.compile(r"^error: (.*)\n  fix: (.*)$", re.MULTILINE)  # the format of `ExitReason`
_HUNG = re.compile(r"Timeout \(\d+:\d\d:\d\d")  # the beginning of faulthandler's output
_TRACEBACK = "Traceback (most recent call last)"


class ScriptFailedError(AutoparError):
    """A script ended with an error."""

    exit_code = ExitCode.TRAINING_FAILED


def failure_of(printed: str, ranks: int, script: Path | None = None) -> ScriptFailedError:
    """Return the error of a failed script, from the output of torchrun and the ranks."""
    if _KILLED.search(printed.partition("Root Cause")[2]):
        return ScriptFailedError(
            f"one of {ranks} processes was killed, as happens when memory runs out",
            fix="verify a smaller model of the same file (autopar verify PLAN --arg layers=…), or "
            "end what else takes memory",
        )
    if hung := _HUNG.search(printed):
        inside = re.compile(rf'File "{re.escape(str(script))}", line (\d+) in (\w+)')
        at = inside.search(printed, hung.end())
        return ScriptFailedError(
            f"the script stands still on {ranks} processes"
            + (f": one of them waits in {at[2]}, line {at[1]}" if at else ""),
            fix="look for a collective that only some of the ranks call, or for a stage that gives "
            "other tensors than the next one takes",
        )
    if refusal := _REFUSED.search(printed):
        return ScriptFailedError(f"the script refuses to run: {refusal[1]}", fix=refusal[2])
    told = "\n".join(first_traceback(printed.strip().splitlines())[-LAST_LINES:])
    return ScriptFailedError(f"the script failed on {ranks} processes:\n{told}")


def first_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the first traceback of the first rank that printed one, or all lines.

    Lines of other ranks may be in between; an empty line of the same rank ends the traceback.
    """
    at = next((i for i, line in enumerate(lines) if _TRACEBACK in line), None)
    if at is None:
        return lines
    rank = lines[at].partition(_TRACEBACK)[0]
    if not rank:  # before the ranks have joined, lines do not begin with a rank
        frames = list(takewhile(lambda line: line.startswith(" "), lines[at + 1 :]))
        return lines[at : at + len(frames) + 2]
    own = (line for line in lines[at:] if line.startswith(rank.strip()))
    return list(takewhile(lambda line: line.strip() != rank.strip(), own))


HALVES = frozenset({torch.bfloat16, torch.float16})
_CLASS_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class KeepFloat64(TorchFunctionMode):
    """A mode that ignores casts of float64 to float32.

    If a model casts its logits to float32, sums in another order differ by 1e-7, which would hide
    smaller faults. In a float64 training new tensors are float64, too, and literals have the values
    of a float32 training.

    Optimizer steps run without this mode. AdamW's fused kernel on a GPU reads its step count as
    float32, whatever the tensor's dtype is.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.default = torch.get_default_dtype()
        self.optimizers = 0  # running steps: an optimizer may call the step of another
        self.hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Enter the mode, with the training's dtype as default."""
        self.hooks += (
            register_optimizer_step_pre_hook(self._pause),
            register_optimizer_step_post_hook(self._resume),
        )
        self._set_default()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the mode, and restore the default dtype."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self.hooks:
            self.hooks.pop().remove()
        self.optimizers = 0
        torch.set_default_dtype(self.default)

    def _set_default(self) -> None:
        is_wide = self.dtype is torch.float64 and not self.optimizers
        torch.set_default_dtype(self.dtype if is_wide else self.default)

    def _pause(self, *_: Any) -> None:
        self.optimizers += 1
        self._set_default()

    def _resume(self, *_: Any) -> None:
        self.optimizers -= 1
        self._set_default()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, unchanged inside an optimizer's step."""
        del types
        if self.optimizers:
            return func(*args, **(kwargs or {}))
        return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, keeping float64."""
        if func in _BACKWARD:
            with _engine_within(type(self)(self.dtype)):
                return func(*args, **kwargs)
        if func is torch._grouped_mm and args[0].dtype is torch.float64:
            return _product_by_groups(*args, **kwargs)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscaled(*args)
        is_wide = self.dtype is torch.float64
        if is_wide or (self.dtype not in HALVES and any(map(_is_wide, args))):
            func = Tensor.double if func is Tensor.float else func
            args = tuple(map(_wide, args))
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
            if func in _CLASS_LOSSES:
                args, kwargs = _with_wide_weights(*args, **kwargs)
        made = func(*args, **kwargs)
        if is_wide and func is torch.tensor and made.is_floating_point():
            return made.float().double()
        return made


class ExactMode(KeepFloat64):
    """A mode that also disables dropout and other random numbers."""

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function without dropout."""
        return undrawn(func, args, kwargs, super()._call)


@contextmanager
def _engine_within(mode: KeepFloat64) -> Iterator[None]:
    """Run backwards in a mode, so that layers are recomputed as in the forward.

    torch disables a mode while it handles a call, here for the whole backward.
    """
    torch_autograd: Any = torch.autograd
    run = torch_autograd._engine_run_backward

    def run_within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    torch_autograd._engine_run_backward = run_within
    try:
        yield
    finally:
        torch_autograd._engine_run_backward = run


def _product_by_groups(rows: Tensor, matrices: Tensor, offs: Tensor, **_: None) -> Tensor:
    """Multiply each group of rows by its matrix; torch's kernel takes at most 32 bits."""
    ends = [int(end) for end in offs]
    sizes = [end - start for start, end in pairwise([0, *ends, len(rows)])]
    *groups, rest = torch.split(rows, sizes)
    made = [group @ matrix for group, matrix in zip(groups, matrices, strict=True)]
    return torch.cat([*made, rest.new_zeros((len(rest), matrices.shape[-1]))])


def _unscaled(gradients: list[Tensor], overflow: Tensor, inverse: Tensor) -> None:
    """Undo a loss scale; torch's kernel only takes it in float32."""
    found = overflow.float()
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.float())
    overflow.copy_(found)


def _with_wide_weights(
    scores: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast a loss's class weights, which the model file may have made, to the scores' dtype."""
    wide = None if weight is None else weight.to(scores.dtype)
    return (scores, target, wide, *args), kwargs


def _is_wide(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dtype is torch.float64


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, and the plain tensors on its modules."""
    plain = {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    return {**dict(trained_tensors(model)), **plain}


def trained_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers under all their names.

    A batch norm's num_batches_tracked is left out, because it counts microbatches.
    """
    counts = {
        id(module.num_batches_tracked)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    }
    buffers = model.named_buffers(remove_duplicate=False)
    return [
        *model.named_parameters(remove_duplicate=False),
        *((name, buffer) for name, buffer in buffers if id(buffer) not in counts),
    ]


def all_steps(exact: int) -> int:
    """Return the number of all steps: the compared ones, and one whose draws are recorded."""
    return exact + 1


def clipped_share(step: int) -> float:
    """Return the fraction of their norm to which a step's gradients are clipped.

    A fraction of their own norm always clips them. The fraction changes from step to step, so that
    a missing, wrong or late clip shows; Adam would not notice a constant factor.
    """
    return 1 / (step + 1)


def cast_batch(batch: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast a batch's floating tensors to a dtype, except those that are wider."""

    def wide(one: Tensor) -> Tensor:
        return one.to(dtype) if one.is_floating_point() and one.itemsize < dtype.itemsize else one

    # it contains plain numbers, too
    wide_batch: dict[str, Tensor] = tree_map_only(Tensor, wide, batch)
    return wide_batch


def wide_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors in a dtype that holds all values."""
    return {name: wide_copy(one) for name, one in tensors.items()}


def wide_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, in a dtype that holds all values."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide, copy=True)
