"""Turns the description of a checkpoint into JSON, and back: what is kept, where, of which plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import torch

from autopar.runtime.keeping.places import MARK
from autopar.runtime.keeping.safetensors_file import Written
from autopar.runtime.keeping.states import Scalar
from autopar.runtime.ranks.locations import Location, size_of
from autopar.runtime.tensor.chunks import Chunks
from autopar.runtime.weights.stored_tensors import DTYPES, KINDS

NAME = "checkpoint.json"
FORMAT = 1


class BrokenError(Exception):
    """A checkpoint that is not whole; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A shard of a logical tensor in a file."""

    file: str
    entry: str
    chunks: Chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """A logical tensor, and where its shards are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Stored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a training stands."""

    step: int
    rows: int  # of the data that it has seen
    updates: int  # steps that the optimizer took: fp16 leaves some out
    loss_scale: float | None = None
    calm_steps: int = 0
    evaluation: float | None = None  # the loss of one after this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What wrote a checkpoint."""

    torch: str
    model: str  # the digest of its model file
    plan: str  # what stands for which rank holds what
    degrees: str = ""  # the same for people: dp 2 · tp 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A weight that an export of the whole model has."""

    dtype: torch.dtype  # that the constructor chose
    aliases: tuple[str, ...] = ()  # other names of a tied weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint but the numbers themselves."""

    moment: Moment
    origin: Origin
    files: Mapping[str, Written]
    tensors: Mapping[str, Logical]
    scalars: Mapping[str, Scalar]
    exported: Mapping[str, Exported]  # of the weights, by their names


def to_text(manifest: Manifest) -> str:
    """Return a manifest as JSON that tells whether it has been changed."""
    content = {
        **MARK,
        "format": FORMAT,
        "moment": asdict(manifest.moment),
        "origin": asdict(manifest.origin),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "scalars": {key: asdict(one) for key, one in manifest.scalars.items()},
        "tensors": {key: _logical_as_data(one) for key, one in manifest.tensors.items()},
        "exported": {
            key: {"dtype": KINDS[one.dtype], "aliases": one.aliases}
            for key, one in manifest.exported.items()
            if one.dtype in KINDS
        },
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint; raises BrokenError where it is not whole."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        digest = content.pop("sha256")
        if digest != _digest(content):
            raise BrokenError(f"{NAME} has been changed")
        if content["format"] != FORMAT:
            raise BrokenError(f"{NAME} is of format {content['format']}, and this reads {FORMAT}")
        return Manifest(
            moment=Moment(**content["moment"]),
            origin=Origin(**content["origin"]),
            files={name: Written(**file) for name, file in content["files"].items()},
            scalars={key: Scalar(**one) for key, one in content["scalars"].items()},
            tensors={key: _logical(one) for key, one in content["tensors"].items()},
            exported={key: _exported(one) for key, one in content.get("exported", {}).items()},
        )
    except FileNotFoundError:
        raise BrokenError(f"it has no {NAME}") from None
    except OSError as error:
        raise BrokenError(f"{NAME} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BrokenError(f"{NAME} is no description of a checkpoint") from None


def sha256_of(path: Location) -> str:
    """Return what stands for the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_size(folder: Location, name: str, written: Written) -> None:
    """Raise BrokenError where a file is missing, or has another size than was written."""
    try:
        if PurePath(name).name != name:
            raise BrokenError(f"{name} is no file of a checkpoint")
        size = size_of(folder / name)
        if size != written.size_bytes:
            raise BrokenError(f"{name} has {size:,} bytes, not {written.size_bytes:,}")
    except FileNotFoundError:
        raise BrokenError(f"{name} is missing") from None
    except OSError as error:
        raise BrokenError(f"{name} cannot be read: {error.strerror}") from None


def check_file(folder: Location, name: str, written: Written) -> None:
    """Raise BrokenError where a file is not what was written; all of it is read."""
    check_size(folder, name, written)
    try:
        digest = sha256_of(folder / name)
    except OSError as error:
        raise BrokenError(f"{name} cannot be read: {error.strerror}") from None
    if digest != written.sha256:
        raise BrokenError(f"{name} has other contents than were written")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _logical_as_data(one: Logical) -> dict[str, Any]:
    shards = [
        {"file": shard.file, "entry": shard.entry, "ranges": shard.chunks.ranges}
        for shard in one.shards
    ]
    return {"dtype": KINDS[one.dtype], "shape": one.shape, "shards": shards}


def _exported(data: Mapping[str, Any]) -> Exported:
    return Exported(dtype=DTYPES[data["dtype"]], aliases=tuple(data["aliases"]))


def _logical(data: Mapping[str, Any]) -> Logical:
    shape = tuple(data["shape"])
    shards = (
        Stored(
            file=shard["file"],
            entry=shard["entry"],
            chunks=Chunks(
                shape, tuple(tuple((low, high) for low, high in dim) for dim in shard["ranges"])
            ),
        )
        for shard in data["shards"]
    )
    return Logical(dtype=DTYPES[data["dtype"]], shape=shape, shards=tuple(shards))
