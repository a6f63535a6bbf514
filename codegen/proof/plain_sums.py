"""Averages gradients in one process like data ranks that send them in fewer bits.

It is written from the description of the format and uses no code of the runtime. Each rank's share
of the loss is solved for: the ranks' gradients times their shares must add up to the gradients of
all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.codegen.proof.replicas import rows_of_ranks
from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.findings.optimizer_call import learning_parameters
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import Parameter
from autopar.planner.layers import find_layers
from autopar.planner.plan.plan import Plan
from autopar.planner.programs.layouts.strategies import parts_of
from autopar.runtime.checkpointing.owners import overlaps
from autopar.runtime.tensor.shards import Chunks, whole
from autopar.runtime.tensor.slices import cut

_BLOCK, _LARGEST = 256, 127  # elements of a block, and the largest int8
_RANK = 4  # columns of thin matrices
_NEAR = 1e-9  # of the gradients' norm


class RowsMeetError(Exception):
    """The gradients of all rows are no weighted sum of the ranks' gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentSums:
    """How a plan's data ranks share the rows of a step, and which gradients they compress."""

    rows: tuple[tuple[int, ...], ...]  # of a step, for each data rank
    together: int  # data ranks whose gradients are added before the sum is compressed
    gathers: bool  # the mean is compressed as well, for its all-gather
    is_low_rank: bool  # by PowerSGD, not in int8
    # of each compressed parameter, by its name
    shards: tuple[tuple[str, tuple[Chunks, ...]], ...]


def sent_sums(plan: Plan) -> SentSums | None:
    """Return how a plan's data ranks compress gradients, or None if they do not."""
    arranged = plan.arrangement
    if not arranged.compression.keeps_lost:
        return None
    copies = arranged.data // arranged.optimizer_ranks
    is_low_rank = arranged.compression.is_low_rank
    return SentSums(
        rows=tuple(map(tuple, rows_of_ranks(arranged))),
        together=arranged.optimizer_ranks if copies > 1 and not is_low_rank else 1,
        gathers=copies > 1,
        is_low_rank=is_low_rank,
        shards=tuple(_shards(plan, infer_axes(plan.graph))),
    )


def rounding_note(plan: Plan) -> str:
    """Return a note on the error of sums of 16-bit gradients."""
    arranged = plan.arrangement
    dtype = arranged.precision.torch_name if arranged.precision.is_half else "bfloat16"
    share = arranged.averaging_ranks * torch.finfo(getattr(torch, dtype)).eps / 2
    return (
        f"in float64, gradients are summed as they are, not {arranged.compression.sums}: ranks "
        "round each sum in an order that one process does not know. A sum of rounded gradients is "
        f"off by at most {share:.1%} of the sum of their sizes"
    )


def _shards(plan: Plan, axes: GraphAxes) -> Iterator[tuple[str, tuple[Chunks, ...]]]:
    """Yield the parameters that are compressed: those whose gradients no other axis adds up."""
    layouts = {one.name: one.layout for one in plan.parameters}
    learning, tied = learning_parameters(plan.graph), _tied(plan, axes)
    for one in plan.graph.parameters:
        layout = layouts.get(one.name, WHOLE)
        is_summed = one.name in tied or layout.kind is LayoutKind.REPLICATED
        if one.name in learning and not is_summed:
            yield one.name, tuple(_held(one, layout, axes, plan.arrangement.tensor))


def _tied(plan: Plan, axes: GraphAxes) -> frozenset[str]:
    """Return the tensors that several stages use."""
    layers, stages = find_layers(plan.graph, axes).layers, plan.stages
    uses = Counter(
        name
        for stage in stages
        for name in {
            name
            for layer in layers[stage.first : stage.first + stage.count]
            for op in layer.ops
            for name in op.inputs
        }
    )
    return frozenset(name for name, count in uses.items() if count > 1)


def _held(one: Parameter, layout: Layout, axes: GraphAxes, tensor: int) -> Iterator[Chunks]:
    """Yield the different shards of a parameter that tensor ranks hold."""
    full = whole(tuple(extent.at(1) for extent in one.shape))
    if layout.kind is not LayoutKind.SPLIT:
        yield full
        return
    parts = parts_of(axes.dims[one.name][layout.dim], layout.axis, 1)
    for held in cut(parts, tensor).ranges:
        ranges = (*full.ranges[: layout.dim], held, *full.ranges[layout.dim + 1 :])
        yield Chunks(full.global_shape, ranges)


