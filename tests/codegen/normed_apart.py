"""Trains in one process whose batch norms take statistics of each microbatch by itself.

No verification does that: it is what a plan does whose microbatches a person has pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autopar.codegen.proof.plain import Task, TrainedAlone, train_alone
from autopar.codegen.script.settings_lines import has_batch_norm
from autopar.planner.plan.plan import Plan


def parts_normed(plan: Plan) -> int:
    """Return in how many parts of a batch a plan's batch norms take their statistics."""
    return plan.arrangement.microbatches if has_batch_norm(plan.graph) else 1


def train_normed_apart(task: Task, parts: int) -> TrainedAlone:
    """Train in one process by the statistics of so many parts of a batch."""
    with normed_apart(parts):
        return train_alone(task)


@contextmanager
def normed_apart(parts: int) -> Iterator[None]:
    """Have batch norm take its statistics of one part of the rows after another.

    So a loss of all rows can be had though each microbatch is normed by itself; the mean of the
    microbatches' losses is another one where their rows do not count alike.
    """
    plain = torch.batch_norm

    def in_parts(x: Tensor, *args: Any) -> Tensor:
        return torch.cat([plain(part, *args) for part in x.chunk(parts)])

    with patch.object(torch, "batch_norm", in_parts if parts > 1 else plain):
        yield
