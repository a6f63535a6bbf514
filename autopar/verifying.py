"""Verifies a new plan at once where that takes seconds, and has the command where it does not."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.codegen.proof.comparison import Comparison
from autopar.codegen.proof.given_script import read_script_of
from autopar.codegen.proof.verification import check_fits, step_flops, verify
from autopar.console import progress, tell_note
from autopar.planner.errors import AutoparError
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.meaning import parts_apart, statistics_apart

TOLERANCE = 1e-9  # in float64, after several steps of AdamW
STEPS = 3
MANY_FLOPS = 2e12  # a step of more takes minutes on CPUs
_QUICK_SECONDS = 10.0
_START_SECONDS = 3.0  # of a process that imports torch, on a core of its own
_FLOPS_PER_SECOND = 1e9  # of a core, in float64 and small tensors


def is_quick(plan: Plan, cores: int) -> bool:
    """Whether a plan is verified in less than ten seconds, as it is of a model of tests and demos.

    Plans that mean to train otherwise than one process would differ, which the plan has told.
    """
    if parts_apart(plan) or statistics_apart(plan):
        return False
    processes = plan.arrangement.ranks + 1
    computed = 2 * (STEPS + 1) * step_flops(plan)  # by the ranks together, and by one process
    seconds = _START_SECONDS * max(1.0, processes / cores) + computed / _FLOPS_PER_SECOND
    return seconds < _QUICK_SECONDS


def verified(plan: Plan, folder: Path, script: Path) -> Comparison | None:
    """Return how far a script is from one process; a note says why where that is not to be had."""
    try:
        check_fits(plan, memory_bytes())
        ranks = plan.arrangement.ranks
        with progress(f"training {STEPS} steps on {ranks} processes and on one"):
            return verify(plan, folder, read_script_of(plan, script, folder), steps=STEPS)
    except AutoparError as error:
        why = error.found
    except Exception as error:  # the model's own, of which nothing is known on CPUs
        why = f"{type(error).__name__}: {error}"
    tell_note(f"the plan could not be verified on the CPUs here: {why}")
    return None


def memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verify_command(plan: Plan, folder: Path) -> str:
    """Return the command that verifies a plan, by a smaller model if it is too large for CPUs."""
    is_large = step_flops(plan) > MANY_FLOPS
    smaller = " --arg NAME=VALUE (a smaller model: see its build_model)" if is_large else ""
    return f"autopar verify {folder}{smaller}"