@dataclass(slots=True)
class SentGradients:
    """Averages gradients as data ranks do that compress them and carry the errors forward."""

    sums: SentSums | None
    # errors of rounding, added next time: by parameter, shard and first of the ranks added together
    _lost: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    _lost_of_means: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # by shard
    _bases: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # of PowerSGD

    def backward(
        self, model: nn.Module, loss_of: Callable[[Mapping[str, Tensor]], Tensor],
        batch: Mapping[str, Tensor],
    ) -> Tensor:  # fmt: skip
        """Give a model's parameters their gradients; return the loss of all rows."""
        by_rank = [] if self.sums is None else list(self._by_rank(model, loss_of, batch))
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.sums is not None:
            every = _taken(model, keeps=True)
            shares = _shares(every, by_rank)
            for name, shards in self.sums.shards:
                if name in every:
                    scaled = [share * one[name] for share, one in zip(shares, by_rank, strict=True)]
                    average = self._project if self.sums.is_low_rank else self._average
                    for number, chunks in enumerate(shards):
                        average(every[name], chunks, scaled, (name, number))
        return loss

    def _by_rank(
        self, model: nn.Module, loss_of: Callable[[Mapping[str, Tensor]], Tensor],
        batch: Mapping[str, Tensor],
    ) -> Iterator[dict[str, Tensor]]:  # fmt: skip
        """Yield the gradients of each data rank's rows; the model's buffers stay as they are."""
        assert self.sums is not None
        before = [(buffer, buffer.clone()) for buffer in model.buffers()]
        for rows in self.sums.rows:
            own = {k: v[list(rows)] if isinstance(v, Tensor) else v for k, v in batch.items()}
            loss_of(own).backward()  # type: ignore[no-untyped-call]
            yield _taken(model, keeps=False)
        for buffer, value in before:
            buffer.copy_(value)

    def _average(
        self, gradient: Tensor, chunks: Chunks, by_rank: Sequence[Tensor], key: tuple[str, int]
    ) -> None:
        """Replace the elements of a shard by their compressed mean."""
        assert self.sums is not None
        together, mean = self.sums.together, torch.zeros(())
        for first in range(0, len(by_rank), together):
            own = sum((_read(one, chunks) for one in by_rank[first : first + together]), mean * 0)
            sent, self._lost[*key, first] = _rounded(own, self._lost.get((*key, first)))
            mean = mean + sent
        if self.sums.gathers:
            mean, self._lost_of_means[key] = _rounded(mean, self._lost_of_means.get(key))
        _write(gradient, chunks, mean)

    def _project(
        self, gradient: Tensor, chunks: Chunks, by_rank: Sequence[Tensor], key: tuple[str, int]
    ) -> None:
        """Replace a shard by the product of two thin matrices, if the shard is a large matrix."""
        rows = chunks.local_shape[0] if len(chunks.local_shape) > 1 else 0
        columns = chunks.elements // rows if rows else 0
        if not rows or 2 * _RANK * (rows + columns) > rows * columns:
            return
        own = [_read(one, chunks).view(rows, columns) for one in by_rank]
        own = [one + self._lost.get((*key, n), one * 0) for n, one in enumerate(own)]
        basis = _orthonormal(self._bases.get(key, _wave(columns, gradient)))
        product = _orthonormal(torch.stack([one @ basis for one in own]).sum(0))
        for n, one in enumerate(own):
            self._lost[*key, n] = one - product @ (product.T @ one)
        self._bases[key] = torch.stack([one.T @ product for one in own]).sum(0)
        _write(gradient, chunks, (product @ self._bases[key].T).flatten())


def _wave(rows: int, like: Tensor) -> Tensor:
    """Return the matrix cos(row · column), with rows and columns counted from 1."""
    first = torch.arange(1, rows + 1, dtype=like.dtype)
    return torch.cos(first[:, None] * torch.arange(1, _RANK + 1, dtype=like.dtype))


def _orthonormal(matrix: Tensor) -> Tensor:
    """Make columns orthonormal one by one; `_wave` replaces a column that earlier ones span."""
    columns: list[Tensor] = []
    for own, wave in zip(matrix.T, _wave(len(matrix), matrix).T, strict=True):
        for candidate in (own, wave):
            left = candidate
            for one in columns * 2:  # twice, against rounding errors
                left = left - one * (one @ left)
            if candidate is wave or left.norm() > 1e-6 * matrix.norm():
                columns.append(left / left.norm())
                break
    return torch.stack(columns, dim=1)


def _taken(model: nn.Module, *, keeps: bool) -> dict[str, Tensor]:
    """Return a model's gradients, by all names of their parameters; drop them unless kept."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            found[name] = parameter.grad
    if not keeps:
        model.zero_grad()
    return found


def _shares(every: Mapping[str, Tensor], by_rank: Sequence[dict[str, Tensor]]) -> list[float]:
    """Return the factors of the ranks' gradients whose sum is the gradient of all rows.

    A rank without a valid target has no gradient, or nan. Raises if there are no such factors.
    """
    for own in by_rank:
        for name, gradient in every.items():
            own[name] = own.get(name, torch.zeros_like(gradient)).nan_to_num(nan=0.0)
    products = torch.stack([_product(one, other) for one in by_rank for other in by_rank])
    aims = torch.stack([_product(one, every) for one in by_rank])
    shares = torch.linalg.pinv(products.view(len(aims), -1), hermitian=True) @ aims
    left = {name: gradient.clone() for name, gradient in every.items()}
    for share, own in zip(shares.tolist(), by_rank, strict=True):
        for name, gradient in left.items():
            gradient.sub_(own[name], alpha=share)
    if _product(left, left) > _NEAR**2 * _product(every, every):
        raise RowsMeetError
    found: list[float] = shares.tolist()
    return found


def _product(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(gradient * other[name]).sum() for name, gradient in one.items()]).sum()


def _rounded(x: Tensor, lost: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x plus what was lost before, rounded to int8, and what this rounding loses."""
    x = x if lost is None else x + lost
    rows = nn.functional.pad(x, (0, -len(x) % _BLOCK)).view(-1, _BLOCK)
    scales = rows.abs().amax(1, keepdim=True) / _LARGEST
    steps = torch.where(scales > 0, rows / scales, 0).round().clamp(-_LARGEST, _LARGEST)
    sent = (steps * scales).view(-1)[: len(x)]
    return sent, x - sent


def _read(full: Tensor, chunks: Chunks) -> Tensor:
    """Return a shard of a tensor, flattened."""
    shard = full.new_empty(chunks.local_shape)
    for own, place in overlaps(chunks.ranges, whole(chunks.global_shape).ranges):
        shard[own] = full[place]
    return shard.view(-1)


def _write(full: Tensor, chunks: Chunks, flat: Tensor) -> None:
    """Write a flattened shard into a tensor."""
    shard = flat.view(chunks.local_shape)
    for own, place in overlaps(chunks.ranges, whole(chunks.global_shape).ranges):
        full[place] = shard[own]
