"""The options of a script, and what each may be."""

from __future__ import annotations

import argparse
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from autopar.runtime.ranks.locations import Location, is_named_as_file, location
from autopar.runtime.ranks.refusal import OptionParser, as_typed, refuse

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingWeights:
    """The files that a training starts from, and the names that they may lack."""

    files: Location
    may_lack: tuple[str, ...] = ()  # in which * stands for any characters


def read_options(
    argv: Sequence[str] | None,
    *,
    steps: int,
    clip: float | None,
    seed: int,
    dtype: str,
    log_every: int,
    export: str,
    checkpoint: str,
    checkpoint_every: int,
    keep: int,
    check_first_step: bool,
    workers: int | None = None,
    eval_every: int | None = None,
    betas: tuple[float, float] | None = None,
    weight_decay: float | None = None,
    warmup_steps: int | None = None,
) -> argparse.Namespace:
    """Return the options.

    `workers` and `eval_every` are None where there is no such dataset, what AdamW and its schedule
    are made of where the model file makes its own.
    """
    parser = OptionParser()
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", **as_typed({"type": STEPS, "default": steps, "help": "how many to train"})
    )
    add("--lr", type=RATE, help="a learning rate in place of the optimizer's own")
    if betas is not None:
        text = "of AdamW: of the mean of the gradients, and of their squares"
        add("--betas", type=share_below_one, nargs=2, default=betas, metavar="BETA", help=text)
        decayed = "of AdamW, on matrices"
        add("--weight-decay", type=DECAY, default=weight_decay, help=decayed)
    if warmup_steps is not None:
        warmed = "until the highest rate; a tenth of all steps at most"
        add("--warmup-steps", type=STEPS_OR_NEVER, default=warmup_steps, help=warmed)
    parser.set_defaults(epochs=None, last_rows="run-on")
    if workers is not None:
        _add_rows(parser, length)
        add("--data", choices=("dataset", "synthetic"), default="dataset")
        add("--workers", type=workers_here(), default=workers, help="how many read ahead")
    add("--clip", type=NORM, default=clip, help="largest gradient norm")
    add("--seed", type=SEED, default=seed, help="of all that is drawn")
    add("--weights", type=location, help="the .safetensors to start from")
    add(
        "--allow-missing",
        action="append",
        default=[],
        metavar="NAME",
        help='parameters that --weights may lack, as "head.*": they start as they are constructed',
    )
    half = "float16" if dtype == "float16" else "bfloat16"  # float16 needs a loss that is scaled
    add("--dtype", choices=(half, "float32", "float64"), default=dtype, help="to compute in")
    add("--log-every", type=STEPS, default=log_every, help="steps to a line")
    add("--json", action="store_true", help="log one JSON object a line")
    add("--metrics", type=local_file, help="a file that gets one JSON object a line, too")
    add("--profile-step", type=STEPS, metavar="STEP", help="measured apart on each rank")
    add(
        "--tensorboard",
        type=local_folder,
        metavar="FOLDER",
        help="where its curves are, for TensorBoard",
    )
    add(
        "--check-first-step",
        action=argparse.BooleanOptionalAction,
        default=check_first_step,
        help="compare the first loss with that of the whole model in plain PyTorch, on rank 0",
    )
    add("--on-nan", choices=("stop", "go-on"), default="stop", help="where the loss is no number")
    add("--timeout", type=SECONDS, default=600, help="seconds without a step, after which it ends")
    weights = "trained weights: .safetensors, a folder, or none"
    add("--export", type=weights_or_none, default=export, help=weights)
    folder = "the folder of checkpoints, or none"
    add("--checkpoint", type=folder_or_none, default=checkpoint, help=folder)
    add("--checkpoint-every", type=STEPS, default=checkpoint_every, help="steps to a checkpoint")
    add("--checkpoint-minutes", type=MINUTES, help="one is also written after so long")
    add("--keep", type=COUNT, default=keep, help="how many of the newest checkpoints stay")
    add("--keep-every", type=STEPS, metavar="STEPS", help="of every so many steps one stays")
    add("--resume", help="auto (the newest whole checkpoint), a folder step-N, or never")
    parser.set_defaults(eval_every=0, early_stop=None, export_best=False)
    if eval_every is not None:
        every = "steps to an evaluation"
        add("--eval-every", type=STEPS_OR_NEVER, default=eval_every, help=every)
        add("--early-stop", type=STEPS, help="evaluations without a better one until it ends")
        best = "export the weights of the best evaluation, of which there is a checkpoint"
        add("--export-best", action="store_true", help=best)
    return _together(parser.parse_args(argv), parser)


def _add_rows(parser: OptionParser, length: argparse._MutuallyExclusiveGroup) -> None:
    """Add what is said of the rows of a dataset."""
    often = {"type": times, "metavar": "N", "help": "how often to go through the dataset, or 0.5"}
    length.add_argument("--epochs", **as_typed(often))
    parser.add_argument(
        "--last-rows",
        choices=("run-on", "drop", "pad"),
        default="run-on",
        help="of an epoch, too few for a step: they are one with rows of the next epoch, none, or "
        "one of their own",
    )


def _together(options: argparse.Namespace, parser: OptionParser) -> argparse.Namespace:
    """Return options as the training takes them; leave where two of them contradict each other."""
    options.dtype = getattr(torch, options.dtype)
    if "betas" in options:
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
