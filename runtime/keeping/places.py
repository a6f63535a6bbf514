"""Tells where weights may be left: never over a file that is no export of autopar's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from uuid import uuid4

from autopar.runtime.ranks.locations import (
    Location,
    check_regular,
    head_of,
    located,
    location,
    text_of,
    written_at,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.option_values import NONE
from autopar.runtime.ranks.option_values import WEIGHTS_ENDING as ENDING
from autopar.runtime.ranks.outputs import (
    MARK,
    refuse_no_file,
    refuse_no_folder,
    refuse_unwritable,
)
from autopar.runtime.ranks.records import parsed
from autopar.runtime.ranks.refusal import refuse

CONFIG = "config.json"
WEIGHTS = (f"*model*{ENDING}", f"*{ENDING}.index.json")  # what libraries look for in a folder
EXPORT_MARK = MappingProxyType({"format": "pt", **MARK})  # shards of checkpoints have no format
_FIX = "name another place with --export, or --export none to keep no weights"
_MOST_BYTES = 10**8  # of a header, as safetensors has it, and of an index
_LEFT_SECONDS = 3600.0  # without a byte, after which a file that was begun is nobody's


@dataclass(frozen=True, slots=True)
class Destination:
    """A .safetensors file, or a folder of them."""

    path: Location

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.suffix != ENDING

    def earlier(self) -> Iterator[Location]:
        """Yield what lies there by now and would be replaced."""
        if not self.is_folder:
            yield from [self.path] if self.path.exists() else []
        elif self.path.is_dir():
            for pattern in WEIGHTS:
                yield from located(self.path, pattern)

    def foreign(self, names: Iterable[str] = ()) -> Iterator[Location]:
        """Yield what lies there, or under other names that will be written, and is no export."""
        others = (path for name in names if (path := self.path / name).exists())
        yield from (one for one in (*self.earlier(), *others) if not _is_export(one))

    def remove_earlier(self) -> None:
        """Remove weights that an earlier training left, the index first: it would name others."""
        for path in reversed(list(self.earlier())):
            path.unlink()


def destination(text: str, mesh: Mesh, *, beside: Location | None = None) -> Destination | None:
    """Read where weights shall go, before anything is trained; leave where they cannot.

    What another program has left there is not replaced. `beside` is where checkpoints are made.
    """
    if text == NONE or mesh.is_dry_run:
        return None
    to = Destination(location(text).resolve())
    if mesh.rank == 0:
        check_destination(to, option="--export", fix=_FIX, beside=beside)
    return to


def check_destination(
    to: Destination, *, option: str, fix: str, beside: Location | None = None
) -> None:
    """Leave where weights cannot be written, or would replace what is no export."""
    check = refuse_no_folder if to.is_folder else refuse_no_file
    check(to.path, option=option, fix=fix, beside=beside)
    try:
        check_regular(to.path / CONFIG)
        refuse_foreign(to, fix=fix)
    except OSError as error:
        refuse(f"nothing can be written to {to.path}: {error.strerror}", fix=fix)
    refuse_unwritable(to.path if to.is_folder else to.path.parent, fix=fix)


def refuse_foreign(to: Destination, names: Iterable[str] = (), *, fix: str = _FIX) -> None:
    """Leave where something that is no export lies in a folder, or under names in it."""
    foreign = next(to.foreign(names), None)
    if foreign is not None:
        found = f"{foreign} is there, and autopar has not exported it: it is not replaced"
        refuse(found, fix=fix)


@contextmanager
def written_aside(paths: Sequence[Location]) -> Iterator[Mapping[Location, Location]]:
    """Give each file a name to write it under; whatever is raised, nothing stays there."""
    word = uuid4().hex[:8]
    aside = {path: path.with_name(f".{path.name}.{word}.autopar-tmp") for path in paths}
    for path in paths:
        _remove_left(path)
    try:
        yield aside
    except BaseException:
        for one in aside.values():
            with suppress(OSError):
                one.unlink()
        raise


def _remove_left(path: Location) -> None:
    """Remove what a process that was killed has begun to write in the place of a file."""
    with suppress(OSError):
        for one in located(path.parent, f".{path.name}.????????.autopar-tmp"):
            if written_at(one) < time.time() - _LEFT_SECONDS:
                one.unlink()


def _is_export(path: Location) -> bool:
    """Whether a file says that autopar has exported it."""
    try:
        if path.suffix == ".json":
            metadata, mark = parsed(text_of(path, most_bytes=_MOST_BYTES))["metadata"], MARK
        else:
            length = int.from_bytes(head_of(path, 8), "little")
            header = head_of(path, 8 + min(length, _MOST_BYTES))[8:]
            metadata, mark = parsed(header)["__metadata__"], EXPORT_MARK
        return all(metadata.get(key) == value for key, value in mark.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
