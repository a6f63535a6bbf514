"""Turns a model file into a Graph: torch.export on the meta device, then plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import AutoparError, InputError, TraceError
from autopar.planner.graph.graph import Graph, batch_key
from autopar.planner.graph.ops import LOSS_CALL, StateChange, refs
from autopar.planner.model.guard import ModelMovedError
from autopar.planner.model.model_file import ModelFile
from autopar.planner.precision import Precision
from autopar.planner.rules.signature import Dim, leaves
from autopar.planner.trace.build import TRACED_BATCH, TracedSubject, build, wide_buffers
from autopar.planner.trace.calls import CannotReplayError
from autopar.planner.trace.convert import convert
from autopar.planner.trace.export import (
    DecidedByValuesError,
    DevicesMeetError,
    UnlikeSizesError,
    export,
)
from autopar.planner.trace.model_checks import parts_in_eval_mode
from autopar.planner.trace.nodes import channels_last_inputs
from autopar.planner.trace.record import TraceRecording
from autopar.planner.trace.scatter import with_expected_rows
from autopar.planner.trace.symbols import RowsInNumberError
from autopar.planner.trace.traps import LeftBehind, counts_outside, depends_on_outside
from autopar.planner.trace.unlike_types import UnlikeTypesError, check_types, traced_with_few

__all__ = ["trace", "trace_for_rows", "with_other_lengths"]

# If tracing on meta fails, a model is traced on the CPU, unless its parameters exceed this size.
_LARGEST_REAL_BYTES = 4 * 2**30


# the device and the dtype of a model in one attempt to trace it; None: the model's own dtype
_Attempt = tuple[str, torch.dtype | None]
# For 16-bit plans. Some models look at the dtype of their weights to decide whether they cast, and
# only a trace in 16 bits shows where an fp32 tensor meets 16-bit weights.
_HALF_ATTEMPTS = (("meta", torch.bfloat16), ("cpu", torch.bfloat16))
# For fp32 plans. In a trace in float64, `x.float()` is an op; in float32, it leaves none. If the
# trace in float64 fails, for example because dtypes mix, the model is traced in its own dtype, and
# then on the CPU.
_ATTEMPTS = (("meta", torch.float64), ("meta", None), ("cpu", None))


def trace(
    model_file: ModelFile,
    *,
    precision: Precision = Precision.FP32,
    batch_size: int = TRACED_BATCH,
    like: Graph | None = None,
) -> Graph:
    """Trace one training step, from the batch to the loss; the graph serves every batch size.

    For a 16-bit plan, the buffers that the trace `like` cast to 16 bits are cast here, too. If
    types clash in 16 bits, this raises. If the trace in 16 bits fails for another reason, a trace
    in fp32 is returned.
    """
    if not precision.is_half:
        return _traced(model_file, batch_size, _ATTEMPTS)
    in_half = partial(_traced, model_file, batch_size, _HALF_ATTEMPTS)
    try:
        if like is not None:
            return in_half([one.name for one in like.buffers if one.narrowed])
        return traced_with_few(in_half, wide=partial(_wide_buffers, model_file, batch_size))
    except (ModelMovedError, UnlikeSizesError):
        raise
    except (InputError, TraceError) as error:
        # If this fails, too, 16 bits are not the reason, and its error is raised instead.
        graph = _traced(model_file, batch_size, _ATTEMPTS)
        if isinstance(error, UnlikeTypesError):
            raise error.in_half(precision) from None
        return graph


def _wide_buffers(model_file: ModelFile, batch_size: int) -> Mapping[str, Tensor]:
    for device in ("meta", "cpu"):
        with suppress(InputError, TraceError):
            subject = build(model_file, device=device, dtype=None, batch_size=batch_size)
            return wide_buffers(subject.model)
    return {}


def _traced(
    model_file: ModelFile,
    batch_size: int,
    attempts: Sequence[_Attempt],
    narrowed: Collection[str] = (),
) -> Graph:
    failures: list[AutoparError] = []
    size_bytes = 0
    for device, dtype in attempts:
        if device == "cpu" and size_bytes > _LARGEST_REAL_BYTES:
            break
        # If the model decides by values, it is told in a second try that it is traced: libraries
        # then decide without values.
        for is_noticed in (False, True):
            try:
                subject = build(
                    model_file,
                    device=device,
                    dtype=dtype,
                    batch_size=batch_size,
                    narrowed=narrowed,
                )
                size_bytes = sum(p.numel() * p.element_size() for p in subject.model.parameters())
                is_half = dtype is torch.bfloat16
                graph = _graph_in_modes(subject, is_noticed=is_noticed, is_half=is_half)
                meeting = (one.where for one in failures if isinstance(one, DevicesMeetError))
                graph = replace(graph, devices_meet_at=next(meeting, ""))
                graph = replace(graph, images=channels_last_inputs(subject, graph))
                return with_expected_rows(graph)
            except ModelMovedError:
                raise
            except (InputError, TraceError) as error:
                failures.append(error)
                if not isinstance(error, DecidedByValuesError):
                    break
        if failures and isinstance(failures[-1], UnlikeSizesError):
            break
    raise next((one for one in failures if isinstance(one, UnlikeTypesError)), failures[-1])


def trace_for_rows(model_file: ModelFile, rows: int | None, precision: Precision) -> Graph:
    """Trace a model; if its code fixes the batch size, trace it with `rows` rows, if that works."""
    graph = trace(model_file, precision=precision)
    if rows is None or graph.fixed_batch in (None, rows):
        return graph
    try:
        return trace(model_file, precision=precision, batch_size=rows, like=graph)
    except (InputError, TraceError):  # the model's code contains its batch size
        return graph


def _converted(
    subject: TracedSubject,
    *,
    is_noticed: bool,
    has_fixed_rows: bool = False,
    found: LeftBehind | None = None,
) -> tuple[Graph, TraceRecording]:
    how = partial(
        export, subject, is_noticed=is_noticed, has_fixed_rows=has_fixed_rows, found=found
    )
    try:
        exported = how(fold=True)
        graph = convert(exported)
    except CannotReplayError:
        exported = how(fold=False)
        graph = convert(exported)
    return graph, exported.recording


def _stateless(subject: TracedSubject, *, is_noticed: bool, has_fixed_rows: bool = False) -> Graph:
    """Return a subject's graph; raise if a step depends on an earlier one through Python state.

    If the first trace changes such state, a second trace starts with it. The second one must read
    no tensor that the first one left, change no number, and give the same graph. Caches that are
    filled once are allowed.
    """
    how = partial(_converted, subject, is_noticed=is_noticed, has_fixed_rows=has_fixed_rows)
    graph, recording = how()
    changed, left = recording.changed, recording.left
    if not changed:
        return graph
    place = min(changed, key=lambda one: not changed[one])  # preferably one compared by content
    try:
        second, recording = how(found=left)
    except (InputError, TraceError) as error:
        raise depends_on_outside(place, subject.path) from error
    for counted, is_content in recording.changed.items():
        if is_content:
            raise counts_outside(counted, subject.path)
    if left.read or _computed_in(second) != _computed_in(graph):
        raise depends_on_outside(place, subject.path)
    return graph


def _computed_in(graph: Graph) -> Graph:
    """Return a graph without the changes of Python state, to compare the graphs of two steps.

    These changes may differ, because only the first step fills caches.
    """
    calls = {key: replace(call, left=StateChange.NOTHING) for key, call in graph.calls.items()}
    return replace(graph, calls=calls)


def _graph_in_modes(subject: TracedSubject, *, is_noticed: bool, is_half: bool) -> Graph:
    """Return a subject's graph; it names the parts in eval mode if train mode changes the ops."""
    graph = _graph(subject, is_noticed=is_noticed, is_half=is_half)
    parts = parts_in_eval_mode(subject.model)
    if not parts:
        return graph
    subject.model.train()
    try:
        differs = _graph(subject, is_noticed=is_noticed, is_half=is_half) != graph
    except (InputError, TraceError):
        differs = True
    return replace(graph, in_eval_mode=parts) if differs else graph


