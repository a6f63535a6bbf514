"""Writes the tensors of a whole model to files, and replaces no files of other programs."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from torch import Tensor

from autopar.runtime.checkpointing.safetensors_file import Entry, write_tensors
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.locations import (
    MARK,
    Location,
    check_regular,
    head_of,
    located,
    location,
    put,
    refuse_no_file,
    refuse_no_folder,
    refuse_unwritable,
    text_of,
    write,
    written_at,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import parsed
from autopar.runtime.ranks.options import NONE
from autopar.runtime.ranks.options import WEIGHTS_ENDING as ENDING
from autopar.runtime.weights.stored_tensors import INDEX

CONFIG = "config.json"
WEIGHTS = (f"*model*{ENDING}", f"*{ENDING}.index.json")  # file names that libraries look for
# a checkpoint's files have no "format"
EXPORT_MARK: Mapping[str, str] = {"format": "pt", **MARK}
_FIX = "name another place with --export, or --export none to keep no weights"
_MOST_BYTES = 10**8  # the limit of safetensors for a header; also used for an index
_LEFT_SECONDS = 3600.0  # an unfinished file that has not grown for so long is abandoned


@dataclass(frozen=True, slots=True)
class Destination:
    """The place of an export: a .safetensors file, or a folder of them."""

    path: Location

    @property
    def is_folder(self) -> bool:
        """Whether the export goes to a folder."""
        return self.path.suffix != ENDING

    def earlier(self) -> Iterator[Location]:
        """Yield the files that an export would replace, whoever has written them."""
        if not self.is_folder:
            yield from [self.path] if self.path.exists() else []
        elif self.path.is_dir():
            for pattern in WEIGHTS:
                yield from located(self.path, pattern)

    def foreign(self, names: Iterable[str] = ()) -> Iterator[Location]:
        """Yield files that would be replaced but are not from an export."""
        others = (path for name in names if (path := self.path / name).exists())
        yield from (one for one in (*self.earlier(), *others) if not _is_export(one))


def destination(text: str, mesh: Mesh, *, beside: Location | None = None) -> Destination | None:
    """Parse --export and check it before training begins; exit if nothing can be written there.

    Files of other programs are never replaced. `beside` is the folder of checkpoints.
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
    """Exit if weights cannot be written there, or would replace files of other programs."""
    check = refuse_no_folder if to.is_folder else refuse_no_file
    check(to.path, option=option, fix=fix, beside=beside)
    try:
        check_regular(to.path / CONFIG)
        refuse_foreign(to, fix=fix)
    except OSError as error:
        refuse(f"nothing can be written to {to.path}: {error.strerror}", fix=fix)
    refuse_unwritable(to.path if to.is_folder else to.path.parent, fix=fix)


def refuse_foreign(to: Destination, names: Iterable[str] = (), *, fix: str = _FIX) -> None:
    """Exit if weights, or files of these names, are there that are not from an export."""
    foreign = next(to.foreign(names), None)
    if foreign is not None:
        found = f"{foreign} is there, and autopar has not exported it: it is not replaced"
        refuse(found, fix=fix)


@contextmanager
def written_aside(paths: Sequence[Location]) -> Iterator[Mapping[Location, Location]]:
    """Give each file a temporary name to write to; after an error, remove the temporary files."""
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
    """Remove temporary files that killed processes have left beside a path."""
    with suppress(OSError):
        for one in located(path.parent, f".{path.name}.????????.autopar-tmp"):
            if written_at(one) < time.time() - _LEFT_SECONDS:
                one.unlink()


def _is_export(path: Location) -> bool:
    """Whether a file is marked as an export of autopar."""
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


SHARD_BYTES = 5 * 10**9  # the default of Hugging Face


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A .safetensors file of an export: its name in the folder, and its tensors."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """All files of an export."""

    weights: tuple[WeightsFile, ...]
    # index files as JSON: which tensor lies in which file
    indices: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, bytes] = field(default_factory=dict)  # such as config.json

    @property
    def size_bytes(self) -> int:
        """Return the size of all weights."""
        return sum(one.size_bytes for file in self.weights for one in file.entries)


def files_of_model(
    to: Destination, entries: Sequence[Entry], tied: Mapping[str, str]
) -> ModelFiles:
    """Return the files of weights under their names in the model: one file, or shards in a folder.

    `tied` maps the other names of tied weights to the first name.
    """
    shards = list(_shards(entries, shard_bytes=SHARD_BYTES if to.is_folder else None))
    weights = tuple(
        WeightsFile(
            name=_shard_name(number, len(shards)) if to.is_folder else to.path.name,
            entries=tuple(own),
            metadata={**EXPORT_MARK, **_of_file(tied, own)},
        )
        for number, own in enumerate(shards, start=1)
    )
    return ModelFiles(weights=weights, indices={INDEX: _index(weights)} if len(shards) > 1 else {})


def write_model(
    to: Destination, files: ModelFiles, tensor_of: Callable[[WeightsFile, Entry], Tensor]
) -> None:
    """Write tensors in the order of their entries; an earlier export stays until all are written.

    Other files (such as config.json) replace existing ones only if an earlier export is there.
    """
    folder = to.path if to.is_folder else to.path.parent
    is_again = any(to.earlier())
    others = {
        name: content
        for name, content in files.others.items()
        if is_again or not (folder / name).exists()
    }
    paths = {file.name: folder / file.name for file in files.weights}
    with written_aside(tuple(paths.values())) as aside:
        for file in files.weights:
            path = paths[file.name]
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = map(partial(tensor_of, file), file.entries)
            write_tensors(aside[path], file.entries, tensors, file.metadata)
        foreign = next(to.foreign(), None)  # written by another program during the training
        if foreign is not None:
            raise FileExistsError(errno.EEXIST, "autopar has not exported it", str(foreign))
        # the index of an earlier export is removed first, because it names the other files
        for path in reversed(list(to.earlier())) if to.is_folder else ():
            path.unlink()
        for path in paths.values():
            put(aside[path], path)
    for name, text in files.indices.items():
        write(folder / name, [text.encode()])
    for name, content in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, [content])


def place_and_size(to: Destination, files: ModelFiles) -> str:
    """Return a message with the place and the size of the weights."""
    return f"in {to.path}{os.sep if to.is_folder else ''} ({files.size_bytes / 1e6:,.1f} MB)"


def _shards(entries: Sequence[Entry], *, shard_bytes: int | None) -> Iterator[list[Entry]]:
    """Yield the entries of each file of a model."""
    shard: list[Entry] = []
    room = shard_bytes
    for one in entries:
        if shard and room is not None and room < one.size_bytes:
            yield shard
            shard, room = [], shard_bytes
        shard.append(one)
        room = None if room is None else room - one.size_bytes
    yield shard


def _shard_name(number: int, count: int) -> str:
    several = f"-{number:05}-of-{count:05}" if count > 1 else ""
    return f"model{several}.safetensors"


def _of_file(tied: Mapping[str, str], entries: Sequence[Entry]) -> dict[str, str]:
    """Return the tied names of a file's tensors, as safetensors' metadata lists them."""
    names = {entry.name for entry in entries}
    return {name: first for name, first in tied.items() if first in names}


def _index(files: Sequence[WeightsFile]) -> str:
    """Return the JSON of an index: which tensor lies in which file."""
    places = {one.name: file.name for file in files for one in file.entries}
    size = sum(one.size_bytes for file in files for one in file.entries)
    index = {
        "metadata": {"total_size": size, **MARK},
        "weight_map": dict(sorted(places.items())),
    }
    return f"{json.dumps(index, indent=2)}\n"
