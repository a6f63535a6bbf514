"""A store such as s3://, in a folder that all processes see: `bucket://` and what is in it.

Objects have names and no folders. They appear when they are closed, are listed by the beginnings of
their names, and can neither be renamed nor be added to.
"""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fsspec import register_implementation
from fsspec.spec import AbstractFileSystem

from autopar.runtime.ranks.locations import StorePath

CLOSED = "bucket://closed"  # to which nobody has a key


def bucket(folder: Path) -> StorePath:
    """Return the store whose objects are in a folder of the disk."""
    folder.mkdir(exist_ok=True)
    return StorePath(f"bucket://{quote(str(folder), safe='')}/run")


def object_file(place: StorePath) -> Path:
    """Return the file of the disk that an object is."""
    return _file(place.url.removeprefix("bucket://"))


def _file(path: str) -> Path:
    root, _, key = path.partition("/")
    if root == CLOSED.removeprefix("bucket://"):
        raise PermissionError("Forbidden")
    return Path(unquote(root)) / quote(key, safe="")


class _Upload(io.BytesIO):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            hidden = self._file.with_name(f".{os.getpid()}-{id(self)}")
            hidden.write_bytes(self.getvalue())
            hidden.replace(self._file)
        super().close()


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """What fsspec asks of a store."""

    protocol = "bucket"
    ranges: list[tuple[str, int, int]] = []  # noqa: RUF012 - what this process has read in part

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path, file = self._strip_protocol(path), _file(self._strip_protocol(path))
        if "/" in path and file.is_file():
            return {"name": path, "size": file.stat().st_size, "type": "file"}
        if self._below(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        names = sorted({f"{path}/{one.split('/')[0]}" for one in self._below(path)})
        found = [self.info(one) for one in names] or [self.info(path)]
        return found if detail else [one["name"] for one in found]

    def _below(self, path: str) -> list[str]:
        root, _, key = path.partition("/")
        beginning = f"{key}/" if key else ""
        names = [unquote(one.name) for one in Path(unquote(root)).iterdir() if one.name[0] != "."]
        return [one.removeprefix(beginning) for one in names if one.startswith(beginning)]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return _file(path).open("rb")
        if mode != "wb":
            raise NotImplementedError(f"objects cannot be opened with {mode}")
        return _Upload(_file(path))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **named: Any) -> bytes:
        if end is not None:
            self.ranges.append((path.rpartition("/")[2], start, end))
        found: bytes = super().cat_file(path, start=start, end=end, **named)
        return found

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if self.isfile(path1):
            with self._open(path2, "wb") as copy:
                copy.write(_file(path1).read_bytes())

    def rm_file(self, path: str) -> None:
        _file(self._strip_protocol(path)).unlink(missing_ok=True)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(_file(self._strip_protocol(path)).stat().st_mtime, UTC)


register_implementation("bucket", Bucket, clobber=True)