def _check_written_inputs(graph: Graph, subject: TracedSubject) -> None:
    """Raise if a step writes to an entry of the batch that shares memory with another entry.

    In plain PyTorch, both entries change. In scripts, they are two tensors: only one would change.
    """
    for op in graph.ops:
        for name in op.writes:
            key = batch_key(graph.tensors[name].storage)
            if key in subject.shared:
                others = ", ".join(sorted(subject.shared - {key}))
                raise InputError(
                    f"the model writes to batch[{key!r}], which may share memory with {others}",
                    where=op.location,
                    expected="entries of example_batch with memory of their own",
                    fix=f"give it a copy: {{{key!r}: ids.clone(), …}}",
                )


def _check_loss_reads_outputs(graph: Graph) -> None:
    """Raise if the loss function reads the model's parameters from a global.

    The objects that a global holds are not those of every script: a rank may have other modules,
    or parts of parameters.
    """
    returned = set(refs(graph.calls[""].result))
    own = {one.name for one in graph.parameters} - returned
    for op in graph.ops:
        read = next((name for name in op.inputs if name in own), None)
        if op.call == LOSS_CALL and read is not None:
            raise TraceError(
                f"the loss reads {read} of the model, which is no output",
                where=op.location,
                expected="a loss of the outputs and the batch alone",
                fix="compute this part in the model's forward, and return it with the outputs",
            )


