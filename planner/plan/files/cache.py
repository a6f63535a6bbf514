"""Keeps traced models on disk: planned again, a model that has not changed needs no torch.

An entry is made from the files and the versions of libraries that were loaded while the model was
traced. It is taken as long as all of these are as they were.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from autopar import planner
from autopar.planner.errors import InputError
from autopar.planner.files import read_given, write_whole
from autopar.planner.findings.traits import OptimizerTraits
from autopar.planner.model.functions import sources
from autopar.planner.plan.files.graph import GraphDocument, graph_document, graph_of
from autopar.planner.plan.plan import Model
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Precision
from autopar.version import __version__

PLACE = "AUTOPAR_CACHE"  # the variable that names another folder; an empty one turns it off
MOST_BYTES = 2**28  # of all entries
_ENDING = ".model.json"
_OURS = ("autopar", "autopar.planner", "autopar.codegen", "autopar.runtime")


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
    for path in folder.glob(f"*{_ENDING}"):
        with suppress(OSError):  # another process has removed it
            state = path.stat()
            found.append((state.st_mtime_ns, path, state.st_size))
    return {path: size for _, path, size in sorted(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a trace depends on, except contents of files and versions of libraries."""

    path: Path  # of the model file, resolved
    factory: str
    arguments: tuple[str, ...]
    precision: Precision
    rows: int | None  # of a microbatch, for a model that accepts only one number

    def places(self, folder: Path) -> tuple[Path, Path]:
        """Return the path of the entry for any number of rows, and of the one for these rows."""
        asked = (str(self.path), self.factory, self.arguments, self.precision.value, _versions())
        names = (hashlib.sha256(repr((asked, rows)).encode()) for rows in (None, self.rows))
        anyhow, of_these = (folder / f"{one.hexdigest()[:40]}{_ENDING}" for one in names)
        return anyhow, of_these


def _versions() -> tuple[str, ...]:
    """Return the versions of Python, torch and autopar, and a digest of the planner's edits."""
    root = Path(planner.__file__).parent
    files = sorted(root.rglob("*.py"))
    edits = [(str(one.relative_to(root)), one.stat().st_mtime_ns) for one in files]
    edited = hashlib.sha256(repr(edits).encode()).hexdigest()
    return sys.version, version("torch"), __version__, edited


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """An entry: a traced model, with the files and libraries that it was traced from."""

    files: dict[str, str]  # the digest of each
    libraries: dict[str, str]  # the version of each
    model: Model
    graph: GraphDocument
    optimizer: OptimizerTraits | None
    notes: tuple[str, ...] | None

    @property
    def is_current(self) -> bool:
        """Whether files and libraries are as they were."""
        libraries = all(_version(name) == one for name, one in self.libraries.items())
        return libraries and all(_digest(Path(file)) == one for file, one in self.files.items())


class _CacheFile(BaseModel):
    """Applies pydantic's strictness to the dataclasses: no coercion, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    entry: CachedModel


def recalled(question: Question) -> TracedModel | None:
    """Return a traced model from the cache; None if it is absent or has changed."""
    folder = cache_folder()
    if folder is None:
        return None
    of_any, of_these = question.places(folder)
    for place in dict.fromkeys((of_any, of_these)):
        found = _read(place)
        if found is None:
            continue
        fixed = found.graph.fixed_batch
        if place == of_these or fixed in (None, question.rows):
            with suppress(OSError):
                os.utime(place)  # it was used
            return found
    return None


def _read(place: Path) -> TracedModel | None:
    """Return an entry; None if it is absent, broken, outdated or another user's."""
    try:
        if place.stat().st_uid != os.getuid():
            return None
        digest, _, text = read_given(place, what="a cached model").partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None
        entry = _CacheFile.model_validate_json(f'{{"entry":{text}}}').entry
        if not entry.is_current:
            return None
        return TracedModel(
            model=entry.model,
            graph=graph_of(entry.graph),
            optimizer=entry.optimizer,
            notes=entry.notes,
            is_recalled=True,
        )
    except (InputError, ValueError, OSError, RecursionError):
        return None


def keep(question: Question, traced: TracedModel) -> None:
    """Write a traced model into the cache, if its folder can be written."""
    folder = cache_folder()
    if folder is None:
        return
    entry = CachedModel(
        files=dict(_files(question.path)),
        libraries=dict(_libraries()),
        model=traced.model,
        graph=graph_document(traced.graph),
        optimizer=traced.optimizer,
        notes=traced.notes,
    )
    written = _ADAPTER.dump_json(entry, warnings=False)  # of lists in rows, which are JSON already
    text = f"{hashlib.sha256(written).hexdigest()}\n{written.decode()}"
    of_any, of_these = question.places(folder)
    place = of_any if traced.graph.fixed_batch is None else of_these
    with suppress(InputError, OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(place, text, what="a cached model", mode=0o600)
        _remove_oldest(folder)


def forget(question: Question) -> None:
    """Remove an entry that does not fit its model."""
    folder = cache_folder()
    for place in question.places(folder) if folder is not None else ():
        with suppress(OSError):
            place.unlink()


def _remove_oldest(folder: Path) -> None:
    sizes = cached_sizes(folder)
    left = sum(sizes.values())
    for path, size in sizes.items():
        if left <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        left -= size


def _files(model: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of loaded modules that are neither of Python nor of a library."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in loaded if file} | set(sources(model))
    roots = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    ours = (sys.modules[name].__file__ for name in _OURS if name in sys.modules)
    roots |= {Path(file).resolve().parent for file in ours if file}
    for path in sorted(paths):
        if roots.isdisjoint(path.parents) and (digest := _digest(path)):
            yield str(path), digest


def _libraries() -> Iterator[tuple[str, str]]:
    """Yield the installed libraries that have a loaded module."""
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    for package, owners in packages_distributions().items():
        if package in loaded:
            yield from ((owner, _version(owner)) for owner in owners)


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


_ADAPTER = TypeAdapter(CachedModel)
