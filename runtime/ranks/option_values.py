"""Turns the text of an option into its value, or says what stands there in its place."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from autopar.runtime.ranks.outputs import is_named_as_file
from autopar.runtime.ranks.refusal import refuse

NONE = "none"
WEIGHTS_ENDING = ".safetensors"
MOST_STEPS = 10**9
MOST_EPOCHS, _LEAST_EPOCHS = 1e6, 1e-9
_LEAST_WORKERS, _WORKERS_OF_PROCESSOR = 16, 4


@dataclass(frozen=True, slots=True)
class Whole:
    """Reads a whole number within bounds."""

    least: int
    most: int

    def __call__(self, text: str) -> int:
        """Return the number."""
        with suppress(ValueError):
            found = int(text)
            if found > self.most:
                raise ArgumentTypeError(f"{_short(text)} is more than {self.most:,}")
            if found >= self.least:
                return found
        raise ArgumentTypeError(f"{_short(text)} is not a whole number of {self.least} or more")


@dataclass(frozen=True, slots=True)
class Real:
    """Reads a number within bounds; nan is within none."""

    least: float
    most: float = math.inf

    def __call__(self, text: str) -> float:
        """Return the number."""
        with suppress(ValueError):
            found = float(text)
            if found > self.most:
                raise ArgumentTypeError(f"{_short(text)} is more than {self.most:,g}")
            if found >= self.least:
                return found
        raise ArgumentTypeError(f"{_short(text)} is not a number of {self.least:g} or more")


def times(text: str) -> Fraction:
    """Return how many times the training goes through its rows; 0.1 is a tenth, and no rounded one.

    Bounds come first: a fraction of 1e999999999 would be a number of so many digits.
    """
    Real(_LEAST_EPOCHS, MOST_EPOCHS)(text)
    return Fraction(text)


def share_below_one(text: str) -> float:
    """Return a number from 0 to below 1, as betas are."""
    found = Real(0, 1)(text)
    if found == 1:
        raise ArgumentTypeError("1 is not a number below 1")
    return found


STEPS = Whole(1, MOST_STEPS)
STEPS_OR_NEVER = Whole(0, MOST_STEPS)
COUNT = Whole(1, 10**6)
SEED = Whole(0, 2**63 - 1)
RATE = Real(0, 1e6)  # below 0 a training would climb
NORM = Real(0)  # clipped to less than 0, gradients would point the other way
SECONDS = Whole(1, 10**7)
MINUTES = Real(0.01, 1e6)
DECAY = Real(0, 1e6)


def workers_here() -> Whole:
    """Return what reads the number of processes of a rank, which share the processors here."""
    shared_by = max(number_in("LOCAL_WORLD_SIZE", usual=1), 1)
    most = _WORKERS_OF_PROCESSOR * (os.cpu_count() or 1) // shared_by
    return Whole(0, max(most, _LEAST_WORKERS))


def number_in(variable: str, *, usual: int) -> int:
    """Return the whole number in an environment variable; leave where there is something else."""
    text = os.environ.get(variable)
    if text is None:
        return usual
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        found = f"the environment variable {variable} is {text!r}, and no whole number"
        refuse(found, fix="torchrun sets it; without torchrun, leave it unset")
    return int(text)


def folder_or_none(text: str) -> str:
    """Return the place of a folder, or none; a name such as kept.json is meant for a file."""
    if is_named_as_file(text):
        raise ArgumentTypeError(
            f"{text} is the name of a file, and a folder is asked for; if it is one: {text}/"
        )
    return text


def weights_or_none(text: str) -> str:
    """Return the place of weights: a .safetensors file, a folder, or none."""
    if is_named_as_file(text, but=WEIGHTS_ENDING):
        raise ArgumentTypeError(
            f"{text} is the name of a file, and weights are {WEIGHTS_ENDING} files; "
            f"if it is a folder: {text}/"
        )
    return text


def local_file(text: str) -> Path:
    """Return a file to which lines are added, which stores cannot do."""
    if "://" in text:
        raise ArgumentTypeError(f"{text}: stores add no lines to a file; name one on a disk")
    return Path(text)


def local_folder(text: str) -> Path:
    """Return a folder of files to which lines are added."""
    return local_file(folder_or_none(text))


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:30]}…"
