"""Tries the rows of a dataset and metrics() while planning, and reports faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import getitem
from typing import Any

import torch

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import AutoparError, InputError, text_of
from autopar.planner.graph.graph import Graph, batch_key
from autopar.planner.model.guard import guarded
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.outside import state_scope
from autopar.planner.plan.plan import Model
from autopar.planner.rules.signature import leaves
from autopar.planner.trace.build import TracedSubject, build
from autopar.runtime.data.row_faults import (
    Fault,
    RowColumn,
    columns_of,
    fault_of_batch,
    fault_of_dataset,
    fault_of_row,
    is_stream,
)
from autopar.runtime.evaluation.metrics import fault_of_metrics

# Errors that the code raises on every machine; missing files, packages and variables may exist
# elsewhere.
_MISTAKES = (NameError, TypeError, AttributeError, RecursionError)
_MISTAKES_OF_ROWS = (*_MISTAKES, LookupError, ArithmeticError)
_FIRST_ROWS = 8
_READING_SECONDS = 5.0  # limit for reading rows
_ELSEWHERE = object()  # the result of code that fails here but may work on the training machine


def check_dataset(
    file: ModelFile, graph: Graph, axes: GraphAxes, tell: Callable[[str], None]
) -> None:
    """Reject rows that no plan can train on: a key is missing, or a size does not fit the weights.

    Lengths may vary. A dataset that cannot be read here may be readable on the training machine.
    `tell` is called with each note for the user.
    """
    columns = columns_of(file.example_batch(1))
    for maker in ("build_dataset", "build_eval_dataset"):
        build = getattr(file, maker)
        dataset, rows = (None, []) if build is None else _few_rows(maker, build, file, tell)
        if rows and file.build_collate is not None:
            _check_collated(file, [row for _, row in rows], columns, tell)
            continue
        for number, row in rows:
            fault = fault_of_row(row, columns, dataset, name=f"row {number} of {maker}()")
            if fault is not None:
                raise InputError(fault.found, where=str(file.path), fix=fault.fix)
            _check_sizes(f"row {number} of {maker}()", row, graph, axes, str(file.path))
        _note_plain(maker, [row for _, row in rows], file, tell)


def _check_sizes(
    name: str, row: Mapping[str, Any], graph: Graph, axes: GraphAxes, where: str
) -> None:
    """Reject a row whose sizes do not fit the model's weights."""
    weight_axes = {
        leaf.name for p in graph.parameters for d in axes.dims[p.name] for leaf in leaves(d)
    }
    for tensor in graph.inputs:
        key = batch_key(tensor)
        found, dims = list(torch.as_tensor(row[key]).shape), axes.dims[tensor][1:]
        planned = [extent.at(0) for extent in graph.tensors[tensor].shape[1:]]
        for has, wants, dim in zip(found, planned, dims, strict=True):
            names = {leaf.name for leaf in leaves(dim)}
            if has != wants and names and names <= weight_axes:
                raise InputError(
                    f"{key!r} has shape {found} in {name}, and {planned} in example_batch: the "
                    f"model has weights for {wants}, not {has}",
                    where=where,
                    fix="let both return rows of one size",
                )


def _check_collated(
    file: ModelFile,
    rows: Sequence[Any],
    columns: Mapping[str, RowColumn],
    tell: Callable[[str], None],
) -> None:
    """Reject a collate function whose batches no plan can train on."""
    assert file.build_collate is not None
    build = file.build_collate
    doing = "calling the function that build_collate() returned"
    batch = _tried(doing, lambda: build()(rows), file, tell)
    if batch is _ELSEWHERE:
        return
    fault = fault_of_batch(batch, columns, len(rows))
    if fault is not None:
        raise InputError(fault.found, where=str(file.path), fix=fault.fix)
    _note_plain("build_collate", [batch], file, tell)
    with suppress(Exception):  # it may want more rows
        _note_mixed(build(), rows, tell)


def _note_mixed(
    collate: Callable[[Sequence[Any]], Any], rows: Sequence[Any], tell: Callable[[str], None]
) -> None:
    """Call `tell` if a collate function gives a row other numbers beside other rows.

    Entries that are padded to other sizes are not compared, nor those that are drawn at random.
    """
    half = rows[: len(rows) // 2]
    part, whole, again = collate(half), collate(rows), collate(rows)
    tensors = {key: value for key, value in part.items() if isinstance(value, torch.Tensor)}
    for key, value in tensors.items():
        first = whole[key][: len(half)]
        is_drawn = not _are_close(whole[key], again[key])
        if not is_drawn and first.shape == value.shape and not _are_close(first, value):
            tell(
                f"the function that build_collate() returned gives a row another {key!r} beside "
                "other rows. It gets the rows of one microbatch of one data rank, so a batch that "
                "is split has other rows than on one device. Change each row by itself, in the "
                "dataset, or all of them in the forward: then autopar keeps them together."
            )
            return


def _are_close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one.double(), other.double()))


