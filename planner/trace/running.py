"""Runs a step for the exporter, and sees what it changes outside the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.planner.trace.build import Step
from autopar.planner.trace.left_behind import LeftBehind, left_behind
from autopar.planner.trace.model_checks import check_same_parameters
from autopar.planner.trace.record import Recording
from autopar.planner.trace.traps import attributes_kept


@dataclass(slots=True)
class Traces:
    """What a run of a step changes outside the model, and leaves there for the next one."""

    changed: Mapping[str, bool] = field(default_factory=dict)  # places: is it another number?
    left: LeftBehind = field(default_factory=LeftBehind)


@dataclass(slots=True)
class Run:
    """What runs of a step are noted in, and what they find."""

    recording: Recording
    traces: Traces
    found: LeftBehind | None

    def loss_of(self, step: Step, batch: Mapping[str, Any]) -> torch.Tensor:
        """Run a step, and put back what it changes outside the model."""
        self.recording.restart()
        outside = self.recording.outside
        at_first = outside.snapshot()
        try:
            if self.found is not None:
                self.found.put()
            before = at_first if self.found is None else outside.snapshot()
            kept = attributes_kept(step.model) if self.found is None else nullcontext()
            parameters = dict(step.model.named_parameters())
            self.recording.is_running = True
            with kept:
                loss = step.run(batch, noted=self.recording.noting_loss)
                check_same_parameters(step.model, parameters, str(step.path))
            self.recording.is_running = False
            after = outside.snapshot()
            self.recording.at_end = frozenset(leaf.told_by for leaf in after.leaves.values())
            self.traces.changed = before.changes_to(after)
            self.traces.left = left_behind(before, after)
        finally:
            at_first.put_back()
        return loss


def traced_step(
    step: Step, tensors: dict[str, Any], constants: dict[str, Any], runs: Run
) -> torch.nn.Module:
    """Return a module whose forward names the batch's keys, as the exporter wants it."""

    class Traced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = step.model

    def run(**batch: Any) -> torch.Tensor:
        return runs.loss_of(step, {**batch, **constants})

    names = ", ".join(tensors)
    pairs = ", ".join(f"{key}={key}" for key in tensors)
    scope: dict[str, Any] = {"run": run}
    exec(f"def forward(self, {names}):\n    return run({pairs})", scope)  # keys are identifiers
    Traced.forward = scope["forward"]
    return Traced()
