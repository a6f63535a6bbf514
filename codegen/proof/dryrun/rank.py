"""Runs a script as one rank of many, up to the end of its first step, without computing.

`python -m autopar.codegen.proof.dryrun.rank SCRIPT` prints the report of the rank that
AUTOPAR_DRYRUN="rank/world" names.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autopar.codegen.proof.dryrun.watching import Recording, Report, recording
from autopar.codegen.proof.script_rank import imported


class _SeenError(Exception):
    """A step has been seen: nothing more is to be run."""


def report_of(path: Path) -> Report:
    """Run a script's `main`, and report on its first step as if it were the second.

    Tensors have no values from where the weights are loaded; what is built before has no memory.
    """
    script: Any = imported(path)
    load_weights, train_step = script.load_weights, script.train_step
    watched: list[Recording] = []
    with ExitStack() as stack:

        def load(*args: Any, **kwargs: Any) -> None:
            watched.append(stack.enter_context(recording()))
            load_weights(*args, **kwargs)

        def step(model: Any, optimizer: Optimizer, *args: Any) -> None:
            parts = [model] if isinstance(model, nn.Module) else model.parts
            with watched[0].second_step(parts, optimizer):
                train_step(model, optimizer, *args)
            raise _SeenError

        script.load_weights, script.train_step = load, step
        with suppress(_SeenError):
            script.main([])
    return watched[0].report()


if __name__ == "__main__":
    print(report_of(Path(sys.argv[1])).to_json())
