"""What scripts do beside training, on ranks as strict as those of nccl."""

from __future__ import annotations

import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.runtime.checkpointing.finding import checkpoints_in, verify_checkpoint
from autopar.runtime.checkpointing.signals import PREEMPTED
from tests.codegen.kinds import plan_of
from tests.strict.ranks import run_on_strict_ranks

ASKED = 3  # the step in which a signal comes


def stopped(path: str, folder: str) -> object:
    """Train by a script until a signal to the last rank stops all; return the exit code."""
    script: Any = imported(Path(path))
    step, steps = script.train_step, 0

    def stepped(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == ASKED and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)

    script.train_step = stepped
    arguments = ["--steps", "100000", "--checkpoint", folder, "--checkpoint-every", "100000"]
    with (
        pytest.raises(SystemExit) as left,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        script.main(arguments)
    for one in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_DFL)
    return left.value.code


@pytest.mark.parametrize("kind", ["zero1", "zero_bubble_v"])
def test_a_signal_to_one_rank_stops_all_and_leaves_a_whole_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    script, kept = write_script(plan_of(kind), tmp_path), tmp_path / "kept"
    assert run_on_strict_ranks(stopped, 2, str(script), str(kept)) == [PREEMPTED] * 2
    (found,) = checkpoints_in(kept)
    assert verify_checkpoint(found).moment.step >= ASKED
