"""Lists, compares and exports checkpoints without a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.runs.run_record import read_record
from autopar.runtime.checkpointing.finding import (
    Checkpoint,
    Expected,
    check_file,
    check_size,
    checkpoints_in,
    expected_files,
    sound_manifest,
    step_of,
    unfinished_in,
)
from autopar.runtime.checkpointing.manifest import (
    NAME,
    BrokenError,
    ExportedWeight,
    Logical,
    Manifest,
)
from autopar.runtime.checkpointing.model_files import (
    Destination,
    WeightsFile,
    check_destination,
    files_of_model,
    place_and_size,
    write_model,
)
from autopar.runtime.checkpointing.owners import overlaps
from autopar.runtime.checkpointing.restoring import Reader
from autopar.runtime.checkpointing.safetensors_file import Entry, in_file_order
from autopar.runtime.checkpointing.states import STATE, WEIGHT
from autopar.runtime.checkpointing.writing import export_dtype, tied_names
from autopar.runtime.ranks.locations import (
    BROKEN,
    STEP,
    Location,
    located,
    location,
    size_of,
    written_at,
)
from autopar.runtime.tensor.shards import whole
from autopar.runtime.texts import in_a_line

FOLDER = "checkpoints"  # in the folder of a run
_UNFINISHED = "being written, or left by a training that was killed"
_BROKEN = "set aside by a training, because it was damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint in a folder; `manifest` is None if it cannot be read."""

    folder: Location
    faults: tuple[str, ...]
    size_bytes: int
    written_at: float  # seconds since 1970
    manifest: Manifest | None = None

    @property
    def evaluation(self) -> float | None:
        """The loss of an evaluation after the checkpoint's step; None without one or a manifest."""
        return None if self.manifest is None else self.manifest.moment.evaluation


def kept_in(folder: Location) -> list[KeptCheckpoint]:
    """Return the checkpoints of a folder, the oldest first; only sizes of files are checked."""
    return [_looked_at(one, check=check_size) for one in _folders(folder)]


def verified_in(folder: Location) -> list[KeptCheckpoint]:
    """Return the checkpoints of a folder, the oldest first; every byte is checked."""
    return [_looked_at(one, check=check_file) for one in _folders(folder)]


def left_in(folder: Location) -> Iterator[tuple[Location, str]]:
    """Yield folders of unfinished or damaged checkpoints, each with an explanation."""
    place = _place(folder)
    yield from ((one, _UNFINISHED) for one in unfinished_in(place))
    yield from ((one, _BROKEN) for one in located(place, f"{STEP}*{BROKEN}"))


def whole_checkpoint(path: Location) -> Checkpoint:
    """Return the checkpoint at a path, or the newest in a folder; raise if it is damaged."""
    folder = _folders(path)[-1]
    found = _looked_at(folder, check=check_file)
    if found.manifest is None or found.faults:
        raise AutoparError(
            "the checkpoint is damaged: " + "; ".join(found.faults),
            where=str(folder),
            fix="name another one, or bring back a copy; `autopar ckpt ls` lists them",
            exit_code=ExitCode.MISMATCH,
        )
    return Checkpoint(folder, found.manifest)


