"""Computes embeddings, logsumexp and cross entropy with a vocabulary split over the tensor axis.

No rank holds the logits of the whole vocabulary: the loss needs one message, with four numbers per
target (Megatron-LM's vocabulary-parallel cross entropy, here with label smoothing and uneven
shards).
`parts` says how the vocabulary is cut (see slices.py). By default all ranks hold equally many
entries.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, embedding_bag

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import gathered
from autopar.runtime.tensor.chunked_logits import ChunkedLogits
from autopar.runtime.tensor.slices import Parts, cut

__all__ = [
    "split_logsumexp",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_embedding_bag",
]


def vocab_parallel_embedding(
    ids: Tensor,
    weight_local: Tensor,
    axis: Axis,
    parts: Parts | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the embeddings of ids, with zeros for rows that other ranks hold: layout P."""
    if axis.size == 1:
        return embedding(ids, weight_local, padding_idx)
    parts = parts or _even_parts(len(weight_local), axis)
    _check_rows(ids, parts, axis)
    local, is_here = _local_ids(ids, parts, axis)
    if not weight_local.shape[0]:  # more ranks than rows; autograd still needs the weight
        return weight_local.sum(0).expand(*ids.shape, -1)
    rows = embedding(local, weight_local, _local_row(padding_idx, parts, axis))
    return rows.masked_fill(~is_here.unsqueeze(-1), 0)


