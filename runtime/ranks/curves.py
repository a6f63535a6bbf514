"""Turns the figures of lines into curves that TensorBoard shows, from the first rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.outputs import refuse_no_folder
from autopar.runtime.ranks.refusal import refuse

_NO_CURVES = ("step", "unit", "seconds_left")


class Curves:
    """The folder of --tensorboard; where none is asked for, nothing is written.

    What an earlier training has left there of steps after `begun` is no longer shown.
    """

    def __init__(
        self, folder: Path | None, mesh: Mesh, *, begun: int, beside: Location | None = None
    ) -> None:
        self._folder = folder
        self._writer: Any = None
        if folder is None or mesh.rank != 0 or mesh.is_dry_run:
            return
        fix = "name another folder with --tensorboard"
        refuse_no_folder(folder, option="--tensorboard", fix=fix, beside=beside)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            refuse(
                f"--tensorboard needs a package that cannot be imported: {error}",
                fix="pip install tensorboard, or train without --tensorboard",
            )
        try:
            self._writer = SummaryWriter(str(folder), purge_step=begun + 1)
        except OSError as error:
            refuse(
                f"nothing can be written to {folder}: {error.strerror}",
                fix=fix,
            )

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add a point to each curve of a line; a disk that is full does not end a training."""
        if self._writer is None:
            return
        try:
            for name, value in _points(fields):
                self._writer.add_scalar(name, value, fields["step"])
            self._writer.flush()  # a training that is killed leaves what it has told
        except OSError as error:
            say(f"note: {self._folder} gets no further figures: {error.strerror}")
            self._writer = None


def _points(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of a step line or of an evaluation; other events have none."""
    if "event" not in fields:
        figures = {name: value for name, value in fields.items() if name not in _NO_CURVES}
        yield from ((f"training/{n}", value) for n, value in figures.items() if value is not None)
    elif "metrics" in fields:
        yield "evaluation/loss", fields["loss"]
        yield from ((f"evaluation/{name}", value) for name, value in fields["metrics"].items())