def _folders(path: Location) -> list[Location]:
    """Return the checkpoint at a path, or all checkpoints in a folder or in a run's folder."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "is not there"
        raise InputError(f"{path} {found}", expected="a folder of checkpoints, or one of them")
    if (path / NAME).exists() or _is_step(path):
        return [path]
    found_there = sorted(checkpoints_in(_place(path)), key=step_of)
    if not found_there:
        raise InputError(
            f"there are no checkpoints in {path}",
            expected=f"folders such as {STEP}1000, which scripts write with --checkpoint",
        )
    return found_there


def _place(folder: Location) -> Location:
    """Return the folder with the checkpoints; the given folder may be that of a run."""
    inside = folder / FOLDER
    if any(checkpoints_in(folder)):
        return folder
    if inside.is_dir():
        return inside
    record = read_record(folder) if isinstance(folder, Path) else None
    return location(record.checkpoints) if record is not None and record.checkpoints else folder


def _is_step(path: Location) -> bool:
    name = path.resolve().name
    return name.startswith(STEP) and name.removeprefix(STEP).split(".")[0].isdecimal()


def _looked_at(folder: Location, *, check: Callable[[Location, Expected], None]) -> KeptCheckpoint:
    """Read a checkpoint's manifest and check each of its files; all faults are reported."""
    faults: list[str] = []
    manifest = None
    try:
        manifest = sound_manifest(folder)
    except BrokenError as error:
        faults.append(str(error))
    files = {} if manifest is None else expected_files(manifest)
    for name, expected in files.items():
        try:
            check(folder / name, expected)
        except BrokenError as error:
            faults.append(str(error))
    there = [one for one in folder.iterdir() if one.is_file()]
    described = folder / NAME
    return KeptCheckpoint(
        folder=folder,
        faults=tuple(faults),
        size_bytes=sum(map(size_of, there)),
        written_at=written_at(described if described.exists() else folder),
        manifest=manifest,
    )


_FIX = "name another place with -o"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Where weights were exported, in words, and which tensors were rounded."""

    place: str
    rounded: tuple[str, ...]  # buffers that a training in 16 bits has rounded


def export_weights(checkpoint: Checkpoint, path: Location) -> ExportedWeights:
    """Write a checkpoint's weights to a file, or to shards in a folder, as scripts do."""
    to = Destination(path.resolve())
    check_destination(to, option="-o", fix=_FIX)
    exported = _exported(checkpoint)
    tensors = checkpoint.manifest.tensors
    held = {name: tensors[WEIGHT + name] for name in exported}
    entries = in_file_order(
        Entry(name=name, dtype=export_dtype(held[name].dtype, one.dtype), shape=held[name].shape)
        for name, one in exported.items()
    )
    model = files_of_model(to, entries, tied_names(exported))
    with ExitStack() as files:
        reader = Reader(checkpoint, files)

        def tensor_of(_: WeightsFile, entry: Entry) -> Tensor:
            full = torch.empty(entry.shape, dtype=entry.dtype)
            reader.fill(WEIGHT + entry.name, whole(entry.shape), full)
            return full

        write_model(to, model, tensor_of)
    return ExportedWeights(place=place_and_size(to, model), rounded=_rounded(checkpoint, entries))


def _exported(checkpoint: Checkpoint) -> Mapping[str, ExportedWeight]:
    """Return the weights to export; an older checkpoint has no list, so all are exported."""
    tensors, said = checkpoint.manifest.tensors, checkpoint.manifest.exported
    weights = (key.removeprefix(WEIGHT) for key in tensors if key.startswith(WEIGHT))
    every = {name: ExportedWeight(dtype=tensors[WEIGHT + name].dtype) for name in weights}
    return {name: said[name] for name in every if name in said} or every


