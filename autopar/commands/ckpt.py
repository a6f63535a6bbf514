"""`autopar ckpt`: lists, verifies, exports and compares checkpoints."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from autopar.checkpoints import (
    KeptCheckpoint,
    difference,
    export_weights,
    kept_in,
    left_in,
    verified_in,
    whole_checkpoint,
)
from autopar.commands import AS_JSON, Command, new_app
from autopar.console import print_json, print_note, results, status_line
from autopar.pages.other_pages import difference_page, list_page, verified_page
from autopar.planner.errors import ExitCode, InputError
from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.options import weights_or_none

FOLDER = Annotated[
    str,
    typer.Argument(metavar="FOLDER", help="of checkpoints, of a run, or of one checkpoint: step-N"),
]

ckpt = new_app()


@ckpt.callback()
def ckpt_options() -> None:
    """List checkpoints, verify them, export weights from one, compare two.

    No training is started, and nothing in a checkpoint is unpickled.

    Example: autopar ckpt ls checkpoints
    """


@ckpt.command("ls", cls=Command)
def list_checkpoints(folder: FOLDER, as_json: AS_JSON = False) -> None:
    """List the checkpoints of a folder: step, rows, time, size, plan, evaluation, state.

    The state is intact or damaged, judged by the sizes of files; `autopar ckpt verify` reads them.

    Example: autopar ckpt ls checkpoints
    """
    kept = kept_in(location(folder))
    left = list(left_in(location(folder)))
    if as_json:
        print_json({"checkpoints": [_as_data(one) for one in kept]})
        return
    _print(list_page(kept, left))


@ckpt.command("verify", cls=Command)
def verify_checkpoints(folder: FOLDER, as_json: AS_JSON = False) -> None:
    """Read all files of the checkpoints in a folder, and name those that have changed.

    Exits with 6 if any checkpoint is damaged.

    Example: autopar ckpt verify checkpoints/step-1000
    """
    with status_line("reading checkpoints"):
        kept = verified_in(location(folder))
    if as_json:
        print_json({"checkpoints": [_as_data(one) for one in kept]})
    else:
        _print(verified_page(kept))
    if any(one.faults for one in kept):
        raise typer.Exit(int(ExitCode.MISMATCH))


@ckpt.command("export", cls=Command)
def export_checkpoint(
    folder: FOLDER,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="PLACE", help="FILE.safetensors, or a folder for shards."
        ),
    ] = "model.safetensors",
) -> None:
    """Export the weights of a checkpoint (the newest of a folder), as a script does at its end.

    One tensor is in memory at a time. The whole checkpoint is verified first.

    Example: autopar ckpt export checkpoints/step-1000 -o out/model.safetensors
    """
    to = _place(output)
    with status_line("reading the checkpoint"):
        checkpoint = whole_checkpoint(location(folder))
        weights = export_weights(checkpoint, to)
    if weights.rounded:
        print_note(
            f"{', '.join(weights.rounded[:4])}: the training had these only in 16 bits, so they "
            "are exported rounded; the script's own --export does not round them"
        )
    step = checkpoint.manifest.moment.step
    results().print(f"The weights after step {step:,} are {weights.place}", soft_wrap=True)


@ckpt.command("diff", cls=Command)
def diff_checkpoints(
    before: Annotated[str, typer.Argument(metavar="A", help="a checkpoint, or a folder of them")],
    after: Annotated[str, typer.Argument(metavar="B", help="a checkpoint, or a folder of them")],
    every: Annotated[bool, typer.Option("--all", help="List all tensors that differ.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """Show which weights and optimizer states of two checkpoints differ, and by how much at most.

    The checkpoints may be of different plans. Exits with 1 if anything differs.

    Example: autopar ckpt diff checkpoints/step-500 checkpoints/step-1000
    """
    with status_line("comparing"):
        one, other = whole_checkpoint(location(before)), whole_checkpoint(location(after))
        found = difference(one, other)
    if as_json:
        print_json({**asdict(found), "is_equal": found.is_equal})
    else:
        for name, found_one in (("A", one), ("B", other)):
            moment, degrees = found_one.manifest.moment, found_one.manifest.origin.degrees
            line = (
                f"{name}: {found_one.folder}, step {moment.step:,}, {moment.rows:,} rows, {degrees}"
            )
            results().print(line, soft_wrap=True)
        _print(difference_page(found, every=every))
    if not found.is_equal:
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _print(parts: Iterable[RenderableType]) -> None:
    """Print tables, and each text on a line of its own."""
    for part in parts:
        results().print(part, soft_wrap=isinstance(part, Text))


def _place(output: str) -> Location:
    """Return where weights go: a .safetensors file, or a folder with any other name."""
    try:
        return location(weights_or_none(output))
    except ArgumentTypeError as error:
        raise InputError(str(error), where="-o") from None


def _as_data(one: KeptCheckpoint) -> dict[str, Any]:
    manifest = one.manifest
    known = (
        {}
        if manifest is None
        else {
            **asdict(manifest.moment),
            "torch": manifest.origin.torch,
            "plan": manifest.origin.degrees,
        }
    )
    return {
        "folder": str(one.folder),
        "is_whole": not one.faults,
        "faults": list(one.faults),
        "size_bytes": one.size_bytes,
        "written_at": one.written_at,
        **known,
    }
