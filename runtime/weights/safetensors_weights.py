"""Turns safetensors, a file or a folder of them, into this rank's parameters, slice by slice."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.tensor.shards import Place, Split, group_aliases, places, tied_names
from autopar.runtime.weights.filling import ShapeError, fill

_MOST_TOLD = 5


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder: Path,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a model on meta this rank's part of every parameter that it has in the files.

    Buffers come from the files where they are there; the rest is left to Recipe.materialise.
    """
    aliases = group_aliases(places(model))
    with ExitStack() as files:
        stored = dict(_open(folder, files))
        _check_all_there(model, aliases, stored, folder)
        for group in aliases:
            name = _stored_name(model, group, stored)
            if name is not None:
                source = stored[name].get_slice(name)
                shape = tuple(source.get_shape())
                try:
                    fill(group, source, splits, axis, shape=shape, device=device, dtype=dtype)
                except ShapeError as error:
                    refuse(
                        f"weights of {folder} do not fit: {error}",
                        fix="give those of a model of these sizes, or plan with theirs (--arg …)",
                    )


def note_unused(folder: Path | None, names: Collection[str], mesh: Mesh) -> None:
    """Say on the first rank which tensors in the files, if any, are none of the whole model's."""
    if folder is None or mesh.rank != 0:
        return
    with ExitStack() as files:
        stored = sorted(dict(_open(folder, files)))
    unused = [name for name in stored if name not in names]
    if unused:
        shown = ", ".join(unused[:_MOST_TOLD]) + (" …" if len(unused) > _MOST_TOLD else "")
        print(
            f"note: {len(unused)} of the {len(stored)} tensors in {folder} are none of the "
            f"model's, and are not used: {shown}",
            file=sys.stderr,
            flush=True,
        )


def _open(folder: Path, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Find which file holds which tensor."""
    from safetensors import SafetensorError, safe_open

    if not folder.exists():
        refuse(f"there is no {folder}", fix="--weights names a .safetensors file, or a folder")
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        refuse(
            f"{folder} holds no .safetensors file", fix="--weights names one, or the folder of them"
        )
    for path in paths:
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            refuse(
                f"{path} is no whole .safetensors file: {error}",
                fix="copy it again; a .pt file is written as one by safetensors.torch.save_file",
            )
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file


def _stored_name(model: nn.Module, group: list[Place], stored: Mapping[str, Any]) -> str | None:
    """Find a tensor under one of its names; files keep one name of a tied weight.

    That may be the name which another stage has for it.
    """
    names = (name for place in group for name in tied_names(model, place.name))
    return next((name for name in names if name in stored), None)


def _check_all_there(
    model: nn.Module, aliases: list[list[Place]], stored: Mapping[str, Any], folder: Path
) -> None:
    missing = [
        group[0].name
        for group in aliases
        if isinstance(group[0].tensor, nn.Parameter) and _stored_name(model, group, stored) is None
    ]
    if missing:
        shown = ", ".join(missing[:_MOST_TOLD]) + (" …" if len(missing) > _MOST_TOLD else "")
        has = ", ".join(sorted(stored)[:_MOST_TOLD])
        refuse(
            f"{folder} lacks {len(missing)} parameters: {shown}; it has {has} …",
            fix="give weights of this model, under its names",
        )
