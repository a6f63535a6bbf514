"""The options of a script, and their allowed values."""

from __future__ import annotations

import math
from argparse import Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopar.runtime.launchers import usable_cores
from autopar.runtime.ranks.leaving import USAGE, ExitReason, known_place, leave, refuse
from autopar.runtime.ranks.locations import Location, is_named_as_file, local_file, location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.transport import differing

__all__ = ["read_options"]  # for scripts

NONE = "none"
WEIGHTS_ENDING = ".safetensors"
MOST_STEPS = 10**9
_HALVES = ("bfloat16", "float16")
MOST_EPOCHS, _LEAST_EPOCHS = 1e6, 1e-9
_LEAST_WORKERS, _WORKERS_OF_PROCESSOR, _WORKERS_OF_GPU = 16, 4, 2


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Parses an integer within bounds."""

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
    """Parses a number within bounds; rejects nan."""

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
    """Parse a number of epochs; 0.1 is exactly a tenth."""
    Real(_LEAST_EPOCHS, MOST_EPOCHS)(text)  # first: Fraction("1e999999999") has a billion digits
    return Fraction(text)


def share_below_one(text: str) -> float:
    """Parse a number that is at least 0 and less than 1, such as beta."""
    found = Real(0, 1)(text)
    if found == 1:
        raise ArgumentTypeError("1 is not a number below 1")
    return found


STEPS = WholeNumber(1, MOST_STEPS)
STEPS_OR_NEVER = WholeNumber(0, MOST_STEPS)
COUNT = WholeNumber(1, 10**6)
SEED = WholeNumber(0, 2**63 - 1)
RATE = Real(0, 1e6)  # a negative rate would increase the loss
NORM = Real(0)  # clipping to a negative norm would flip gradients
SECONDS = WholeNumber(1, 10**7)
MINUTES = Real(0.01, 1e6)
DECAY = Real(0, 1e6)


def workers_here(text: str) -> int:
    """Parse the number of DataLoader workers of a rank; ranks share the processors of a machine.

    "auto" means two for a GPU, so that it does not wait for rows, and none on CPUs.
    """
    if text == "auto":
        return _WORKERS_OF_GPU if torch.cuda.is_available() else 0
    shared_by = max(known_place().local_world_size, 1)
    most = _WORKERS_OF_PROCESSOR * usable_cores() // shared_by
    return WholeNumber(0, max(most, _LEAST_WORKERS))(text)


def folder_or_none(text: str) -> str:
    """Parse the path of a folder, or "none"; a file's name such as kept.json is rejected."""
    if is_named_as_file(text):
        raise ArgumentTypeError(
            f"{text} is the name of a file, and a folder is needed; for a folder: {text}/"
        )
    return text


def weights_or_none(text: str) -> str:
    """Parse the path of weights: a .safetensors file, a folder, or "none"."""
    if is_named_as_file(text, except_ending=WEIGHTS_ENDING):
        raise ArgumentTypeError(
            f"{text} is the name of a file, and weights are {WEIGHTS_ENDING} files; "
            f"for a folder: {text}/"
        )
    return text


def local_folder(text: str) -> Path:
    """Parse the path of a local folder: lines are appended to its files."""
    return local_file(folder_or_none(text))


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:30]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingWeights:
    """The files of a training's initial weights, and the parameters that the files may lack."""

    files: Location
    may_lack: tuple[str, ...] = ()  # patterns; * stands for any characters


class OptionParser(ArgumentParser):
    """Parses the options of a script; an error is printed once, not by every rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)  # `autopar run` searches for whole names

    def add_argument(self, *flags: Any, **how: Any) -> Action:
        """Add an option; its default is parsed like a typed value."""
        return super().add_argument(*flags, **as_typed(how))

    def error(self, message: str) -> NoReturn:
        """Print an error, and exit."""
        leave(ExitReason(USAGE, message, f"{self.prog} --help lists the options"))


def as_typed(how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return argparse settings that parse a default like a typed value, and reject ""."""
    if how.get("action", "store") not in ("store", "append"):
        return how
    setting = how.get("default")
    default = str(setting) if isinstance(setting, (str, int, float)) else setting
    # argparse parses defaults that are strings
    return {**how, "type": _filled(how.get("type", str)), "default": default}


