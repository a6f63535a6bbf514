"""Turns the description of a checkpoint into JSON, and back: what is kept, where, of which plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeAlias

import torch

from autopar.runtime.keeping.safetensors_file import Written
from autopar.runtime.keeping.states import Scalar
from autopar.runtime.ranks.locations import Location, text_of
from autopar.runtime.ranks.outputs import MANIFEST, MARK
from autopar.runtime.ranks.records import Check, Count, NotARecordError, parsed, record
from autopar.runtime.tensor.chunks import Chunks
from autopar.runtime.weights.stored_tensors import DTYPES, KINDS

NAME = MANIFEST
FORMAT = 1
MOST_STEPS = 10**9
_MOST_BYTES = 2**28

Steps: TypeAlias = Annotated[
    int, Check(f"0 to {MOST_STEPS:,}", lambda steps: 0 <= steps <= MOST_STEPS)
]
Positive: TypeAlias = Annotated[float, Check("above 0", lambda number: number > 0)]
TypeName: TypeAlias = Annotated[str, Check("a type of elements", DTYPES.__contains__)]
Word: TypeAlias = Annotated[
    str, Check("a line of at most 200 characters", lambda t: len(t) <= 200 and t.isprintable())
]
Range: TypeAlias = tuple[Count, Count]


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

    step: Steps
    rows: Count  # of the data that it has seen
    updates: Steps  # steps that the optimizer took: fp16 leaves some out
    loss_scale: Positive | None = None
    calm_steps: Steps = 0
    evaluation: float | None = None  # the loss of one after this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What wrote a checkpoint."""

    torch: Word
    model: Word  # the digest of its model file
    plan: Word  # what stands for which rank holds what
    degrees: Word = ""  # the same for people: dp 2 · tp 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardDocument:
    """A shard as it lies in the file."""

    file: str
    entry: str
    ranges: tuple[tuple[Range, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorDocument:
    """A logical tensor as it lies in the file."""

    dtype: TypeName
    shape: tuple[Count, ...]
    shards: tuple[_ShardDocument, ...]

    def read(self) -> Logical:
        """Return the tensor."""
        shards = (
            Stored(file=one.file, entry=one.entry, chunks=Chunks(self.shape, one.ranges))
            for one in self.shards
        )
        return Logical(dtype=DTYPES[self.dtype], shape=self.shape, shards=tuple(shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExportedDocument:
    """A weight of an export as it lies in the file."""

    dtype: TypeName
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A manifest as it lies in the file, in this order."""

    written_by: str
    format: int
    moment: Moment
    origin: Origin
    files: Mapping[str, Written]
    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, _TensorDocument]
    exported: Mapping[str, _ExportedDocument] = field(default_factory=dict)


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05}.safetensors"


def to_text(manifest: Manifest) -> str:
    """Return a manifest as JSON that tells whether it has been changed."""
    content = {
        **MARK,
        "format": FORMAT,
        "moment": asdict(manifest.moment),
        "origin": asdict(manifest.origin),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "scalars": {key: asdict(one) for key, one in manifest.scalars.items()},
        "tensors": {key: _as_data(one) for key, one in manifest.tensors.items()},
        "exported": {
            key: {"dtype": KINDS[one.dtype], "aliases": one.aliases}
            for key, one in manifest.exported.items()
            if one.dtype in KINDS
        },
    }
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint; raises BrokenError where it does not describe one."""
    with _told_as_broken():
        content = _content(folder)
        if content.pop("sha256") != _digest(content):
            raise BrokenError(f"{NAME} has been changed")
        if content.get("format") != FORMAT:
            told = str(content.get("format"))[:20]
            raise BrokenError(f"{NAME} is of format {told}, and this reads {FORMAT}")
        return _manifest_of(record(_Document, content))


def read_moment(folder: Location) -> Moment:
    """Read where a training stood alone: of large models, the rest takes seconds to look at."""
    with _told_as_broken():
        return record(Moment, _content(folder).get("moment"), where="moment")


def _content(folder: Location) -> dict[str, Any]:
    content = parsed(text_of(folder / NAME, most_bytes=_MOST_BYTES))
    if not isinstance(content, dict) or "sha256" not in content:
        raise BrokenError(f"{NAME} is no description of a checkpoint")
    return content


@contextmanager
def _told_as_broken() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BrokenError(f"it has no {NAME}") from None
    except OSError as error:
        raise BrokenError(f"{NAME} cannot be read: {error.strerror}") from None
    except NotARecordError as error:
        raise BrokenError(f"{NAME} has a wrong value: {error}") from None
    except (ValueError, RecursionError):
        raise BrokenError(f"{NAME} is no description of a checkpoint") from None


def _manifest_of(document: _Document) -> Manifest:
    return Manifest(
        moment=document.moment,
        origin=document.origin,
        files=document.files,
        scalars=document.scalars,
        tensors={key: one.read() for key, one in document.tensors.items()},
        exported={
            key: Exported(dtype=DTYPES[one.dtype], aliases=one.aliases)
            for key, one in document.exported.items()
        },
    )


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _as_data(one: Logical) -> dict[str, Any]:
    shards = [
        {"file": shard.file, "entry": shard.entry, "ranges": shard.chunks.ranges}
        for shard in one.shards
    ]
    return {"dtype": KINDS[one.dtype], "shape": one.shape, "shards": shards}
