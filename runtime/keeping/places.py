"""Tells where a training may leave its weights: never over a file that is not autopar's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from autopar.runtime.ranks.locations import Location, located, location, write
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse

NONE = "none"
WEIGHTS = ("*model*.safetensors", "*.safetensors.index.json")  # what libraries look for in a folder
MARK = MappingProxyType({"written_by": "autopar"})
_FIX = "name another place with --export, or --export none to keep no weights"
_HEADER_BYTES = 100 * 10**6  # the most that safetensors takes


@dataclass(frozen=True, slots=True)
class Destination:
    """A .safetensors file, or a folder of them."""

    path: Location

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.suffix != ".safetensors"

    def earlier(self) -> Iterator[Location]:
        """Yield what lies there by now and would be replaced."""
        if not self.is_folder:
            yield from [self.path] if self.path.exists() else []
        elif self.path.is_dir():
            for pattern in WEIGHTS:
                yield from located(self.path, pattern)

    def remove_earlier(self) -> None:
        """Remove weights that an earlier training left, the index first: it would name others."""
        for path in reversed(list(self.earlier())):
            path.unlink()


def destination(text: str, mesh: Mesh) -> Destination | None:
    """Read where weights shall go, before anything is trained; leave where they cannot.

    What another program has left there is not replaced.
    """
    if text == NONE or mesh.is_dry_run:
        return None
    to = Destination(location(text).resolve())
    if mesh.rank == 0:
        check_destination(to, option="--export", fix=_FIX)
    return to


def check_destination(to: Destination, *, option: str, fix: str) -> None:
    """Leave where weights cannot be written, or would replace those of another program."""
    try:
        _refuse_wrong_kind(to, option=option, fix=fix)
        _refuse_foreign(to.earlier(), fix=fix)
    except OSError as error:  # of a store that lets nobody look
        refuse(f"nothing can be written to {to.path}: {error.strerror}", fix=fix)
    refuse_unwritable(to.path if to.is_folder else to.path.parent, fix=fix)


def temporary(path: Location) -> Location:
    """Return where a file is written before it is put in its place."""
    return path.with_name(f".{path.name}.tmp")


def refuse_foreign(to: Destination, names: Iterable[str]) -> None:
    """Leave where files of these names in a folder are those of another program."""
    _refuse_foreign([path for name in names if (path := to.path / name).exists()], fix=_FIX)


def _refuse_wrong_kind(to: Destination, *, option: str, fix: str) -> None:
    if to.path.exists() and to.path.is_dir() != to.is_folder:
        kind = "a folder" if to.path.is_dir() else "a file"
        refuse(f"{option}: {to.path} is {kind}", fix=fix)


def _refuse_foreign(found: Iterable[Location], *, fix: str) -> None:
    for path in found:
        if not _is_ours(path):
            refuse(f"{path} is there, and autopar has not written it: it is not replaced", fix=fix)


def refuse_unwritable(folder: Location, *, fix: str) -> None:
    """Leave where nothing can be written to a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".autopar-{os.getpid()}.tmp"
        write(probe, ())
        probe.unlink()
    except OSError as error:
        refuse(f"nothing can be written to {folder}: {error.strerror}", fix=fix)


def _is_ours(path: Location) -> bool:
    """Whether a file says that autopar has written it."""
    try:
        if path.suffix == ".json":
            metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        else:
            with path.open("rb") as file:
                length = min(int.from_bytes(file.read(8), "little"), _HEADER_BYTES)
                metadata = json.loads(file.read(length))["__metadata__"]
        return all(metadata.get(key) == value for key, value in MARK.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
