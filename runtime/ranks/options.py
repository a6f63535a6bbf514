"""The options of a script, and what each may be."""

from __future__ import annotations

import argparse
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from autopar.runtime.ranks.locations import Location, is_named_as_file, location
from autopar.runtime.ranks.refusal import OptionParser, as_typed, refuse

NONE = "none"
WEIGHTS_ENDING = ".safetensors"
MOST_STEPS = 10**9
_HALVES = ("bfloat16", "float16")
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


def workers_here(text: str) -> int:
    """Return a number of processes that read ahead for a rank; ranks share the processors here."""
    shared_by = max(number_in("LOCAL_WORLD_SIZE", default=1), 1)
    most = _WORKERS_OF_PROCESSOR * (os.cpu_count() or 1) // shared_by
    return Whole(0, max(most, _LEAST_WORKERS))(text)


def number_in(variable: str, *, default: int) -> int:
    """Return the whole number in an environment variable; leave where there is something else."""
    text = os.environ.get(variable)
    if text is None:
        return default
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingWeights:
    """The files that a training starts from, and the names that they may lack."""

    files: Location
    may_lack: tuple[str, ...] = ()  # in which * stands for any characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of scripts.

    Its default is a `setting` of the script: a constant of this name. A script without the constant
    that it `needs` has no such option, and the value is what it is `without`: without WORKERS there
    is no dataset, without EVAL_EVERY no evaluation, without BETAS the model file's own optimizer.
    """

    name: str
    how: Mapping[str, Any]  # argparse reads it
    setting: str = ""
    needs: str = ""
    without: Any = None
    is_length: bool = False  # of a training: one of them at most is given

    @property
    def key(self) -> str:
        """Its name among the options that are read."""
        return self.name.removeprefix("--").replace("-", "_")


def _option(
    name: str,
    text: str,
    *,
    setting: str = "",
    needs: str = "",
    without: Any = None,
    is_length: bool = False,
    **how: Any,
) -> Option:
    return Option(
        name=name,
        how={"help": text, **how},
        setting=setting,
        needs=needs,
        without=without,
        is_length=is_length,
    )


OPTIONS = (
    _option("--steps", "how many to train", setting="STEPS", type=STEPS, is_length=True),
    _option(
        "--epochs", "how often to go through the dataset, or 0.5", type=times, metavar="N",
        needs="WORKERS", is_length=True,
    ),
    _option(
        "--last-rows", "of an epoch, too few for a step: they are one with rows of the next epoch, "
        "none, or one of their own", choices=("run-on", "drop", "pad"), default="run-on",
        needs="WORKERS", without="run-on",
    ),
    _option("--lr", "a learning rate in place of the optimizer's own", type=RATE),
    _option(
        "--betas", "of AdamW: of the mean of the gradients, and of their squares",
        setting="BETAS", needs="BETAS", type=share_below_one, nargs=2, metavar="BETA",
    ),
    _option(
        "--weight-decay", "of AdamW, on matrices",
        setting="WEIGHT_DECAY", needs="WEIGHT_DECAY", type=DECAY,
    ),
    _option(
        "--warmup-steps", "until the highest rate; a tenth of all steps at most",
        setting="WARMUP_STEPS", needs="WARMUP_STEPS", type=STEPS_OR_NEVER,
    ),
    _option("--clip", "largest gradient norm", setting="CLIP_NORM", type=NORM),
    _option("--seed", "of all that is drawn", setting="SEED", type=SEED),
    _option(
        "--data", "the dataset, or example_batch again and again", needs="WORKERS",
        choices=("dataset", "synthetic"), default="dataset",
    ),
    _option(
        "--workers", "how many read ahead", setting="WORKERS", needs="WORKERS", type=workers_here
    ),
    _option("--weights", "the .safetensors to start from", type=location),
    _option(
        "--allow-missing", 'parameters that --weights may lack, as "head.*": they start as they '
        "are constructed", action="append", default=[], metavar="NAME",
    ),
    _option(
        "--dtype", "to compute in; 16 bits are those of the plan", setting="DTYPE",
        choices=(*_HALVES, "float32", "float64"),
    ),
    _option(
        "--check-first-step", "compare the first loss with that of the whole model in plain "
        "PyTorch, on rank 0", setting="CHECK_FIRST_STEP", action=argparse.BooleanOptionalAction,
    ),
    _option("--log-every", "steps to a line", setting="LOG_EVERY", type=STEPS),
    _option("--json", "log one JSON object a line", action="store_true"),
    _option("--metrics", "a file that gets one JSON object a line, too", type=local_file),
    _option(
        "--tensorboard", "where its curves are, for TensorBoard", type=local_folder,
        metavar="FOLDER",
    ),
    _option("--profile-step", "measured apart on each rank", type=STEPS, metavar="STEP"),
    _option(
        "--on-nan", "where the loss is no number", choices=("stop", "go-on"), default="stop"
    ),
    _option(
        "--timeout", "seconds without a step, after which it ends", type=SECONDS, default=600
    ),
    _option(
        "--eval-every", "steps to an evaluation", setting="EVAL_EVERY", needs="EVAL_EVERY",
        without=0, type=STEPS_OR_NEVER,
    ),
    _option(
        "--early-stop", "evaluations without a better one until it ends", needs="EVAL_EVERY",
        type=STEPS,
    ),
    _option(
        "--export", "trained weights: .safetensors, a folder, or none", setting="EXPORT",
        type=weights_or_none,
    ),
    _option(
        "--export-best", "export the weights of the best evaluation, of which there is a "
        "checkpoint", needs="EVAL_EVERY", without=False, action="store_true",
    ),
    _option(
        "--checkpoint", "the folder of checkpoints, or none", setting="CHECKPOINT",
        type=folder_or_none,
    ),
    _option(
        "--checkpoint-every", "steps to a checkpoint", setting="CHECKPOINT_EVERY", type=STEPS
    ),
    _option("--checkpoint-minutes", "one is also written after so long", type=MINUTES),
    _option("--keep", "how many of the newest checkpoints stay", setting="KEEP", type=COUNT),
    _option("--keep-every", "of every so many steps one stays", type=STEPS, metavar="STEPS"),
    _option("--resume", "auto (the newest whole checkpoint), a folder step-N, or never"),
)  # fmt: skip


def read_options(argv: Sequence[str] | None, settings: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of a script; what is not given is as its constants have it."""
    parser = OptionParser()
    length = parser.add_mutually_exclusive_group()
    for one in OPTIONS:
        if one.needs and one.needs not in settings:
            parser.set_defaults(**{one.key: one.without})
            continue
        how = {**one.how, "default": settings[one.setting]} if one.setting else one.how
        (length if one.is_length else parser).add_argument(one.name, **as_typed(how))
    return _together(parser.parse_args(argv), parser, str(settings["DTYPE"]))


