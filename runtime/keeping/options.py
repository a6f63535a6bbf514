"""Adds the options of keeping a training to those of a script."""

from __future__ import annotations

from autopar.runtime.refusal import OptionParser, from_one


def add_keeping(
    parser: OptionParser, *, export: str, checkpoint: str, every: int, keep: int
) -> None:
    """Add them, with the defaults that a script has in its settings."""
    add = parser.add_argument
    add("--export", default=export, help="trained weights: .safetensors, a folder, or none")
    add("--checkpoint", default=checkpoint, help="the folder of checkpoints, or none")
    add("--checkpoint-every", type=from_one, default=every, help="steps to a checkpoint")
    add("--keep", type=from_one, default=keep, help="how many of the newest checkpoints stay")
    add("--resume", help="auto (the newest whole checkpoint), a folder step-N, or never")
