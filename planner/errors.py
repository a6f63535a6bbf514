"""The one family of errors, each with what was found, where, expected, and to do; exit codes."""

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says to its caller; docs/exit-codes.md tells it to users."""

    DONE = 0
    NEGATIVE = 1  # the command worked and its answer is no
    USAGE = 2  # bad usage or bad input
    INFEASIBLE = 3  # no plan satisfies the constraints
    UNTRACEABLE = 4  # the model cannot be traced
    NO_PLAN = 5  # the solver stopped without a plan
    MISMATCH = 6  # environment and plan do not match
    TRAINING_FAILED = 7
    PREEMPTED = 75  # a script was told to stop, and has kept what it takes to go on
    INTERRUPTED = 130


class AutoparError(Exception):
    """An error that a person can act on; the commands print it and leave with its exit code."""

    exit_code = ExitCode.USAGE

    def __init__(self, found: str, *, where: str = "", expected: str = "", fix: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        parts = (self.found, self.where and f"at {self.where}", self.expected, self.fix)
        return "\n".join(part for part in parts if part)


class InputError(AutoparError):
    """Something that the person gave is missing, malformed or contradicts itself."""


class TraceError(AutoparError):
    """The model is well formed, but no graph of it can be had."""

    exit_code = ExitCode.UNTRACEABLE


class InfeasibleError(AutoparError):
    """No plan satisfies what was declared; the text names the least that stands in the way."""

    exit_code = ExitCode.INFEASIBLE


class TimeLimitError(AutoparError):
    """The time limit came before the first plan."""

    exit_code = ExitCode.NO_PLAN


def text_of(error: BaseException) -> str:
    """Return the text of an error of others without frames of C++; its method may raise."""
    try:
        return str(error).partition("\nException raised from ")[0]
    except Exception as other:
        return f"(its text cannot be told: {type(other).__name__})"


def gathered(faults: Sequence[str], *, where: str, fix: str = "") -> InputError:
    """Return one error that tells all faults of one input together."""
    found = faults[0] if len(faults) == 1 else "\n".join(f"- {fault}" for fault in faults)
    return InputError(found, where=where, fix=fix)