def _graph(subject: TracedSubject, *, is_noticed: bool, is_half: bool) -> Graph:
    try:
        graph = _stateless(subject, is_noticed=is_noticed)
    except RowsInNumberError as counted:
        fixed = _stateless(subject, is_noticed=is_noticed, has_fixed_rows=True)
        graph = replace(fixed, fixed_at=counted.where)
    check_types(graph, is_half=is_half)
    _check_written_inputs(graph, subject)
    _check_loss_reads_outputs(graph)
    if not graph.tensors[graph.loss].requires_grad:
        raise InputError(
            "the loss has no gradient",
            where=str(subject.path),
            expected="a loss that depends on trainable parameters",
            fix="look for .detach(), .item(), argmax or no_grad on the way to the loss",
        )
    return graph


_Place = tuple[str, int]  # the name of an input, and the dim
_Sizes = Mapping[_Place, int]
_SHORTEST = 3  # half of this is too short to be traced


def with_other_lengths(
    file: ModelFile, graph: Graph, axes: GraphAxes, precision: Precision
) -> Graph | None:
    """Return the graph of a model on longer or shorter rows, or None if neither works.

    Its ops are those of the given graph, one by one, with the same names. Lengths that do not
    depend on each other are resized differently, if the model allows it.

    A trace shows sizes as numbers: 1024 may be the width of the model or the length of its rows.
    A second trace distinguishes them. With a symbol for each length, the exporter would take two to
    four times as long, and a model that compares a length (`if t > self.block_size`) would turn its
    symbol into a number.
    """
    for sizes in _other_sizes(graph, axes):
        try:
            other = trace(
                replace(file, example_batch=partial(_resized, file, sizes)),
                precision=precision,
                batch_size=graph.fixed_batch or TRACED_BATCH,
                like=graph,
            )
        except (InputError, TraceError):
            continue
        if _is_alike(graph, other):
            return other
    return None


def _other_sizes(graph: Graph, axes: GraphAxes) -> Iterator[_Sizes]:
    """Yield other sizes of the inputs' dims, the most informative first.

    Twice the size plus one distinguishes halves that are rounded down and up. Twice the size is for
    models whose lengths must be multiples of a number, half the size for those with a maximum.
    """
    weight_axes = {
        leaf.name for p in graph.parameters for d in axes.dims[p.name] for leaf in leaves(d)
    }
    dims = {
        (name, place): dim
        for name in graph.inputs
        for place, dim in enumerate(axes.dims[name])
        if place and (size := graph.tensors[name].shape[place]).is_constant and size.at(0) > 1
    }
    free = {  # no weight has an axis of these dims
        k: d for k, d in dims.items() if weight_axes.isdisjoint(leaf.name for leaf in leaves(d))
    }
    # dims of integers, such as token ids
    numbered = {k: d for k, d in dims.items() if graph.tensors[k[0]].is_whole_numbered}
    every = (free, numbered | free, numbered)
    choices = [one for place, one in enumerate(every) if one not in every[:place]]
    larger, smaller = zip(*(_ways(graph, chosen) for chosen in choices), strict=True)
    yield from (sizes for ways in (*larger, *smaller) for sizes in ways)


def _ways(graph: Graph, chosen: Mapping[_Place, Dim]) -> tuple[list[_Sizes], list[_Sizes]]:
    """Return two lists of sizes to try for some dims: larger ones, and smaller ones."""
    groups: list[Dim] = list(dict.fromkeys(chosen.values()))
    sizes = {key: graph.tensors[key[0]].shape[key[1]].at(0) for key in chosen}
    if not chosen or min(sizes.values()) <= _SHORTEST:
        return [], []
    unlike = {key: sizes[key] * (2 + groups.index(dim)) for key, dim in chosen.items()}
    double = {key: size * 2 for key, size in sizes.items()}
    half = {key: size // 2 for key, size in sizes.items()}
    more = [unlike, double] if len(groups) > 1 else [double]
    return [*map(_plus_one, more), *more], [_plus_one(half), half]


def _plus_one(sizes: _Sizes) -> _Sizes:
    return {key: size + 1 for key, size in sizes.items()}


def _resized(file: ModelFile, sizes: _Sizes, rows: int) -> dict[str, Any]:
    """Return an example batch whose values are repeated or cut to other lengths."""
    batch = dict(file.example_batch(rows))
    for (name, dim), size in sizes.items():
        value = batch[batch_key(name)]
        times = -(-size // value.shape[dim])
        batch[batch_key(name)] = torch.cat([value] * times, dim).narrow(dim, 0, size).contiguous()
    return batch


def _is_alike(graph: Graph, other: Graph) -> bool:
    """Whether two graphs differ only in the sizes of tensors and in the arguments of ops."""
    ops = [
        [(op.name, op.target, op.inputs, op.outputs, op.call) for op in g.ops]
        for g in (graph, other)
    ]
    tensors = [
        {(t.name, t.dtype, len(t.shape)) for t in g.tensors.values()} for g in (graph, other)
    ]
    constants = [{c.name: c.values for c in g.constants.values()} for g in (graph, other)]
    return all(first == second for first, second in (ops, tensors, constants))
