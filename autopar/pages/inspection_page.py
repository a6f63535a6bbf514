"""Turns an inspection into the page that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.planner.annotated import AnnotatedOp
from autopar.planner.cluster.device import Device
from autopar.planner.cluster.units import seconds_text
from autopar.planner.inspection import Inspection
from autopar.planner.precision import Precision


def page(inspection: Inspection) -> Iterator[RenderableType]:
    """Yield the page from top to bottom."""
    yield _head(inspection)
    yield _runs(inspection)
    yield _axes(inspection)
    yield _parameters(inspection)
    yield _memory(inspection)
    yield from _remarks(inspection)


def count_text(number: float) -> str:
    """Return a large count with the letter that people use: 124.4 M, 70.6 B."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return f"{number:.0f}"


def flops_text(flops: float) -> str:
    """Return FLOPs with their unit."""
    for limit, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= limit:
            return f"{flops / limit:.2f} {unit}"
    return f"{flops / 1e3:.2f} kFLOP"


def memory_text(size_bytes: float) -> str:
    """Return bytes with their binary unit."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.2f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB"


def ops_table(
    ops: Sequence[AnnotatedOp], device: Device, precision: Precision, *, batch: int
) -> Table:
    """Return the ops of a model; of layers that are alike those of the first."""
    table = _table(
        f"Ops on {device.name} in {precision}, unsplit, at batch {batch}",
        "op", "module", "×", "FLOPs", "moved", "kept", "forward", "backward",
    )  # fmt: skip
    for one in ops:
        if one.count:
            table.add_row(
                one.target.removeprefix("aten.").removesuffix(".default"),
                Text(one.module),
                str(one.count),
                _or_nothing(flops_text, one.forward_flops + one.backward_flops),
                _or_nothing(memory_text, one.moved_bytes),
                _or_nothing(memory_text, one.kept_bytes),
                _or_nothing(seconds_text, one.forward_seconds),
                _or_nothing(seconds_text, one.backward_seconds),
            )
    return table


def _or_nothing(text: Callable[[float], str], value: float) -> str:
    return text(value) if value else "0"


def _head(inspection: Inspection) -> Text:
    step = inspection.forward_flops + inspection.backward_flops
    units, unit = (inspection.tokens, "token") if inspection.tokens else (inspection.batch, "row")
    lines = [
        f"{inspection.parameters:,} parameters ({count_text(inspection.parameters)})"
        + (
            f", {inspection.trainable_parameters:,} of them trained"
            if inspection.trainable_parameters != inspection.parameters
            else ""
        ),
        f"{inspection.layers} layers of {inspection.layer_classes} classes, {inspection.ops} ops",
        f"batch {inspection.batch}"
        + (f" ({inspection.tokens:,} tokens)" if inspection.tokens else "")
        + f": forward {flops_text(inspection.forward_flops)}, "
        + f"backward {flops_text(inspection.backward_flops)}",
        f"{flops_text(step / units)} per {unit}, forward and backward",
    ]
    return Text.assemble((inspection.model, "bold"), "\n", "\n".join(lines), "\n")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _runs(inspection: Inspection) -> Table:
    table = _table(
        f"Layers in order, at batch {inspection.batch}",
        "layer", "×", "ops", "parameters", "forward", "saved fp32", "saved bf16",
    )  # fmt: skip
    for run in inspection.runs:
        name = f"{run.name} ({run.first_call}{' …' if run.count > 1 else ''})"
        table.add_row(
            name,
            str(run.count),
            str(run.ops),
            f"{run.parameters:,}",
            flops_text(run.forward_flops),
            memory_text(run.saved_bytes.fp32),
            memory_text(run.saved_bytes.bf16),
        )
    return table


def _axes(inspection: Inspection) -> Table:
    table = _table("Logical axes", "axis", "size", "tensors that have it")
    for axis in inspection.axes:
        table.add_row(axis.name, axis.size, str(axis.parameters))
    return table


def _parameters(inspection: Inspection) -> Table:
    table = _table("What the dims of the parameters mean", "parameter", "×", "shape", "dims")
    for line in inspection.parameter_dims:
        shape = " × ".join(map(str, line.shape))
        dims = Text(", ".join(line.dims))  # brackets are ours, not markup
        table.add_row(line.name, str(line.count), shape, dims)
    return table


def _memory(inspection: Inspection) -> Table:
    table = _table(
        f"Memory on one device, unsplit, with {inspection.optimizer}",
        "precision", "parameters", "gradients", "optimizer", "saved activations", "total",
    )  # fmt: skip
    saved = {"fp32": inspection.saved_bytes.fp32, "bf16": inspection.saved_bytes.bf16}
    for state in inspection.states:
        kept = saved[state.precision]
        parts = (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes, kept)
        table.add_row(state.precision, *map(memory_text, parts), memory_text(sum(parts)))
    return table


def _remarks(inspection: Inspection) -> Iterator[Text]:
    yield Text("Saved activations assume flash attention and fused dropout (CUDA kernels).")
    if inspection.batch_is_fixed:
        yield Text(f"The model fixes its batch to {inspection.batch}: it cannot be cut.")
    for names in inspection.tied:
        yield Text(f"Tied: {' = '.join(names)}")
    if inspection.updated_buffers:
        first, count = inspection.updated_buffers[0], len(inspection.updated_buffers)
        yield Text(f"The forward updates {count} buffers ({first}, …).")
    for name in inspection.custom_functions:
        yield Text(f"Custom autograd.Function {name}: kept whole, with its own backward.")
    for conflict in inspection.conflicts:
        yield Text(f"Not split, its uses do not agree: {conflict}")
    if not inspection.ops_without_rule:
        yield Text("Every op has a rule.")
    for op in inspection.ops_without_rule:
        yield Text(f"No rule for {op.target} ({op.count} ×, {op.location}): split by batch alone.")
    for one in inspection.unpriced:
        yield Text(
            f"No formula for {one.target} ({one.count} ×, {one.location}): its FLOPs count "
            f"nowhere, {one.share:.1%} of all bytes moved."
        )