def _together(
    options: argparse.Namespace, parser: OptionParser, planned: str
) -> argparse.Namespace:
    """Return options as the training takes them; leave where two of them contradict each other."""
    if options.dtype in _HALVES and options.dtype != (
        planned if planned in _HALVES else "bfloat16"
    ):
        parser.error(
            f"--dtype {options.dtype}: this script is written for {planned}, and float16 alone "
            "needs a loss that is scaled; plan for it with --precision"
        )
    options.dtype = getattr(torch, options.dtype)
    if options.betas is not None:
        options.betas = tuple(options.betas)
    may_lack = tuple(options.allow_missing)
    if options.weights is not None:
        options.weights = StartingWeights(files=options.weights, may_lack=may_lack)
    elif may_lack:
        parser.error("--allow-missing says what --weights may lack, and there are no --weights")
    if options.keep_every is not None and options.keep_every % options.checkpoint_every:
        parser.error(
            f"--keep-every {options.keep_every} is no multiple of --checkpoint-every "
            f"{options.checkpoint_every}: no checkpoint would stay"
        )
    if options.epochs is not None and options.data == "synthetic":
        parser.error("--epochs counts times through the dataset, and --data synthetic reads none")
    if options.early_stop is not None and not options.eval_every:
        parser.error("--early-stop counts evaluations, and --eval-every 0 has none")
    if options.export_best:
        _check_best(options, parser)
    return options


def _check_best(options: argparse.Namespace, parser: OptionParser) -> None:
    """Leave where there is no best evaluation, no checkpoint of it, or nothing is exported."""
    if not options.eval_every:
        parser.error("--export-best is of the best evaluation, and --eval-every 0 has none")
    if options.checkpoint == NONE and options.resume in (None, "never"):
        parser.error("--export-best reads a checkpoint, and none is kept: add --checkpoint FOLDER")
    if options.export == NONE:
        parser.error("--export-best says what is exported, and --export none exports nothing")