def _note_plain(
    maker: str, rows: Sequence[Mapping[str, Any]], file: ModelFile, tell: Callable[[str], None]
) -> None:
    """Call `tell` if example_batch has a plain number for a key, and a row has another number."""
    for key, plain in file.plain_entries().items():
        numbers = (row[key] for row in rows if key in row and _shape(row[key]) == [])
        other = next((one for one in numbers if not _is_same(one, plain)), None)
        if other is not None:
            tell(
                f"{key!r} is {other} in a row of {maker}(), and {plain} for every batch: "
                "example_batch has a plain number for it. To train on the rows' numbers, let "
                "example_batch return a tensor with one per row: "
                f"torch.full((batch_size,), {plain})."
            )


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _few_rows(
    maker: str, build: Callable[[], Any], file: ModelFile, tell: Callable[[str], None]
) -> tuple[Any, list[tuple[int, Any]]]:
    """Return a dataset and some rows with their indices; no rows if they cannot be read here.

    A stream is not read, because its first row may take long.
    """
    dataset = _tried(f"calling {maker}", build, file, tell, mistakes=_MISTAKES)
    if dataset is _ELSEWHERE:
        return dataset, []
    check = partial(fault_of_dataset, dataset, maker)
    fault = _tried(f"the length of {maker}()", check, file, tell)
    if isinstance(fault, Fault):
        raise InputError(fault.found, where=str(file.path), fix=fault.fix)
    if is_stream(dataset) or fault is _ELSEWHERE:
        return dataset, []
    rows, until, length = list[tuple[int, Any]](), time.monotonic() + _READING_SECONDS, len(dataset)
    for number in sorted({*range(_FIRST_ROWS), length // 2, length - 1} & {*range(length)}):
        read = partial(getitem, dataset, number)
        row = _tried(f"reading row {number} of {maker}()", read, file, tell)
        if row is _ELSEWHERE or time.monotonic() > until:
            break
        rows.append((number, row))
    return dataset, rows


def _tried(
    doing: str,
    read: Callable[[], Any],
    file: ModelFile,
    tell: Callable[[str], None],
    *,
    mistakes: tuple[type[BaseException], ...] = _MISTAKES_OF_ROWS,
) -> Any:
    """Run the user's code; return _ELSEWHERE if it may work on the training machine."""
    try:
        with guarded(doing, file.path):
            return read()
    except InputError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, mistakes):
            raise
        said = f"{type(cause).__name__}: {text_of(cause)}".splitlines()[0]
        tell(
            f"the dataset could not be read here ({said}, at {error.where}), so its rows were "
            "not checked. The training machine reads it."
        )
        return _ELSEWHERE


def _shape(value: Any) -> list[int] | None:
    try:
        return list(torch.as_tensor(value).shape)
    except (TypeError, ValueError, RuntimeError):
        return None


_ROWS = 2
_MOST_PARAMETERS = 10**8  # a model with so many parameters is built in about a second
_MOST_FLOPS = 10**10  # a forward with so many FLOPs takes about a second on a CPU


def check_metrics(file: ModelFile, graph: Graph, facts: Model) -> None:
    """Reject a metrics() that fails for the example batch, or whose values have no mean over rows.

    For a large model, the script checks this before it trains.
    """
    rows = graph.fixed_batch or _ROWS
    flops = 2 * facts.parameters * facts.tokens_per_row * rows
    if file.metrics is None or facts.parameters > _MOST_PARAMETERS or flops > _MOST_FLOPS:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            subject = build(file, device="cpu", dtype=None, batch_size=rows)
            outputs = _outputs(subject)
    except AutoparError:
        raise
    except Exception:  # the model may need something that only the training machine has
        return
    fault = fault_of_metrics(file.metrics(outputs, subject.batch))
    if fault is not None:
        found, fix = fault
        raise InputError(found, where=str(file.path), fix=fix)


@torch.no_grad()
def _outputs(subject: TracedSubject) -> Any:
    """Return the model's outputs in evaluation mode, and undo its side effects."""
    before = state_scope(subject.path, subject.model).snapshot()
    subject.model.eval()
    try:
        given = {key: value for key, value in subject.batch.items() if key in subject.step.keys}
        return subject.model(**given)
    finally:
        before.put_back()
