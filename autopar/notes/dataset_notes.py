"""Looks at the first row of a dataset while planning: a fault of it need not wait for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from autopar.console import tell_note
from autopar.planner.axes.infer import Axes
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph, batch_key
from autopar.planner.model.model_file import ModelFile
from autopar.planner.rules.terms import leaves


def check_dataset(file: ModelFile, graph: Graph, axes: Axes) -> None:
    """Refuse rows that no plan can train on: without a key, or of a size that weights are not of.

    Lengths may vary. A dataset that cannot be read here may well be where the script runs.
    """
    if file.build_collate is not None:
        _note_collated(file)
        return  # what else a collate makes of rows is seen in whole batches alone
    for maker in ("build_dataset", "build_eval_dataset"):
        if getattr(file, maker) is not None:
            _check_first_row(maker, file, graph, axes)


def _check_first_row(maker: str, file: ModelFile, graph: Graph, axes: Axes) -> None:
    row = _first_row(getattr(file, maker))
    if not isinstance(row, Mapping):
        return
    _note_plain(maker, row, file)
    learnt = {leaf.name for p in graph.parameters for d in axes.dims[p.name] for leaf in leaves(d)}
    for name in graph.inputs:
        key = batch_key(name)
        if key not in row:
            raise InputError(
                f"a row of {maker}() has {', '.join(map(str, row))}, but no {key}",
                where=str(file.path),
                fix="let __getitem__ return a dict with the keys of example_batch",
            )
        found = _shape(row[key])
        planned = [extent.at(0) for extent in graph.tensors[name].shape[1:]]
        dims = axes.dims[name][1:]
        if found is None or len(found) != len(dims):
            continue  # the script tells more of it
        for has, wants, dim in zip(found, planned, dims, strict=True):
            names = {leaf.name for leaf in leaves(dim)}
            if has != wants and names and names <= learnt:
                raise InputError(
                    f"{key!r} is {found} in a row of {maker}(), and {planned} in "
                    f"example_batch: the model has weights for {wants}, not {has}",
                    where=str(file.path),
                    fix="let both return rows of one size",
                )


def _note_collated(file: ModelFile) -> None:
    """Look at the plain values that a collate makes of one row, if it makes a batch of that."""
    assert file.build_dataset is not None
    assert file.build_collate is not None
    row = _first_row(file.build_dataset)
    try:
        batch = file.build_collate()([row])
    except Exception:  # it may want several rows
        return
    if isinstance(batch, Mapping):
        _note_plain("build_collate", batch, file)


def _note_plain(maker: str, row: Mapping[str, Any], file: ModelFile) -> None:
    """Say where a row has a number of its own for what is the same in every example batch."""
    for key, plain in file.plain_entries().items():
        if key in row and _shape(row[key]) == [] and not _is_same(row[key], plain):
            tell_note(
                f"{key!r} is {row[key]} in a row of {maker}(), and {plain} for every batch: "
                "example_batch has a plain value there. To train on those of the rows, let it "
                f"return a tensor with an entry for each: torch.full((batch_size,), {plain})."
            )


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _first_row(maker: Callable[[], Any]) -> Any:
    """Return the first row; None where it is not to be had, or only by reading on."""
    try:
        dataset = maker()
        # A stream is not begun; torch's base class of streams has a __getitem__, which raises.
        is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        return None if is_stream else dataset[0]
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        tell_note(
            f"the dataset could not be read here ({said}), so its rows were not looked at. "
            "The script reads it where it runs."
        )
        return None


def _shape(value: Any) -> list[int] | None:
    try:
        return list(torch.as_tensor(value).shape)
    except (TypeError, ValueError, RuntimeError):
        return None
