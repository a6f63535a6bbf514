"""Reads the options of a script; where one is not given, the setting of the script holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.runtime.ranks.locations import Location, local_file, location
from autopar.runtime.ranks.refusal import OptionParser, from_one, from_zero, norm


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
    add("--steps", type=from_one, default=steps, help="how many to train")
    add("--lr", type=float, help="a learning rate in place of the optimizer's own")
    if workers is not None:
        add("--data", choices=("dataset", "synthetic"), default="dataset")
        add("--workers", type=from_zero, default=workers, help="how many read ahead")
    add("--clip", type=norm, default=clip, help="largest gradient norm")
    add("--seed", type=int, default=seed, help="of all that is drawn")
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
    add("--log-every", type=from_one, default=log_every, help="steps to a line")
    add("--json", action="store_true", help="log one JSON object a line")
    add("--metrics", type=local_file, help="a file that gets one JSON object a line, too")
    add("--profile-step", type=from_one, metavar="STEP", help="measured apart on each rank")
    add(
        "--tensorboard",
        type=local_file,
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
    add("--timeout", type=from_one, default=600, help="seconds without a step, after which it ends")
    add("--export", default=export, help="trained weights: .safetensors, a folder, or none")
    add("--checkpoint", default=checkpoint, help="the folder of checkpoints, or none")
    add("--checkpoint-every", type=from_one, default=checkpoint_every, help="steps to a checkpoint")
    add("--checkpoint-minutes", type=from_one, help="one is also written after so long")
    add("--keep", type=from_one, default=keep, help="how many of the newest checkpoints stay")
    add("--keep-every", type=from_one, metavar="STEPS", help="of every so many steps one stays")
    add("--resume", help="auto (the newest whole checkpoint), a folder step-N, or never")
    parser.set_defaults(eval_every=0, early_stop=None)
    if eval_every is not None:
        add("--eval-every", type=from_zero, default=eval_every, help="steps to an evaluation")
        add("--early-stop", type=from_one, help="evaluations without a better one until it ends")
    options = parser.parse_args(argv)
    options.dtype = getattr(torch, options.dtype)
    may_lack = tuple(options.allow_missing)
    if options.weights is not None:
        options.weights = StartingWeights(files=options.weights, may_lack=may_lack)
    elif may_lack:
        parser.error("--allow-missing says what --weights may lack, and there are no --weights")
    if options.early_stop is not None and not options.eval_every:
        parser.error("--early-stop counts evaluations, and --eval-every 0 has none")
    return options
