"""Runs a script twice as one rank: as it is, for what it prints, and once more in float64, watched.

Ranks import this file, so it imports no more than they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from autopar.codegen.proof.comparison import RankTrained
from autopar.codegen.proof.script_rank import imported, run_script


def run_twice(path: str, steps: int) -> tuple[tuple[float, ...], RankTrained]:
    """Return the losses that a script prints in fp32, and what it trains in float64."""
    arguments = ["--steps", str(steps), "--log-every", "1", "--json"]
    printed = printed_by(path, steps)
    with redirect_stdout(StringIO()):
        return printed, run_script(path, [*arguments, "--dtype", "float64"])


def printed_by(path: str, steps: int) -> tuple[float, ...]:
    """Return the losses that a script prints in fp32."""
    arguments = ["--steps", str(steps), "--log-every", "1", "--json", "--dtype", "float32"]
    return _printed(imported(Path(path)).main, arguments)


def _printed(
    main: Callable[[Sequence[str]], object], arguments: Sequence[str]
) -> tuple[float, ...]:
    with redirect_stdout(StringIO()) as page:
        main(arguments)
    lines = (line for line in page.getvalue().splitlines() if line.startswith("{"))
    return tuple(float(json.loads(line)["loss"]) for line in lines)
