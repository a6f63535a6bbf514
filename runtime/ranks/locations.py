"""Locations of files, on disks and in object stores, and checks of where files may be written."""

from __future__ import annotations

import errno
import io
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from uuid import uuid4

from autopar.runtime.ranks.leaving import refuse

_SCHEME = "://"


@dataclass(frozen=True, slots=True)
class StorePath:
    """A file or folder in a store that fsspec supports, with the methods of pathlib.Path.

    A store has no empty folders and cannot rename: `replace` copies. Every error of a store,
    whatever its library raises, becomes an OSError.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with the dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> StorePath:
        """The folder that contains this file or folder."""
        return StorePath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        """Return the path of another name in the same folder."""
        return self.parent / name

    def resolve(self) -> StorePath:
        """Return this path: a URL does not depend on the working directory."""
        return self

    def exists(self) -> bool:
        """Whether this is a file, or a folder with anything in it."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Whether this is a folder with anything in it."""
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        """Whether this is a file."""
        return (self._info() or {}).get("type") == "file"

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the entries of this folder."""
        with self._opened() as (store, path):
            found = store.ls(path, detail=False)
        for name in sorted({PurePosixPath(one).name for one in found}):
            yield self / name

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """Yield the entries of this folder that match a pattern."""
        if self.is_dir():
            yield from (one for one in self.iterdir() if fnmatchcase(one.name, pattern))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists once it has a file."""

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[io.BufferedIOBase]:
        """Open a file to read it."""
        with self._opened() as (store, path), store.open(path, mode) as file:
            yield file

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the contents of a file, or a range of bytes."""
        with self._opened() as (store, path):
            found: bytes = store.cat_file(path, start=start, end=end)
        return found

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of a file."""
        return self.read_bytes().decode(encoding)

    def write(self, blocks: Iterable[bytes | memoryview]) -> None:
        """Write a file block by block. It appears once all blocks are written."""
        with self._opened() as (store, path):
            try:
                file = store.open(path, "wb")
            except FileNotFoundError:
                self.parent._make_folder()
                file = store.open(path, "wb")
        try:
            for block in blocks:  # an error in making a block is not an OSError
                with _as_os_errors(self.url):
                    file.write(block)
        except BaseException:
            with suppress(Exception):  # closing the unfinished file creates it, so it is removed
                file.close()
                self.unlink()
            raise
        with _as_os_errors(self.url):
            file.close()

    def unlink(self) -> None:
        """Remove a file."""
        with self._opened() as (store, path):
            store.rm_file(path)

    def replace(self, target: StorePath) -> None:
        """Move a file over another one, or move a folder file by file."""
        if self.is_dir():
            target._make_folder()
            for one in list(self.iterdir()):
                one.replace(target / one.name)
            return
        if target.is_file():  # not all stores overwrite
            target.unlink()
        with self._opened() as (store, path):
            store.mv(path, _file_system(target.url)[1])

    def size_bytes(self) -> int:
        """Return a file's size."""
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return int(info["size"] or 0)

    def written_at(self) -> float:
        """Return when a file was written, in seconds since 1970."""
        with self._opened() as (store, path):
            return float(store.modified(path).timestamp())

    def _info(self) -> dict[str, Any] | None:
        """Return the store's entry for this path, or None if there is none.

        A store that does not respond raises an error, so that a file does not seem missing.
        """
        try:
            with self._opened() as (store, path):
                found: dict[str, Any] = store.info(path)
        except FileNotFoundError:
            return None
        return found

    def _make_folder(self) -> None:
        """Create the folder, for stores that have folders."""
        with self._opened() as (store, path):
            store.makedirs(path, exist_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; raise every error inside as an OSError."""
        with _as_os_errors(self.url):
            yield _file_system(self.url)


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it, without cached listings."""
    from fsspec.core import url_to_fs  # imported here, because most trainings need no store

    store, path = url_to_fs(url)
    store.invalidate_cache()
    return store, path


Location: TypeAlias = Path | StorePath


def location(text: str) -> Location:
    """Parse a path or URL; exit if it is invalid, or if no installed library reads its store."""
    if not text.strip():
        refuse("a path is empty", fix="name a file or a folder; is a shell variable not set?")
    scheme, separator, name = text.partition(_SCHEME)
    if not separator:
        return Path(text)
    if not name.strip("/") or any(one in name for one in "*?["):
        refuse(f"{text} names no place in a store", fix=f"{scheme}://bucket/folder, without * ? [")
    place = StorePath(text.rstrip("/"))
    try:
        _file_system(place.url)
    except Exception as error:
        refuse(
            f"{scheme}:// cannot be opened: {error}",
            fix="pip install what fsspec reads it with: s3fs for s3://, gcsfs for gs://, adlfs for "
            "abfs://, pyarrow for hdfs://",
        )
    return place


def local_file(text: str) -> Path:
    """Parse the path of a local file: lines are appended to it, which stores cannot do."""
    if _SCHEME in text:
        raise ArgumentTypeError(f"{text}: stores cannot append to a file; name one on a disk")
    return Path(text)


def located(folder: Location, pattern: str) -> list[Location]:
    """Return the entries of a folder that match a pattern, sorted by name."""
    return sorted(folder.glob(pattern), key=str)


def check_regular(place: Location) -> None:
    """Raise OSError for a pipe or a device: opening one may block for ever."""
    if isinstance(place, Path) and place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket, not a file", str(place))


def text_of(file: Location, *, most_bytes: int) -> str:
    """Return the text of a file; raise OSError if it is no regular file, or too large."""
    check_regular(file)
    size = size_of(file)
    if size > most_bytes:
        told = f"it has {size:,} bytes, more than the {most_bytes:,} allowed"
        raise OSError(errno.EFBIG, told, str(file))
    return file.read_text(encoding="utf-8")


def head_of(file: Location, count: int) -> bytes:
    """Return the first `count` bytes of a file, or all if it has fewer."""
    check_regular(file)
    if isinstance(file, StorePath):
        return file.read_bytes(0, min(count, file.size_bytes()))
    with file.open("rb") as opened:
        return opened.read(count)


def write(to: Location, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a file block by block; afterwards it is on the disk or in the store.

    After an error, the half-written file is removed, because disk space may be short.
    """
    if isinstance(to, StorePath):
        to.write(blocks)
        return
    check_regular(to)
    file = to.open("wb")  # if opening fails, an old file stays
    try:
        with file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            to.unlink()
        raise


def put(what: Location, place: Location) -> None:
    """Move a file or a folder to its final name; a file of that name is replaced."""
    if isinstance(what, StorePath):
        what.replace(StorePath(str(place)))
    else:
        what.replace(str(place))


def size_of(file: Location) -> int:
    """Return a file's size."""
    return file.stat().st_size if isinstance(file, Path) else file.size_bytes()


def written_at(file: Location) -> float:
    """Return when a file was written, in seconds since 1970."""
    return file.stat().st_mtime if isinstance(file, Path) else file.written_at()


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Raise every error inside as an OSError with the URL."""
    try:
        yield
    except Exception as error:
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        missing = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
        raise OSError(getattr(error, "errno", None) or missing, said, url) from error


# in files that autopar writes and may replace
MARK: Mapping[str, str] = {"written_by": "autopar"}
MANIFEST = "checkpoint.json"  # a folder with this file is a checkpoint
STEP, UNFINISHED, BROKEN = "step-", ".tmp", ".broken"
_OF_A_STEP = re.compile(rf"{STEP}\d+({re.escape(UNFINISHED)}|{re.escape(BROKEN)})?")
_MARKED = re.compile(rb'"written_by": *"autopar"')
_OF_A_FILE = re.compile(r"\.[A-Za-z]\w*")


def is_named_as_file(text: str, *, except_ending: str = "") -> bool:
    """Whether a path seems to name a file: w.bin does; llama-3.1 and w.bin/ do not.

    An existing folder never does. `except_ending` is an ending that does not make a path a file.
    """
    with suppress(OSError):  # the name is too long
        if text.endswith("/") or ("://" not in text and Path(text).is_dir()):
            return False
    _, dot, ending = text.rpartition("/")[2].rpartition(".")
    return bool(_OF_A_FILE.fullmatch(dot + ending)) and dot + ending != except_ending


def refuse_no_file(
    path: Location, *, option: str, fix: str, beside: Location | None = None
) -> None:
    """Exit if the path is a folder, cannot be accessed, or lies inside a checkpoint.

    `beside` is the folder where this training writes checkpoints, if any.
    """
    try:
        check_regular(path)
        if path.is_dir():
            refuse(f"{option}: {path} is a folder", fix=fix)
        _refuse_in_checkpoint(path, option=option, fix=fix, beside=beside)
    except OSError as error:  # also of a store that denies access
        refuse(f"{option}: nothing can be written to {path}: {error.strerror}", fix=fix)


def refuse_no_folder(
    path: Location, *, option: str, fix: str, beside: Location | None = None
) -> None:
    """Exit if the path is a file, cannot be accessed, or lies inside a checkpoint."""
    try:
        check_regular(path)
        if path.is_file():
            refuse(f"{option}: {path} is a file", fix=fix)
        _refuse_in_checkpoint(path, option=option, fix=fix, beside=beside)
    except OSError as error:
        refuse(f"{option}: nothing can be written to {path}: {error.strerror}", fix=fix)


def refuse_unwritable(folder: Location, *, fix: str) -> None:
    """Create a folder if needed; exit if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".autopar-{uuid4().hex}.tmp"
        write(probe, ())
        probe.unlink()
    except OSError as error:
        refuse(f"nothing can be written to {folder}: {error.strerror}", fix=fix)


def _refuse_in_checkpoint(
    path: Location, *, option: str, fix: str, beside: Location | None
) -> None:
    for one in _with_parents(path.resolve()):
        if _is_checkpoint(one, beside):
            refuse(f"{option}: {path} is in the checkpoint {one}, which stays as it is", fix=fix)


def _with_parents(path: Location) -> Iterator[Location]:
    """Yield a path and all folders that contain it."""
    if isinstance(path, Path):
        yield from (path, *path.parents)
        return
    while path.name and not path.url.endswith(":/"):
        yield path
        path = path.parent


def _is_checkpoint(folder: Location, beside: Location | None) -> bool:
    """Whether a folder is a checkpoint, or has a name that a checkpoint will get."""
    with suppress(OSError):  # the folder may be unreadable
        if _has_manifest(folder):
            return True
        if _OF_A_STEP.fullmatch(folder.name):
            others = located(folder.parent, f"{STEP}*")
            return folder.parent == beside or any(map(_has_manifest, others))
    return False


def _has_manifest(folder: Location) -> bool:
    """Whether a folder has a manifest of autopar; other programs use the file's name, too."""
    file = folder / MANIFEST
    return file.is_file() and _MARKED.search(head_of(file, 200)) is not None
