"""What one process needs to play all replicas: the rows of each, and the outer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autopar.planner.errors import InputError
from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.plan.plan import Plan

STEPS_COMPARED = 2  # local steps, in place of a script's own number, so that outer steps are seen


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """The replicas that take local steps, and the outer optimizer that averages them.

    A replica's loss is weighted by its rows, or by what `valid_targets` of a script counts in them.
    """

    rows: tuple[tuple[int, ...], ...]  # of a global batch, for each replica
    sums_rows: bool  # the loss is a sum over rows
    rate: float
    momentum: float
    counting_script: str = ""  # its path

    def weights(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the weights of the replicas' losses, whose mean is the loss of all rows."""
        replicas = len(parts)
        if self.sums_rows:
            return [float(replicas)] * replicas
        script: Any = _loaded(self.counting_script) if self.counting_script else None
        if not hasattr(script, "valid_targets"):
            return [len(rows) * replicas / sum(map(len, self.rows)) for rows in self.rows]
        counts = [script.valid_targets(one).double() for one in parts]
        if counts[0].numel() > 1:
            raise InputError(
                "one process cannot play replicas whose loss adds several means",
                fix="verify the plan without local steps",
            )
        divisor = getattr(script, "divisor", lambda counted, _: counted)
        whole = float(divisor(torch.stack(counts).sum(0), replicas)) or 1.0
        return [float(divisor(one, 1)) * replicas / whole for one in counts]


@cache
def _loaded(path: str) -> Any:
    spec = spec_from_file_location("counting_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def local_steps(plan: Plan) -> LocalSteps:
    """Return the replicas of a plan."""
    arranged = plan.arrangement
    each = arranged.rows or (arranged.microbatch,) * arranged.data
    ends = [0, *accumulate(each)][:: arranged.shard]
    starts = range(0, arranged.global_batch, arranged.block)
    return LocalSteps(
        rows=tuple(
            tuple(start + row for start in starts for row in range(low, high))
            for low, high in pairwise(ends)
        ),
        sums_rows=loss_of_parts(plan.graph).follows is Follows.SUM,
        rate=arranged.outer.rate,
        momentum=arranged.outer.momentum,
    )


def shared_out(batch: Mapping[str, Any], local: LocalSteps) -> list[tuple[dict[str, Any], float]]:
    """Return the rows of each replica, and the weight of their loss."""
    parts = [
        {k: v[list(rows)] if isinstance(v, Tensor) else v for k, v in batch.items()}
        for rows in local.rows
    ]
    return list(zip(parts, local.weights(parts), strict=True))


@torch.no_grad()
def average(
    models: Sequence[nn.Module], common: list[Tensor], momenta: list[Tensor], local: LocalSteps
) -> None:
    """Take an outer step: Nesterov's on the mean change of all replicas, in place."""
    every = zip(*(one.parameters() for one in models), strict=True)
    for was, momentum, held in zip(common, momenta, every, strict=True):
        change = sum((was - one for one in held), torch.zeros_like(was)) / len(models)
        momentum.mul_(local.momentum).add_(change)
        was -= local.rate * (change + local.momentum * momentum)
        for one in held:
            one.copy_(was)
    for buffers in zip(*(one.buffers() for one in models), strict=True):
        if buffers[0].is_floating_point():
            mean = sum(buffers, torch.zeros_like(buffers[0])) / len(models)
            for one in buffers:
                one.copy_(mean)
