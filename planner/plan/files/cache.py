"""Keeps traced models, layouts with prices, plans and scripts on disk.

The entry of a model depends on its arguments, and on the files, folders, variables and libraries
that were read while it was traced. It is used as long as none of these has changed. Layouts and
prices also serve other pins and machines; plans and scripts serve the same question only.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from autopar import planner
from autopar.planner.errors import InputError
from autopar.planner.files import read_given, write_whole
from autopar.planner.findings import OptimizerTraits
from autopar.planner.graph.graph import Graph
from autopar.planner.model.functions import DATA_READS, sources, state_of
from autopar.planner.plan.files.graph import GraphDocument, graph_document, graph_of
from autopar.planner.plan.plan import Model
from autopar.planner.plan.solving.prices import StoredLeast, StoredPrices
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Precision
from autopar.version import __version__

PLACE = "AUTOPAR_CACHE"  # the variable that names another folder; empty, it turns the cache off
MOST_BYTES = 2**28  # of all entries
MOST_FILES = 10_000  # that one model reads; a model that reads more is traced each time
_OURS: tuple[str, ...] = ("autopar", "autopar.planner", "autopar.codegen", "autopar.runtime")
_SYSTEM = ("/proc", "/sys", "/dev")
_WHAT = "a cached entry"
_LARGE_BYTES = 2**24  # a larger file is compared by its size and the time of its last change


def cache_folder() -> Path | None:
    """Return the folder of the entries, None if the user turned the cache off."""
    given = os.environ.get(PLACE)
    if given is not None:
        return Path(given) if given.strip() else None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autopar"


def cached_sizes(folder: Path) -> Mapping[Path, int]:
    """Return the entries of a folder with their bytes, the least recently used first."""
    found = []
    with suppress(OSError):
        for path in (one for one in folder.iterdir() if _ENTRY.fullmatch(one.name)):
            with suppress(OSError):  # another process has removed it
                state = path.stat()
                found.append((state.st_mtime_ns, path, state.st_size))
    return {path: size for _, path, size in sorted(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A traced model."""

    model: Model
    graph: GraphDocument
    optimizer: OptimizerTraits | None
    notes: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLengths:
    """The graph of a model with rows of other lengths; None if it accepts none."""

    graph: GraphDocument | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTrial:
    """The plan for one number of devices as in plan.json, or why there is none."""

    devices: int
    plan: str | None
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSearch:
    """What a search found; `fewer` are devices and seconds if fewer devices are as fast."""

    trials: tuple[CachedTrial, ...]
    fewer: tuple[int, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedScript:
    """The script of a plan, and notes to read before running it.

    A recomputed layer is `lost` if the script has no module call for it. Then there is no script.
    """

    text: str = ""
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


_NAMES: Mapping[type[Any], str] = {
    CachedModel: "model",
    CachedLengths: "lengths",
    CachedSearch: "search",
    StoredPrices: "prices",
    StoredLeast: "least",
    CachedScript: "script",
}
_ENTRY = re.compile(rf"[0-9a-f]{{40}}\.({'|'.join(_NAMES.values())})\.json")
_Content = TypeVar("_Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that an entry was made from, besides its key: paths and variables by digest."""

    paths: dict[str, str]
    libraries: dict[str, str]  # the version of each
    variables: dict[str, str]

    @classmethod
    def of(cls, model: Path) -> Sources | None:
        """Return what a model has read; None if a file has changed since, or there are too many."""
        for path, state in DATA_READS.paths.items():
            now = state_of(path)
            is_temporary = now is None and path.startswith(tempfile.gettempdir())
            if now != state and not is_temporary:
                return None
        paths = dict(_paths(model))
        if len(paths) > MOST_FILES:
            return None
        variables = {name: _of_variable(value) for name, value in DATA_READS.variables.items()}
        return cls(paths=paths, libraries=dict(_libraries()), variables=variables)

    def changed(self) -> str | None:
        """Return the name of the first source that has changed, or None."""
        for name, digest in self.variables.items():
            if _of_variable(os.environ.get(name)) != digest:
                return f"the environment variable {name}"
        paths = (path for path, digest in self.paths.items() if _of_path(path) != digest)
        libraries = (name for name, one in self.libraries.items() if _version(name) != one)
        return next(paths, None) or next(libraries, None)


class _CacheFile(BaseModel, Generic[_Content]):
    """Applies pydantic's strictness to the dataclasses: no coercion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    sources: Sources | None  # None if the content depends on the key alone
    content: _Content


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of entries; without a folder, nothing is found and nothing is kept.

    `notify` is called with a sentence if a model is outdated, unless a .py file has changed.
    """

    folder: Path | None
    notify: Callable[[str], None] = lambda _: None

    def find(self, kind: type[_Content], key: object) -> _Content | None:
        """Return an entry; None if it is absent, broken, outdated or another user's."""
        if self.folder is None:
            return None
        place = self.place(kind, key)
        try:
            if place.stat().st_uid != os.getuid():
                return None
            digest, _, text = read_given(place, what=_WHAT).partition("\n")
            if hashlib.sha256(text.encode()).hexdigest() != digest:
                return None
            entry = _file_of(kind).model_validate_json(text)
            changed = entry.sources.changed() if entry.sources is not None else None
            if changed is not None:
                if kind is CachedModel and not changed.endswith(".py"):
                    self.notify(f"the model is traced again: {changed} has changed")
                return None
            os.utime(place)  # used now: others are removed first
        except (InputError, ValueError, OSError, RecursionError):
            return None
        content: _Content = entry.content
        return content

    def keep(self, content: object, key: object, *, model: Path | None = None) -> None:
        """Write an entry, if the folder can be written; `model` is the file it was made from."""
        read = Sources.of(model) if model is not None and self.folder is not None else None
        if model is None or read is not None:
            self._write([(content, key)], read)

    def keep_all(self, entries: Iterable[tuple[object, object]]) -> None:
        """Write contents that depend on nothing but their keys."""
        self._write(entries, None)

    def _write(self, entries: Iterable[tuple[object, object]], read: Sources | None) -> None:
        if self.folder is None:
            return
        with suppress(InputError, OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for content, key in entries:
                entry = _file_of(type(content))(sources=read, content=content)
                written = entry.model_dump_json(warnings=False)  # pydantic warns of lists in tuples
                text = f"{hashlib.sha256(written.encode()).hexdigest()}\n{written}"
                write_whole(self.place(type(content), key), text, what=_WHAT, mode=0o600)
            _remove_oldest(self.folder)

    def forget(self, kind: type[Any], key: object) -> None:
        """Remove an entry that does not fit its model."""
        if self.folder is not None:
            with suppress(OSError):
                self.place(kind, key).unlink()

    def place(self, kind: type[Any], key: object) -> Path:
        """Return the file of an entry."""
        assert self.folder is not None
        name = hashlib.sha256(repr((key, _versions())).encode()).hexdigest()[:40]
        return self.folder / f"{name}.{_NAMES[kind]}.json"


NO_CACHE = Cache(None)


def _file_of(kind: type[Any]) -> type[_CacheFile[Any]]:
    return _CacheFile[kind]  # type: ignore[valid-type]  # pydantic caches each class


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a trace depends on, except what the model reads."""

    path: Path  # of the model file, resolved
    factory: str
    arguments: tuple[str, ...]
    precision: Precision
    rows: int | None  # of a microbatch, for a model that accepts only one number
    compiles: bool  # whether torch.compile was tried on the layers

    def find(self, cache: Cache) -> TracedModel | None:
        """Return the traced model from a cache; None if it is not there."""
        for asked in self._asked():
            found = cache.find(CachedModel, asked)
            if found and (asked.rows == self.rows or found.graph.fixed_batch in (None, self.rows)):
                return _traced(found)
        return None

    def _asked(self) -> Iterator[Question]:
        """Yield the questions whose answers may serve for this one; those for any rows first."""
        for rows, compiles in dict.fromkeys(product((None, self.rows), (self.compiles, True))):
            yield replace(self, rows=rows, compiles=compiles)

    def keep(self, traced: TracedModel, cache: Cache) -> None:
        """Keep a traced model, for any number of rows if it accepts them."""
        graph, notes = graph_document(traced.graph), traced.notes
        content = CachedModel(
            model=traced.model, graph=graph, optimizer=traced.optimizer, notes=notes
        )
        asked = self if traced.graph.fixed_batch is not None else replace(self, rows=None)
        cache.keep(content, asked, model=self.path)

    def forget(self, cache: Cache) -> None:
        """Remove a traced model that does not fit its model file."""
        for asked in self._asked():
            cache.forget(CachedModel, asked)


def _traced(found: CachedModel) -> TracedModel | None:
    with suppress(ValueError, RecursionError):
        graph, notes = graph_of(found.graph), found.notes
        return TracedModel(model=found.model, graph=graph, optimizer=found.optimizer, notes=notes)
    return None


def lengths_found(cache: Cache, key: object) -> tuple[Graph | None] | None:
    """Return the graph with rows of other lengths, in a tuple; None if the cache has no entry."""
    found = cache.find(CachedLengths, key)
    with suppress(ValueError, RecursionError):
        if found is not None:
            return (None if found.graph is None else graph_of(found.graph),)
    return None


def _remove_oldest(folder: Path) -> None:
    sizes = cached_sizes(folder)
    left = sum(sizes.values())
    for path, size in sizes.items():
        if left <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        left -= size


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of everything that affects entries, and a digest of edits to autopar."""
    root = Path(planner.__file__).parents[1]
    rooms = (root, *(root / name for name in ("planner", "codegen", "runtime")))
    files = sorted({one for room in rooms for one in room.resolve().rglob("*.*")})
    edits = [
        (str(one), one.stat().st_mtime_ns)
        for one in files
        if one.suffix in (".py", ".j2", ".toml") and one.is_file()
    ]
    edited = hashlib.sha256(repr(edits).encode()).hexdigest()
    deciding = ("torch", "numpy", "pulp", "highspy")
    return sys.version, *map(version, deciding), __version__, edited


def _paths(model: Path) -> Iterator[tuple[str, str]]:
    """Yield path and digest of each file that was read or imported, except installed ones."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    roots = _library_folders()
    prefixes = tuple(f"{root}/" for root in roots)  # resolving thousands of paths takes long
    own = {file for file in loaded if file and not file.startswith(prefixes)}
    paths = {Path(file).resolve() for file in own if Path(file).is_file()} | set(sources(model))
    paths |= {Path(path).resolve() for path in DATA_READS.paths if not path.startswith(prefixes)}
    for path in sorted(paths):
        if roots.isdisjoint(path.parents) and "__pycache__" not in path.parts:
            yield str(path), _of_path(str(path))


def _library_folders() -> Set[Path]:
    ours = (sys.modules[name].__file__ for name in _OURS if name in sys.modules)
    folders = {Path(file).parent for file in ours if file} | set(map(Path, _SYSTEM))
    folders |= set(map(Path, sysconfig.get_paths().values()))
    return folders | {folder.resolve() for folder in folders}


@cache
def owners() -> Mapping[str, tuple[str, ...]]:
    """Return the libraries that each installed package belongs to; slow when called first."""
    return MappingProxyType({one: tuple(found) for one, found in packages_distributions().items()})


_INSTALLED = ("site-packages", "dist-packages")
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def _libraries() -> Iterator[tuple[str, str]]:
    """Yield the installed libraries that have a loaded module.

    Leaves out copies inside another library (setuptools/_vendor), which only some processes find.
    """
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    for package, names in owners().items():
        if package in loaded:
            yield from ((name, _version(name)) for name in names if not _is_vendored(name))


def _is_vendored(library: str) -> bool:
    place = Path(str(distribution(library).locate_file("")))
    return any(folder.name in _INSTALLED for folder in place.parents)


def _of_path(path: str) -> str:
    """Return a digest of a file (see `_LARGE_BYTES`) or of a folder's names; "" if missing."""
    place = Path(path)
    try:
        if place.is_dir():
            content = repr(sorted(os.listdir(place))).encode()  # noqa: PTH208
        elif place.stat().st_size > _LARGE_BYTES:
            content = repr(state_of(path)).encode()
        elif place.is_file():
            content = place.read_bytes()
        else:
            return ""
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()


def _of_variable(value: str | None) -> str:
    return "" if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def _version(library: str) -> str:
    with suppress(PackageNotFoundError):  # `version` parses descriptions, too: ten times as slow
        found = distribution(library)
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
        return next((line[1] for line in _VERSION.finditer(text)), "")
    return ""
