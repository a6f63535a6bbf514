"""Compares the first loss of a training with that of the whole model in plain PyTorch."""

from __future__ import annotations

import inspect
import math
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.data.batches import Batch, Example, Weighed, gathered_rows
from autopar.runtime.data.loss import Counting, loss_in
from autopar.runtime.data_parallel.batch_norm import widen_norms
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.data_parallel.wrapping import compute_in
from autopar.runtime.evaluation.evaluating import Losses, computes_as_trained, weighed_alike
from autopar.runtime.model.parts import in_float8
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.transport import summed
from autopar.runtime.weights.loading import load_safetensors
from autopar.runtime.weights.plain_model import plain_model
from autopar.runtime.weights.stored_tensors import in_float64

__all__ = ["PlainModel", "check_first_step"]  # for scripts

# The largest difference allowed between a loss and that of plain PyTorch: relative to the loss, or
# absolute if that is below 1. Both use the same weights and no random numbers; they differ by the
# order of sums and by roundings. In fp32, sums of thousands of terms over tens of layers make some
# hundred roundings, and a model that computes in fp64 may round to fp32 somewhere. In 16 bits, sums
# are made in fp32 and each layer rounds its output; in a mean over all targets this mostly cancels.
# For bf16 one rounding (8 significant bits) is allowed: twenty times the largest difference seen.
# Float8 rounds factors to 4 bits, which changes the losses of 50 steps of a small Llama by a
# fortieth of what is allowed.
_FULL = 500 * torch.finfo(torch.float32).eps
ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: _FULL,
    torch.float32: _FULL,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).eps / 4,
}


@dataclass(frozen=True, slots=True)
class PlainModel:
    """The functions of a model file that compute a loss on one device."""

    new_model: Callable[[], nn.Module]
    new_batch: Example
    compute_loss: Callable[[Any, Batch], Tensor] | None = None  # None if the model returns its loss
    half_buffers: Collection[str] = ()  # names of buffers that a 16-bit training casts
    needs_gradients: bool = False  # the model computes gradients itself, or has hooks on them

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a model.

        The model is called with the entries of the batch that its forward takes.
        """
        plain = {k: v for k, v in self.new_batch(1).items() if not isinstance(v, Tensor)}
        every = {**batch, **plain}
        parameters = inspect.signature(model.forward).parameters.values()
        named = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
        taken = {key: value for key, value in every.items() if key in named}
        if any(one.kind is one.VAR_KEYWORD for one in parameters) and not (
            self.compute_loss and taken
        ):
            taken = every
        outputs = model(**taken)
        return loss_in(outputs) if self.compute_loss is None else self.compute_loss(outputs, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainLoss:
    """A loss in plain PyTorch and its time, or why it could not be computed."""

    loss: float = 0.0
    build_seconds: float = 0.0
    seconds: float = 0.0
    failure: str = ""


_NOTHING_COUNTS = (
    "the first microbatch's loss is nan in plain PyTorch, too: perhaps it has no valid targets"
)


def check_first_step(
    data: Iterator[Weighed],
    losses: Losses,
    parts: Sequence[nn.Module],
    reference: PlainModel,
    options: Namespace,
    mesh: Mesh,
    *,
    terms: Counting | None = None,
    rows_over: Axis = ALONE,
    own: Collection[str] = (),
    rows: int = 0,
) -> Iterator[Weighed]:
    """Exit if the first microbatch's loss differs from plain PyTorch's; return `data` unchanged.

    Rank 0 computes the loss in plain PyTorch. `terms` counts the targets of each mean in the loss.
    `own` are the keys of the batch whose `rows` are divided over the ranks of `rows_over`; they are
    gathered first.
    """
    if mesh.is_dry_run:
        return data
    first = next(data)
    batch = weighed_alike(first[0], terms)
    with computes_as_trained(parts, mesh, options.seed):
        (ours,) = losses([batch])
    rest = gathered_rows({key: batch[key] for key in own}, (), rows_over, rows=rows)
    found = _PlainLoss()
    if mesh.rank == 0:
        found = _plain_loss(reference, {**batch, **rest}, options, mesh)
        torch.cuda.empty_cache()
    # in a pipeline, the last stage has the loss
    is_counted = mesh.data.rank == mesh.tensor.rank == 0
    told = [
        ours.double() if is_counted else torch.zeros_like(ours, dtype=torch.float64),
        torch.tensor(found.loss, dtype=torch.float64, device=ours.device),
        torch.tensor(float(bool(found.failure)), dtype=torch.float64, device=ours.device),
        torch.tensor(float(bool(in_float8(parts))), dtype=torch.float64, device=ours.device),
    ]
    script, plain, has_failed, has_float8 = summed(torch.stack(told), mesh.world)
    if not has_failed:
        narrowest = torch.float8_e4m3fn if has_float8 else options.dtype
        _compare(float(script), float(plain), narrowest)
    failure = _NOTHING_COUNTS if plain.isnan() else found.failure
    if has_failed or failure:
        mesh.say(f"note: the first step is not checked: {failure}")
    else:
        mesh.say(
            f"checked: the first loss is {float(plain):.6g} in plain PyTorch, too (the whole model "
            f"was built in {found.build_seconds:.1f} s, its loss took {found.seconds:.2f} s)"
        )
    return chain([first], data)


def _compare(script: float, plain: float, dtype: torch.dtype) -> None:
    """Exit if two losses differ by more than their dtype allows."""
    allowed = ALLOWED[dtype] * max(1.0, abs(plain))
    is_near = math.isclose(script, plain, rel_tol=0.0, abs_tol=allowed)
    if is_near or (math.isnan(script) and math.isnan(plain)):
        return
    refuse(
        f"the loss of the first microbatch is {script:.8g} here, and {plain:.8g} in plain PyTorch "
        f"with the unchanged model: {str(dtype).removeprefix('torch.')} allows a difference of "
        f"{allowed:.1g}",
        fix="autopar verify, with the folder of the plan, tells what differs; "
        "--no-check-first-step trains on",
    )


def _plain_loss(reference: PlainModel, batch: Batch, options: Namespace, mesh: Mesh) -> _PlainLoss:
    """Compute a loss in plain PyTorch; a failure here is not an error of the script."""
    begun = time.perf_counter()
    try:
        model = _built(reference, options, mesh)
        built = time.perf_counter()
        with (
            computes_as_trained([model], mesh, options.seed),
            torch.set_grad_enabled(reference.needs_gradients),
        ):
            loss = float(reference.loss(model, batch))
    except torch.OutOfMemoryError:
        return _PlainLoss(failure="the whole model has no room beside what this rank holds")
    except Exception as error:
        return _PlainLoss(failure=f"plain PyTorch fails: {type(error).__name__}: {error}")
    return _PlainLoss(loss=loss, build_seconds=built - begun, seconds=time.perf_counter() - built)


def _built(reference: PlainModel, options: Namespace, mesh: Mesh) -> nn.Module:
    """Return the whole initial model, with parameters in the training's dtype."""
    model = plain_model(reference.new_model, seed=options.seed)
    if options.weights is not None:
        files, may_lack = options.weights.files, options.weights.may_lack
        cpu = torch.device("cpu")
        load_safetensors(model, files, {}, ALONE, device=cpu, may_lack=may_lack)
    dtype = options.dtype
    if dtype in HALF_DTYPES:
        compute_in(model, dtype, buffers=reference.half_buffers, takes_received=False)
        widen_norms(model)
    if dtype is torch.float64:
        in_float64(model)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.to(mesh.device)