def vocab_parallel_embedding_bag(
    ids: Tensor,
    weight_local: Tensor,
    offsets: Tensor,
    axis: Axis,
    *,
    mode: str = "sum",
    parts: Parts | None = None,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum up in each bag the rows that this rank holds: layout P.

    A mean divides by the bag's number of entries on all ranks. Mode "max" is not supported.
    """
    if axis.size == 1:
        return embedding_bag(
            ids,
            weight_local,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
    parts = parts or _even_parts(len(weight_local), axis)
    _check_rows(ids, parts, axis)
    local, is_here = _local_ids(ids, parts, axis)
    is_entry = torch.ones_like(is_here) if padding_idx is None else ids != padding_idx
    last = () if include_last_offset else (offsets.new_full((1,), len(ids)),)
    edges = torch.cat((offsets, *last))
    bags = edges[:-1], edges[1:]
    if not weight_local.shape[0]:  # more ranks than rows; autograd still needs the weights
        weighed = 0 if per_sample_weights is None else per_sample_weights[:0].sum()
        return (weight_local.sum(0) + weighed).expand(len(bags[0]), -1)
    counts = (is_here & is_entry).to(weight_local.dtype)
    weights = counts if per_sample_weights is None else per_sample_weights * counts
    sums = embedding_bag(
        local,
        weight_local,
        offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=include_last_offset,
    )
    if mode == "sum":
        return sums
    before = nn.functional.pad(is_entry.cumsum(0), (1, 0))  # entries before each position
    return sums / (before[bags[1]] - before[bags[0]]).clamp(min=1).unsqueeze(-1)


def split_logsumexp(
    x_local: Tensor, dim: int | tuple[int, ...], axis: Axis, *, keepdim: bool = False
) -> Tensor:
    """Compute torch.logsumexp over dims of which one is split, evenly or not.

    The result is whole on every rank (layout I).
    """
    if axis.size == 1:
        return torch.logsumexp(x_local, dim, keepdim=keepdim)
    result: Tensor = _LogSumExp.apply(x_local, dim, axis)  # type: ignore[no-untyped-call]
    return result if keepdim else result.squeeze(dim)


class _LogSumExp(torch.autograd.Function):
    """log Σ exp(x) of all ranks, whose gradient is exp(x − log Σ exp(x)) on each rank's shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | tuple[int, ...], axis: Axis) -> Tensor:
        local = torch.logsumexp(x, dim, keepdim=True)
        wide = torch.promote_types(local.dtype, torch.float32)
        result = torch.logsumexp(gathered(local.to(wide), axis), 0).to(local.dtype)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, result = ctx.saved_tensors
        return (x - result).exp_().mul_(gradients[0]), None, None


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    target: Tensor,
    axis: Axis,
    *,
    parts: Parts | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute F.cross_entropy of logits [..., vocabulary] that are split along the last dim.

    The result is whole on every rank (layout I), for targets that are the same on every rank.
    """
    if axis.size == 1:
        return cross_entropy(
            logits_local.flatten(0, -2),
            target.flatten(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        ).view(target.shape if reduction == "none" else ())
    valid = target != ignore_index
    parts = parts or _even_parts(logits_local.shape[-1], axis)
    if isinstance(logits_local, ChunkedLogits) and reduction != "none":
        losses_of = partial(
            vocab_parallel_cross_entropy,
            axis=axis,
            parts=parts,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        rows = cast("ChunkedLogits", logits_local.flatten(0, -2))
        total = rows.sum_of(losses_of, target.flatten())
        return total if reduction == "sum" else total / valid.sum()
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_local, target, valid, axis, parts, label_smoothing
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def _even_parts(local: int, axis: Axis) -> Parts:
    """Return the parts of a vocabulary of which all ranks hold equally many entries."""
    return ((local * axis.size, 1),)


class _CrossEntropy(torch.autograd.Function):
    """The loss per target: log Σ exp(logits) − (1 − ε) · target's logit − ε · mean logit."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        valid: Tensor,
        axis: Axis,
        parts: Parts,
        smoothing: float,
    ) -> Tensor:
        vocabulary = cut(parts, axis.size).whole
        inside = (target >= 0) & (target < vocabulary) | ~valid
        torch._assert_async(inside.all(), f"a target is not one of {vocabulary} classes")
        local, is_here = _local_ids(torch.where(valid, target, 0), parts, axis)
        highest, exponentials, own, total = gathered(
            _statistics(logits, local, is_here), axis
        ).unbind(1)
        top = highest.amax(0)
        log_sum = (exponentials * (highest - top).exp()).sum(0).log()
        losses = log_sum - (1 - smoothing) * (own.sum(0) - top)
        if smoothing:
            losses -= smoothing * (total.sum(0) / vocabulary - top)
        ctx.save_for_backward(logits, top + log_sum, local, is_here, valid)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses.masked_fill(~valid, 0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, local, is_here, valid = ctx.saved_tensors
        gradient = gradients[0].masked_fill(~valid, 0).to(log_sum.dtype).unsqueeze(-1)
        result = (logits - log_sum.unsqueeze(-1)).exp_()  # softmax, recomputed
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.vocabulary
        if result.shape[-1]:
            hit = is_here.unsqueeze(-1).to(result.dtype) * (ctx.smoothing - 1)
            result.scatter_add_(-1, local.unsqueeze(-1), hit)
        return result.mul_(gradient).to(logits.dtype), None, None, None, None, None


def _statistics(logits: Tensor, local: Tensor, is_here: Tensor) -> Tensor:
    """Return, per target, the four numbers that other ranks need of this rank's logits.

    They are the highest logit, Σ exp(logit − highest), the target's logit (0 if another rank holds
    it) and Σ logits. 16-bit logits are summed in fp32.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    lowest = torch.finfo(wide).min  # not −∞, because −∞ − (−∞) is nan
    if not logits.shape[-1]:
        nothing = torch.zeros_like(is_here, dtype=wide)
        return torch.stack((nothing + lowest, nothing, nothing, nothing))
    highest = logits.amax(-1).to(wide).clamp_(min=lowest)
    exponentials = (logits - highest.unsqueeze(-1)).exp_().sum(-1)
    own = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide).masked_fill(~is_here, 0)
    return torch.stack((highest, exponentials, own, logits.sum(-1, dtype=wide)))


def _local_row(index: int | None, parts: Parts, axis: Axis) -> int | None:
    """Return the local row of a global index, or None if another rank holds it."""
    offset = 0
    for start, stop in cut(parts, axis.size).ranges[axis.rank]:
        if index is not None and start <= index < stop:
            return offset + index - start
        offset += stop - start
    return None


def _check_rows(ids: Tensor, parts: Parts, axis: Axis) -> None:
    """Raise for an id that no rank holds; without this, its row would be zeros."""
    rows = cut(parts, axis.size).whole
    torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"an id is not one of {rows} rows")


def _local_ids(ids: Tensor, parts: Parts, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return the local rows of ids, and a mask of the ids on this rank; other ids get row 0."""
    local, is_here = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    offset = 0
    for start, stop in cut(parts, axis.size).ranges[axis.rank]:
        here = (ids >= start) & (ids < stop)
        local = torch.where(here, ids + (offset - start), local)
        is_here = is_here | here
        offset += stop - start
    return local, is_here