def _rounded(checkpoint: Checkpoint, entries: Sequence[Entry]) -> tuple[str, ...]:
    tensors = checkpoint.manifest.tensors
    return tuple(
        one.name
        for one in entries
        if one.dtype.is_floating_point
        and tensors[WEIGHT + one.name].dtype.itemsize < one.dtype.itemsize
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """The difference of a tensor between two checkpoints.

    `largest` is the largest difference of an element; `largest_value` is the largest absolute value
    in the first checkpoint.
    """

    kind: str  # "weight", or the optimizer's name of a state, such as exp_avg
    name: str
    elements: int
    unequal: int
    largest: float
    largest_value: float

    @property
    def is_equal(self) -> bool:
        """Whether all elements are the same."""
        return self.unequal == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberDifference:
    """A number that an optimizer keeps for a parameter, in both checkpoints; None if missing."""

    kind: str
    name: str
    before: float | int | bool | str | None  # a string for inf, -inf and nan
    after: float | int | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """The differences between two checkpoints."""

    tensors: tuple[TensorDifference, ...]  # all tensors that both have in the same shape
    numbers: tuple[NumberDifference, ...]  # only those that differ
    unlike: tuple[str, ...]  # sentences on tensors that one lacks, or has in another shape

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same values."""
        return not (self.numbers or self.unlike) and all(one.is_equal for one in self.tensors)


def difference(before: Checkpoint, after: Checkpoint) -> CheckpointDifference:
    """Compare all weights and states of two checkpoints; their plans may differ."""
    one, other = before.manifest, after.manifest
    keys = sorted(one.tensors.keys() | other.tensors.keys())
    unlike = tuple(_unlike(one.tensors.get(key), other.tensors.get(key), key) for key in keys)
    common = [
        key
        for key, logical in one.tensors.items()
        if key in other.tensors and other.tensors[key].shape == logical.shape
    ]
    with ExitStack() as files:
        readers = Reader(before, files), Reader(after, files)
        tensors = tuple(_compared(key, *readers) for key in sorted(common, key=_weights_first))
    numbers = tuple(_numbers(before, after))
    return CheckpointDifference(
        tensors=tensors, numbers=numbers, unlike=tuple(text for text in unlike if text)
    )


def _unlike(one: Logical | None, other: Logical | None, key: str) -> str:
    what = " of ".join(_parts(key))
    if one is None or other is None:
        return f"only {'B' if one is None else 'A'} has {what}"
    if one.shape != other.shape:
        return f"{what} is {list(one.shape)} in A and {list(other.shape)} in B"
    return ""


def _compared(key: str, before: Reader, after: Reader) -> TensorDifference:
    """Compare a tensor in two checkpoints, overlap by overlap of their shards."""
    one, other = (reader.checkpoint.manifest.tensors[key] for reader in (before, after))
    unequal, largest, largest_value = 0, 0.0, 0.0
    for shard in one.shards:
        for its in other.shards:
            for place, its_place in overlaps(shard.ranges, its.ranges):
                here, there = before.box(shard, place), after.box(its, its_place)
                count, most = _apart(here, there)
                unequal += count
                largest = max(largest, most, key=_with_nan_last)
                largest_value = max(largest_value, _largest(here))
    kind, name = _parts(key)
    return TensorDifference(
        kind=kind,
        name=name,
        elements=math.prod(one.shape),
        unequal=unequal,
        largest=largest,
        largest_value=largest_value,
    )


def _apart(one: Tensor, other: Tensor) -> tuple[int, float]:
    """Return how many elements differ, and the largest difference; nan equals nan."""
    same = (one == other) | ((one != one) & (other != other))
    count = int(same.numel() - same.sum())
    if not count:
        return 0, 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    return count, float((one[~same].to(wide) - other[~same].to(wide)).abs().max())


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    wide = values if values.is_complex() else values.double()
    return float(wide.abs().nan_to_num(0.0).max())


def _weights_first(key: str) -> tuple[bool, str]:
    return not key.startswith(WEIGHT), key


def _with_nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _numbers(before: Checkpoint, after: Checkpoint) -> Iterator[NumberDifference]:
    one, other = before.manifest.scalars, after.manifest.scalars
    for key in sorted(one.keys() | other.keys()):
        values = [found[key].value if key in found else None for found in (one, other)]
        if values[0] != values[1]:
            kind, name = _parts(key)
            yield NumberDifference(kind=kind, name=name, before=values[0], after=values[1])


def _parts(key: str) -> tuple[str, str]:
    """Return the kind of a key (weight or state), and the name of the parameter."""
    if key.startswith(WEIGHT):
        return "weight", in_a_line(key.removeprefix(WEIGHT))
    kind, _, name = key.removeprefix(STATE).partition("/")
    return in_a_line(kind), in_a_line(name)
