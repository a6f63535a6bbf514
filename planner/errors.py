"""Errors that say what was found, where, what was expected and what to do; and exit codes."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """The exit code of a command; see docs/exit-codes.md."""

    DONE = 0
    NEGATIVE = 1  # the command worked, and its answer is no
    USAGE = 2  # bad usage or bad input
    INFEASIBLE = 3  # no plan satisfies the constraints
    UNTRACEABLE = 4  # the model cannot be traced
    NO_PLAN = 5  # the solver stopped without a plan
    MISMATCH = 6  # environment and plan do not match
    TRAINING_FAILED = 7
    PREEMPTED = 75  # a script was asked to stop, and has written a checkpoint
    INTERRUPTED = 130


class AutoparError(Exception):
    """An error that the user can act on; commands print it and exit with its code."""

    exit_code = ExitCode.USAGE

    def __init__(
        self,
        found: str,
        *,
        where: str = "",
        expected: str = "",
        fix: str = "",
        exit_code: ExitCode | None = None,
    ) -> None:
        super().__init__(found)
        self.found, self.where, self.expected, self.fix = found, where, expected, fix
        self.exit_code = exit_code or self.exit_code

    def __str__(self) -> str:
        parts = (self.found, self.where and f"at {self.where}", self.expected, self.fix)
        return "\n".join(part for part in parts if part)


class InputError(AutoparError):
    """The user's input is missing, malformed or contradictory."""


class TraceError(AutoparError):
    """The model is valid, but cannot be traced."""

    exit_code = ExitCode.UNTRACEABLE


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints; the text names the smallest obstacle."""

    exit_code = ExitCode.INFEASIBLE


class TimeLimitError(AutoparError):
    """The time limit was reached before a plan was found."""

    exit_code = ExitCode.NO_PLAN


def text_of(error: BaseException) -> str:
    """Return an error's text without C++ frames, even if the error's __str__ raises."""
    try:
        return str(error).partition("\nException raised from ")[0]
    except Exception as other:
        return f"(its __str__ raises {type(other).__name__})"


def gathered(faults: Sequence[str], *, where: str, fix: str = "") -> InputError:
    """Return one error for all faults of one input."""
    found = faults[0] if len(faults) == 1 else "\n".join(f"- {fault}" for fault in faults)
    return InputError(found, where=where, fix=fix)


class SourceSpan(NamedTuple):
    """The position of an expression in a file; its end is exclusive."""

    file: str
    line: int
    column: int  # in UTF-8 bytes, as in ast
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class LostLayersError(InputError):
    """The plan recomputes layers that the script does not call as modules."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(
            f"layer {paths[0]!r} is to be recomputed, but the script inlines its code into its "
            "caller, so there is no module call to recompute",
            expected="a layer that the script calls as a module",
            fix="plan with recompute none for it, or with another tensor degree",
        )
        self.paths = tuple(dict.fromkeys(paths))
