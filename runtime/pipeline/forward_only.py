"""Turns a microbatch into its loss by the stages of all ranks, without a backward or a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pipeline.stage import Stage


def loss_through(stages: Sequence[Stage], batch: Mapping[str, Any]) -> Tensor:
    """Return the loss where the last stage is, and zero on other ranks.

    A rank goes on with its next microbatch as soon as it has sent this one on. All ranks send and
    receive in one order, that of microbatches and of stages in each, so none waits in vain.
    """
    loss = torch.zeros((), device=stages[0].device)
    passed: Sequence[Tensor] = ()
    for stage in sorted(stages, key=lambda one: one.stage_index):
        if not stage.is_first and _rank_of(stage, -1) != stage.group_rank:
            passed = stage.arriving(batch)
            for tensor in passed:
                dist.recv(tensor, group=stage.group, group_src=_rank_of(stage, -1))
        passed = stage.evaluate(batch, passed)
        if stage.is_last:
            loss = passed[0]
        elif _rank_of(stage, 1) != stage.group_rank:
            for tensor in passed:
                dist.send(tensor.contiguous(), group=stage.group, group_dst=_rank_of(stage, 1))
    return loss


def _rank_of(stage: Stage, offset: int) -> int:
    """Return the pipeline rank of a stage after this one, or before it."""
    return stage.stage_index_to_group_rank[stage.stage_index + offset]
