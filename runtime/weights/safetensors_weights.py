"""Turns safetensors, a file or a folder of them, into this rank's parameters, slice by slice."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from autopar.runtime.ranks.locations import Location, located
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.shards import Place, Split, group_aliases, places, tied_names
from autopar.runtime.weights.filling import ShapeError, fill
from autopar.runtime.weights.stored_tensors import open_tensors

_MOST_TOLD = 5


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder: Location,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    may_lack: Sequence[str] = (),
) -> list[str]:
    """Give a model on meta this rank's part of every parameter that it has in the files.

    Buffers come from the files where they are there; the rest is left to Recipe.materialise. The
    names of parameters that the files lack, or have in another shape, are returned: `may_lack`
    allows that.
    """
    aliases, left = group_aliases(places(model)), list[str]()
    with ExitStack() as files:
        stored = dict(opened(folder, files))
        spared = [_is_spared(model, group, may_lack) for group in aliases]
        _check_all_there(
            model,
            [group for group, is_spared in zip(aliases, spared, strict=True) if not is_spared],
            stored,
            folder,
        )
        for group, is_spared in zip(aliases, spared, strict=True):
            name = _stored_name(model, group, stored)
            if name is None:
                left += [group[0].name] if isinstance(group[0].tensor, nn.Parameter) else []
                continue
            source = stored[name].get_slice(name)
            shape = tuple(source.get_shape())
            try:
                fill(group, source, splits, axis, shape=shape, device=device, dtype=dtype)
            except ShapeError as error:
                if is_spared:
                    left.append(group[0].name)
                    continue
                refuse(
                    f"weights of {folder} do not fit: {error}",
                    fix="give those of a model of these sizes, or plan with theirs (--arg …); "
                    f"{_allowing(group[0].name)}",
                )
    return left


def _is_spared(model: nn.Module, group: list[Place], may_lack: Sequence[str]) -> bool:
    """Whether a tensor need not be in the files, by one of its names."""
    names = [name for place in group for name in tied_names(model, place.name)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in may_lack)


def _allowing(name: str) -> str:
    """Say how a script is told that files may lack a parameter."""
    module, dot, _ = name.rpartition(".")
    pattern = f"{module}.*" if dot else name
    return f'--allow-missing "{pattern}" has it start as it is constructed'


def note_left(names: Sequence[str], mesh: Mesh) -> None:
    """Say on the first rank of each pipeline stage what starts as it is constructed."""
    if names and mesh.data.rank == mesh.tensor.rank == 0:
        print(
            f"note: {len(names)} weights are not from --weights, but as they are constructed: "
            f"{_shown(names)}",
            file=sys.stderr,
            flush=True,
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_TOLD]) + (" …" if len(names) > _MOST_TOLD else "")


def note_unused(folder: Location, names: Collection[str], mesh: Mesh) -> None:
    """Say on the first rank which tensors in the files, if any, are none of the whole model's."""
    if mesh.rank != 0:
        return
    with ExitStack() as files:
        stored = sorted(dict(opened(folder, files)))
    unused = [name for name in stored if name not in names]
    if unused:
        print(
            f"note: {len(unused)} of the {len(stored)} tensors in {folder} are none of the "
            f"model's, and are not used: {_shown(unused)}",
            file=sys.stderr,
            flush=True,
        )


def opened(folder: Location, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Find which file holds which tensor."""
    from safetensors import SafetensorError

    for path in _paths(folder):
        try:
            file = files.enter_context(open_tensors(path))
        except SafetensorError as error:
            refuse(
                f"{path} is no whole .safetensors file: {error}",
                fix="copy it again; a .pt file is written as one by safetensors.torch.save_file",
            )
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file


def _paths(folder: Location) -> Sequence[Location]:
    """Return the file that is named, or all in a folder."""
    try:
        if not folder.exists():
            refuse(f"there is no {folder}", fix="--weights names a .safetensors file, or a folder")
        paths = [folder] if folder.is_file() else located(folder, "*.safetensors")
    except OSError as error:
        refuse(f"{folder} cannot be read: {error.strerror}", fix="--weights names a place that can")
    if not paths:
        refuse(
            f"{folder} holds no .safetensors file", fix="--weights names one, or the folder of them"
        )
    return paths


def _stored_name(model: nn.Module, group: list[Place], stored: Mapping[str, Any]) -> str | None:
    """Find a tensor under one of its names; files keep one name of a tied weight.

    That may be the name which another stage has for it.
    """
    names = (name for place in group for name in tied_names(model, place.name))
    return next((name for name in names if name in stored), None)


def _check_all_there(
    model: nn.Module, aliases: list[list[Place]], stored: Mapping[str, Any], folder: Location
) -> None:
    missing = [
        group[0].name
        for group in aliases
        if isinstance(group[0].tensor, nn.Parameter) and _stored_name(model, group, stored) is None
    ]
    if missing:
        has = ", ".join(sorted(stored)[:_MOST_TOLD])
        refuse(
            f"{folder} lacks {len(missing)} parameters: {_shown(missing)}; it has {has} …",
            fix=f"give weights of this model, under its names; {_allowing(missing[0])}",
        )
