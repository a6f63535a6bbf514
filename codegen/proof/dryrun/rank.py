"""Runs a script as one rank of many, up to the end of its first step, without computing.

`python -m autopar.codegen.proof.dryrun.rank SCRIPT` prints the report of the rank that
AUTOPAR_DRYRUN="rank/world" names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from autopar.codegen.proof.dryrun.watching import DryRunRecording, Report, recording
from autopar.codegen.proof.script_rank import imported
from autopar.runtime.data.batches import Batch

Entered = TypeVar("Entered")


class _StepRecordedError(Exception):
    """A step has been recorded: the script ends here."""


def report_of(path: Path) -> Report:
    """Run a script's `main` to the end of its first step; report on it as if it were the second."""
    found: list[Report] = []

    def watched(step: FirstStep, record: DryRunRecording) -> None:
        with record.second_step(step.parts, step.optimizer, step.given):
            step.take()
        found.append(record.report())

    run_first_step(path, recording(), watched)
    return found[0]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a script, before it is taken."""

    take: Callable[[], Any]
    parts: Sequence[nn.Module]
    optimizer: Optimizer
    given: tuple[Any, ...]  # further arguments of train_step


def run_first_step(
    path: Path, watching: AbstractContextManager[Entered], run: Callable[[FirstStep, Entered], None]
) -> None:
    """Run a script's `main` up to its first step, which is passed to `run`.

    `watching` is entered just before weights are loaded. Until then, the modules are on the meta
    device, and have no memory.
    """
    script: Any = imported(path)
    load_weights, train_step = script.load_weights, script.train_step
    entered: list[Entered] = []
    with ExitStack() as stack:

        def load(*args: Any, **kwargs: Any) -> None:
            entered.append(stack.enter_context(watching))
            load_weights(*args, **kwargs)

        def step(model: Any, optimizer: Optimizer, *args: Any) -> None:
            parts = [model] if isinstance(model, nn.Module) else model.parts
            taken = partial(train_step, model, optimizer, *args)
            run(FirstStep(taken, parts, optimizer, args), entered[0])
            raise _StepRecordedError

        script.load_weights, script.train_step = load, step
        script.new_batch = _with_values(script.new_batch)
        with suppress(_StepRecordedError):
            script.main([])


def _with_values(new_batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a `new_batch` that makes batches with values, because the model file may read them."""

    def made(*args: Any, **kwargs: Any) -> Batch:
        with _disable_current_modes():
            return new_batch(*args, **kwargs)

    return made


if __name__ == "__main__":
    print(report_of(Path(sys.argv[1])).to_json())
