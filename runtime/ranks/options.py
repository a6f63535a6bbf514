"""Reads the options of a script; where one is not given, the setting of the script holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.option_values import (
    COUNT,
    MINUTES,
    NORM,
    RATE,
    SECONDS,
    SEED,
    STEPS,
    STEPS_OR_NEVER,
    folder_or_none,
    local_file,
    local_folder,
    weights_or_none,
    workers_here,
)
from autopar.runtime.ranks.refusal import OptionParser


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
) -> argparse.Namespace:
    """Return the options; `workers` and `eval_every` are None where there is no such dataset."""
    parser = OptionParser()
    add = parser.add_argument
    add("--steps", type=STEPS, default=steps, help="how many to train")
    add("--lr", type=RATE, help="a learning rate in place of the optimizer's own")
    if workers is not None:
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
    parser.set_defaults(eval_every=0, early_stop=None)
    if eval_every is not None:
        every = "steps to an evaluation"
        add("--eval-every", type=STEPS_OR_NEVER, default=eval_every, help=every)
        add("--early-stop", type=STEPS, help="evaluations without a better one until it ends")
    return _together(parser.parse_args(argv), parser)


def _together(options: argparse.Namespace, parser: OptionParser) -> argparse.Namespace:
    """Return options as the training takes them; leave where two of them contradict each other."""
    options.dtype = getattr(torch, options.dtype)
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
    if options.early_stop is not None and not options.eval_every:
        parser.error("--early-stop counts evaluations, and --eval-every 0 has none")
    return options
