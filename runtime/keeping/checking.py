"""Compares the files of a checkpoint with what its manifest says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors import SafetensorError

from autopar.runtime.keeping.manifest import NAME, BrokenError, Manifest, read_manifest
from autopar.runtime.keeping.manifest_faults import manifest_faults
from autopar.runtime.keeping.safetensors_file import Written
from autopar.runtime.keeping.step_folders import is_step, step_of
from autopar.runtime.ranks.locations import Location, check_regular, size_of
from autopar.runtime.shown import in_a_line
from autopar.runtime.weights.stored_tensors import KINDS, open_tensors


def sound_manifest(folder: Location) -> Manifest:
    """Read a manifest that agrees with itself and with its folder, or raise BrokenError."""
    manifest = read_manifest(folder)
    for fault in manifest_faults(manifest):
        raise BrokenError(f"{NAME} has a wrong value: {fault}")
    if is_step(folder.name) and step_of(folder) != manifest.moment.step:
        raise BrokenError(f"{NAME} is of step {manifest.moment.step}")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a manifest says of a file, and of each tensor in it: its type and its shape."""

    written: Written
    entries: Mapping[str, tuple[str, tuple[int, ...]]]


def expected_files(manifest: Manifest) -> Mapping[str, Expected]:
    """Return what a manifest says of each file, by its name."""
    entries: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for one in manifest.tensors.values():
        for shard in one.shards:
            held = (KINDS[one.dtype], shard.chunks.local_shape)
            entries.setdefault(shard.file, {})[shard.entry] = held
    return {
        name: Expected(written=written, entries=entries.get(name, {}))
        for name, written in sorted(manifest.files.items())
    }


def check_size(file: Location, expected: Expected) -> None:
    """Raise BrokenError where a file is missing, or has another size than was written."""
    name, needed = file.name, expected.written.size_bytes
    try:
        check_regular(file)
        size = size_of(file)
        if size != needed:
            raise BrokenError(f"{name} has {size:,} bytes, not {needed:,}")
    except FileNotFoundError:
        raise BrokenError(f"{name} is missing") from None
    except OSError as error:
        raise BrokenError(f"{name} cannot be read: {error.strerror}") from None


def check_file(file: Location, expected: Expected) -> None:
    """Raise BrokenError where a file is not what was written; all of it is read."""
    check_size(file, expected)
    name = file.name
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != expected.written.sha256:
            raise BrokenError(f"{name} has other contents than were written")
        _check_entries(file, expected)
    except (OSError, SafetensorError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BrokenError(f"{name} cannot be read: {said}") from None


def _check_entries(file: Location, expected: Expected) -> None:
    """Raise BrokenError where a file has not the tensors that the manifest says are in it."""
    with open_tensors(file) as opened:
        there = set(opened.keys())
        for name, held in expected.entries.items():
            shown = in_a_line(name)
            if name not in there:
                raise BrokenError(f"{file.name} has none of the tensors called {shown}")
            entry = opened.get_slice(name)
            if (entry.get_dtype(), tuple(entry.get_shape())) != held:
                found = f"of the tensors in {file.name} {shown} has another type or shape"
                raise BrokenError(found)