def _filled(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that rejects an empty value, as a shell passes for an unset variable."""

    @wraps(read)
    def filled(text: str) -> Any:
        if not text.strip():
            raise ArgumentTypeError("it is empty; is a shell variable not set?")
        return read(text)

    return filled


class Option:
    """An option of scripts; `how` has arguments for argparse.

    `setting` names the script's constant that is the default. `needs` names a constant without
    which the script has no such option, and the value is `without`. Scripts have no WORKERS without
    a dataset, no EVAL_EVERY without an evaluation, no BETAS with the model file's own optimizer.
    `is_length` marks --steps and --epochs, of which only one may be given.
    """

    def __init__(
        self,
        name: str,
        text: str,
        *,
        setting: str = "",
        needs: str = "",
        without: Any = None,
        is_length: bool = False,
        **how: Any,
    ) -> None:
        self.name, self.how = name, {"help": text, **how}
        self.key = name.removeprefix("--").replace("-", "_")  # among the parsed options
        self.setting, self.needs, self.without = setting, needs, without
        self.is_length = is_length


OPTIONS = (
    Option("--steps", "how many steps to train", setting="STEPS", type=STEPS, is_length=True),
    Option(
        "--epochs", "passes through the dataset, such as 3 or 0.5", type=times, metavar="N",
        needs="WORKERS", is_length=True,
    ),
    Option(
        "--last-rows", "the last rows of an epoch, if too few for a step: joined with the next "
        "epoch, dropped, or a step of their own", choices=("run-on", "drop", "pad"),
        default="run-on",
        needs="WORKERS", without="run-on",
    ),
    Option("--lr", "a learning rate in place of the optimizer's own", type=RATE),
    Option(
        "--betas", "the two betas of AdamW",
        setting="BETAS", needs="BETAS", type=share_below_one, nargs=2, metavar="BETA",
    ),
    Option(
        "--weight-decay", "AdamW's weight decay, applied to matrices",
        setting="WEIGHT_DECAY", needs="WEIGHT_DECAY", type=DECAY,
    ),
    Option(
        "--warmup-steps", "steps until the highest learning rate; at most a tenth of all steps",
        setting="WARMUP_STEPS", needs="WARMUP_STEPS", type=STEPS_OR_NEVER,
    ),
    Option("--clip", "largest gradient norm", setting="CLIP_NORM", type=NORM),
    Option("--seed", "seed of all random numbers", setting="SEED", type=SEED),
    Option(
        "--data", "train on the dataset, or on example_batch in every step", needs="WORKERS",
        choices=("dataset", "synthetic"), default="dataset",
    ),
    Option(
        "--workers", "processes that read rows ahead, for each rank, or auto", setting="WORKERS",
        needs="WORKERS", type=workers_here,
    ),
    Option("--weights", "initial weights: a .safetensors file, or a folder", type=location),
    Option(
        "--allow-missing", "parameters that --weights may lack or have in another shape, such as "
        '"head.*": they keep the constructor\'s values', action="append", default=[],
        metavar="NAME",
    ),
    Option(
        "--dtype", "dtype of the computation", setting="DTYPE",
        choices=(*_HALVES, "float32", "float64"),
    ),
    Option(
        "--check-first-step", "compare the first loss with that of the whole model in plain "
        "PyTorch, on rank 0", setting="CHECK_FIRST_STEP", action=BooleanOptionalAction,
    ),
    Option("--log-every", "steps between two log lines", setting="LOG_EVERY", type=STEPS),
    Option("--json", "log each line as a JSON object", action="store_true"),
    Option(
        "--metrics", "a file to which each log line is appended as a JSON object", type=local_file,
    ),
    Option(
        "--tensorboard", "write curves for TensorBoard to this folder", type=local_folder,
        metavar="FOLDER",
    ),
    Option("--profile-step", "profile this step on each rank", type=STEPS, metavar="STEP"),
    Option(
        "--on-nan", "what to do if the loss, the gradient norm or a weight is nan or inf",
        choices=("stop", "go-on"), default="stop",
    ),
    Option(
        "--timeout", "with several ranks: end the training after so many seconds without a step, "
        "three times as many for an evaluation or a checkpoint", type=SECONDS, default=600,
    ),
    Option(
        "--eval-every", "steps between two evaluations", setting="EVAL_EVERY", needs="EVAL_EVERY",
        without=0, type=STEPS_OR_NEVER,
    ),
    Option(
        "--early-stop", "end the training after so many evaluations without improvement",
        needs="EVAL_EVERY", type=STEPS,
    ),
    Option(
        "--export", "trained weights: .safetensors, a folder, or none", setting="EXPORT",
        type=weights_or_none,
    ),
    Option(
        "--export-best", "export the weights of the best evaluation, read from its checkpoint",
        needs="EVAL_EVERY", without=False, action="store_true",
    ),
    Option(
        "--checkpoint", "the folder of checkpoints, or none", setting="CHECKPOINT",
        type=folder_or_none,
    ),
    Option(
        "--checkpoint-every", "steps between two checkpoints", setting="CHECKPOINT_EVERY",
        type=STEPS,
    ),
    Option(
        "--checkpoint-minutes", "write a checkpoint after so many minutes without one",
        type=MINUTES,
    ),
    Option("--keep", "how many of the newest checkpoints to keep", setting="KEEP", type=COUNT),
    Option(
        "--keep-every", "also keep the checkpoints of every multiple of so many steps", type=STEPS,
        metavar="STEPS",
    ),
    Option("--resume", "auto (the newest complete checkpoint), a folder step-N, or never"),
)  # fmt: skip


def read_options(
    argv: Sequence[str] | None, settings: Mapping[str, Any], parser: OptionParser | None = None
) -> Namespace:
    """Return the options of a script; options that are not given have the script's constants."""
    parser = parser or OptionParser()
    length = parser.add_mutually_exclusive_group()
    for one in OPTIONS:
        if one.needs and one.needs not in settings:
            parser.set_defaults(**{one.key: one.without})
            continue
        how = {**one.how, "default": settings[one.setting]} if one.setting else one.how
        (length if one.is_length else parser).add_argument(one.name, **as_typed(how))
    return _together(parser.parse_args(argv), parser, str(settings["DTYPE"]))


def _together(options: Namespace, parser: OptionParser, planned: str) -> Namespace:
    """Return the final options; exit if two of them contradict each other."""
    if options.dtype in _HALVES and options.dtype != (
        planned if planned in _HALVES else "bfloat16"
    ):
        parser.error(
            f"--dtype {options.dtype}: this script is written for {planned}, and only float16 "
            "needs loss scaling; plan again with --precision"
        )
    options.dtype = getattr(torch, options.dtype)
    if options.betas is not None:
        options.betas = tuple(options.betas)
    may_lack = tuple(options.allow_missing)
    if options.weights is not None:
        options.weights = StartingWeights(files=options.weights, may_lack=may_lack)
    elif may_lack:
        parser.error("--allow-missing is for --weights, and there are no --weights")
    if options.keep_every is not None and options.keep_every % options.checkpoint_every:
        parser.error(
            f"--keep-every {options.keep_every} is no multiple of --checkpoint-every "
            f"{options.checkpoint_every}: not all of these steps have a checkpoint"
        )
    if options.epochs is not None and options.data == "synthetic":
        parser.error("--epochs counts passes through the dataset, and --data synthetic reads none")
    if options.early_stop is not None and not options.eval_every:
        parser.error("--early-stop counts evaluations, and --eval-every 0 has none")
    if options.export_best and not options.eval_every:
        parser.error("--export-best needs evaluations, and --eval-every 0 has none")
    if options.export_best and options.checkpoint == NONE and options.resume in (None, "never"):
        parser.error("--export-best reads a checkpoint, and none is kept: add --checkpoint FOLDER")
    if options.export_best and options.export == NONE:
        parser.error("--export-best needs an export, and --export none exports nothing")
    return options


def in_rounds(options: Namespace, sync_every: int) -> Iterator[str]:
    """Round intervals up to outer steps, when replicas are equal; yield a note for each change."""
    for name in ("checkpoint_every", "keep_every", "eval_every"):
        every = getattr(options, name, None)
        if sync_every and every and every % sync_every:
            rounded = every + -every % sync_every
            setattr(options, name, rounded)
            option = f"--{name.replace('_', '-')}"
            yield f"note: {option} is {rounded:,}: replicas are equal every {sync_every:,} steps"


# The ranks of a training may have different values of these options.
_OF_ONE_RANK = frozenset({"json", "metrics", "tensorboard", "timeout", "workers"})


def check_same_options(options: Namespace, mesh: Mesh) -> None:
    """Exit if the ranks have different values of an option that changes what they do."""
    compared = [one for one in OPTIONS if one.key not in _OF_ONE_RANK]
    texts = [_compared(getattr(options, one.key), one) for one in compared]
    numbers = [mixed_seed(*text.encode()) for text in texts]
    for index, rank in differing(numbers, mesh.world, mesh).items():
        refuse(
            f"ranks 0 and {rank} were started with different values of {compared[index].name}",
            fix="start all ranks of a training with the same options and the same script",
        )


def _compared(value: object, option: Option) -> str:
    """Return the text of a value that is compared; of a path only whether there is one."""
    kinds = (bool, int, float, Fraction, tuple, list, torch.dtype)
    if isinstance(value, kinds) or "choices" in option.how:
        return repr(value)
    return repr(value in (None, NONE))  # nodes may name a place differently
