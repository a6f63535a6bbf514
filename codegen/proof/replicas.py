"""Plays in one process what replicas with local steps do: their rows, and their outer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from runpy import run_path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.errors import InputError
from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.plan.plan import Plan
from autopar.runtime.optimizer.outer import parts_of_model

STEPS_COMPARED = 2  # local steps per part of the model: few, so that outer steps come soon


def short_round(parts: int, delay: int) -> tuple[int, int]:
    """Return the local steps of a round, and a part's delay, for a short comparison."""
    return STEPS_COMPARED * parts, min(delay, STEPS_COMPARED - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """The replicas that take local steps, and the outer optimizer that averages them.

    A replica's loss is weighted by its rows, or by what `valid_targets` of a script counts in them.
    """

    rows: tuple[tuple[int, ...], ...]  # of a global batch, for each replica
    sums_rows: bool  # the loss is a sum over rows
    rate: float
    momentum: float
    every: int  # local steps of a round
    parts: int  # of the model, which have outer steps in turn
    delay: int  # steps from sending a part to its outer step
    counting_script: str = ""  # its path

    def weights(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the weights of the replicas' losses, whose mean is the loss of all rows."""
        replicas = len(parts)
        if self.sums_rows:
            return [float(replicas)] * replicas
        script = _globals_of(self.counting_script) if self.counting_script else {}
        if "valid_targets" not in script:
            return [len(rows) * replicas / sum(map(len, self.rows)) for rows in self.rows]
        counts = [script["valid_targets"](one).double() for one in parts]
        if counts[0].numel() > 1:
            raise InputError(
                "one process cannot play replicas whose loss adds several means",
                fix="verify the plan without local steps",
            )
        divisor = script.get("divisor", lambda counted, _: counted)
        whole = float(divisor(torch.stack(counts).sum(0), replicas)) or 1.0
        return [float(divisor(one, 1)) * replicas / whole for one in counts]


@cache
def _globals_of(script: str) -> Mapping[str, Any]:
    return run_path(script)


def rows_of_ranks(arranged: Arrangement) -> list[list[int]]:
    """Return each data rank's rows of a global batch."""
    each = arranged.rows or (arranged.microbatch,) * arranged.data
    starts = range(0, arranged.global_batch, arranged.block)
    return [
        [start + row for start in starts for row in range(low, high)]
        for low, high in pairwise([0, *accumulate(each)])
    ]


def local_steps(plan: Plan) -> LocalSteps:
    """Return the replicas of a plan, with short rounds."""
    arranged = plan.arrangement
    ranks, size = rows_of_ranks(arranged), arranged.shard
    every, delay = short_round(arranged.outer_parts, plan.prediction.outer_delay)
    return LocalSteps(
        rows=tuple(
            tuple(sorted(row for rows in ranks[first : first + size] for row in rows))
            for first in range(0, arranged.data, size)
        ),
        sums_rows=loss_of_parts(plan.graph).follows is Follows.SUM,
        rate=arranged.outer.rate,
        momentum=arranged.outer.momentum,
        every=every,
        parts=arranged.outer_parts,
        delay=delay,
    )


def shared_out(batch: Mapping[str, Any], local: LocalSteps) -> list[tuple[dict[str, Any], float]]:
    """Return the rows of each replica, and the weight of their loss."""
    parts = [
        {k: v[list(rows)] if isinstance(v, Tensor) else v for k, v in batch.items()}
        for rows in local.rows
    ]
    return list(zip(parts, local.weights(parts), strict=True))


class PlayedOuter:
    """The outer steps of all replicas, written out: Nesterov's on the mean change, in place."""

    def __init__(self, models: Sequence[nn.Module], local: LocalSteps) -> None:
        self.local, self.models = local, tuple(models)
        named = dict(models[0].named_parameters())
        self.common = [one.detach().clone() for one in named.values()]
        self.momenta = [torch.zeros_like(one) for one in self.common]
        sizes = {name: one.numel() for name, one in named.items() if one.requires_grad}
        parts = parts_of_model(sizes, local.parts)
        self.parts = [parts.get(name, 0) for name in named]
        self.sent: dict[int, tuple[Tensor, list[Tensor]]] = {}

    @torch.no_grad()
    def step_parts(self, step: int) -> None:
        """Take the outer steps that are due after a local step."""
        within = (step - 1) % self.local.every + 1
        ends = [(one + 1) * self.local.every // self.local.parts for one in range(self.local.parts)]
        held = list(zip(*(one.parameters() for one in self.models), strict=True))
        for place, part in enumerate(self.parts):
            if within == ends[part] - self.local.delay:
                self._send(place, held[place])
            if within == ends[part]:
                self._receive(place, held[place])
        if within == self.local.every:
            self._average_buffers()

    def _send(self, place: int, held: Sequence[Tensor]) -> None:
        was = self.common[place]
        change = sum((was - one for one in held), torch.zeros_like(was)) / len(held)
        self.sent[place] = change, [one.clone() for one in held]

    def _receive(self, place: int, held: Sequence[Tensor]) -> None:
        change, sent = self.sent.pop(place)
        common, momentum = self.common[place], self.momenta[place]
        momentum.mul_(self.local.momentum).add_(change)
        common -= self.local.rate * (change + self.local.momentum * momentum)
        for one, was in zip(held, sent, strict=True):
            one.copy_(common + (one - was))  # and what it has learnt since it was sent

    def _average_buffers(self) -> None:
        for buffers in zip(*(one.buffers() for one in self.models), strict=True):
            if buffers[0].is_floating_point():
                mean = sum(buffers, torch.zeros_like(buffers[0])) / len(self.models)
                for one in buffers:
                    one.copy_(mean)
