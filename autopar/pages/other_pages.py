"""Lays out the pages of `inspect`, `profile` and `ckpt` as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.checkpoints import CheckpointDifference, KeptCheckpoint, TensorDifference
from autopar.pages.plan_page import plain_table
from autopar.planner.annotate import AnnotatedOp
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.toml_reading import bandwidth_text, bytes_text, seconds_text
from autopar.planner.inspection import Inspection
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile, MeasuredOp
from autopar.planner.profile.rounds import UnmeasuredOp
from autopar.runtime.checkpointing.finding import best_of
from autopar.runtime.ranks.locations import Location


def page(inspection: Inspection) -> Iterator[RenderableType]:
    """Yield the page of `autopar inspect`."""
    yield _head(inspection)
    yield _layers_table(inspection)
    yield _axes(inspection)
    yield _parameters(inspection)
    yield _memory(inspection)
    yield from _remarks(inspection)


def count_text(number: float) -> str:
    """Return a large count with its suffix: 124.4 M, 70.6 B."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {letter}"
    return f"{number:.0f}"


def flops_text(flops: float) -> str:
    """Return FLOPs with a unit."""
    for limit, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= limit:
            return f"{flops / limit:.2f} {unit}"
    return f"{flops / 1e3:.2f} kFLOP"


def memory_text(size_bytes: float) -> str:
    """Return bytes with a binary unit."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.2f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB"


def ops_table(
    ops: Sequence[AnnotatedOp], device: Device, precision: Precision, *, batch: int
) -> Table:
    """Return a table of the model's ops; identical layers are shown once."""
    table = plain_table(
        f"Ops on {device.name} in {precision}, unsplit, at batch {batch}",
        "op", "module", "×", "FLOPs", "moved", "saved", "forward", "backward",
    )  # fmt: skip
    for one in ops:
        if one.count:
            table.add_row(
                one.target.removeprefix("aten.").removesuffix(".default"),
                Text(one.module),
                str(one.count),
                _or_zero(flops_text, one.forward_flops + one.backward_flops),
                _or_zero(memory_text, one.moved_bytes),
                _or_zero(memory_text, one.kept_bytes),
                _or_zero(seconds_text, one.forward_seconds),
                _or_zero(seconds_text, one.backward_seconds),
            )
    return table


def _or_zero(text: Callable[[float], str], value: float) -> str:
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


def _layers_table(inspection: Inspection) -> Table:
    table = plain_table(
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
    table = plain_table("Logical axes", "axis", "size", "tensors that have it")
    for axis in inspection.axes:
        table.add_row(axis.name, axis.size, str(axis.tensors))
    return table


def _parameters(inspection: Inspection) -> Table:
    table = plain_table("What the dims of the parameters mean", "parameter", "×", "shape", "dims")
    for line in inspection.parameter_dims:
        shape = " × ".join(map(str, line.shape))
        dims = Text(", ".join(line.dims))  # brackets are literal, not markup
        table.add_row(line.name, str(line.count), shape, dims)
    return table


def _memory(inspection: Inspection) -> Table:
    table = plain_table(
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
        batch = inspection.batch
        yield Text(f"The model works only at batch {batch}, so the batch cannot be split.")
    for names in inspection.tied:
        yield Text(f"Tied: {' = '.join(names)}")
    if inspection.updated_buffers:
        first, count = inspection.updated_buffers[0], len(inspection.updated_buffers)
        yield Text(f"The forward updates {count} buffers ({first}, …).")
    for name in inspection.custom_functions:
        yield Text(f"Custom autograd.Function {name}: kept whole, with its own backward.")
    for conflict in inspection.conflicts:
        yield Text(f"Not split, where ops disagree: {conflict}")
    if not inspection.ops_without_rule:
        yield Text("Every op has a rule.")
    for op in inspection.ops_without_rule:
        yield Text(f"No rule for {op.target} ({op.count} ×, {op.location}): split by batch alone.")
    for one in inspection.unpriced:
        yield Text(
            f"No formula for {one.target} ({one.count} ×, {one.location}): its FLOPs are "
            f"not counted; it moves {one.share:.1%} of all bytes."
        )


_MOST_OPS = 12  # the most ops in the table of slowest ops


def profile_summary(
    found: MeasuredFile, left_out: Sequence[UnmeasuredOp], *, seconds: float
) -> Mapping[str, object]:
    """Return the profile's summary as JSON data."""
    return {
        "measured_ops": len(found.ops),
        "seconds": seconds,
        "hosts": [asdict(host) for host in found.hosts],
        "nets": [asdict(net) for net in found.nets],
        "left_out": [
            {"op": one.probe.op.name, "target": one.probe.key.target, "reason": one.reason}
            for one in left_out
        ],
    }


def profile_page(
    found: MeasuredFile, left_out: Sequence[UnmeasuredOp], *, seconds: float
) -> Iterator[RenderableType]:
    """Yield the page of `autopar profile`."""
    yield f"{len(found.ops)} ops measured in {seconds_text(seconds)}"
    yield _host_table(found)
    if found.ops:
        yield _op_table(found.ops)
    if found.nets:
        yield _net_table(found)
    if left_out:
        yield _left_out_table(left_out)


def _host_table(found: MeasuredFile) -> Table:
    table = plain_table(
        "host", "device", "threads", "forward op", "backward op", "step",
        "AdamW, a parameter", "AdamW, 10⁶ elements",
    )  # fmt: skip
    for host in found.hosts:
        times = host.times
        table.add_row(
            host.device,
            str(host.threads),
            seconds_text(times.forward_seconds),
            seconds_text(times.backward_seconds),
            seconds_text(times.step_seconds),
            seconds_text(times.optimizer_tensor_seconds),
            seconds_text(1e6 * times.optimizer_element_seconds),
        )
    return table


def _op_table(ops: Sequence[MeasuredOp]) -> Table:
    """Return a table of the slowest ops, with the times of one call."""
    table = plain_table("slowest ops", "op", "operands", "forward", "backward", "samples", left=2)
    longest = sorted(ops, key=lambda one: -_seconds(one))[:_MOST_OPS]
    for one in longest:
        shapes = " ".join(str(list(operand.shape)) for operand in one.key.operands)
        table.add_row(
            one.key.target.removeprefix("aten."),
            shapes,
            _or_zero(seconds_text, one.timing.forward_seconds),
            _or_zero(seconds_text, one.timing.backward_seconds),
            str(one.samples),
        )
    return table


def _seconds(one: MeasuredOp) -> float:
    return one.timing.forward_seconds + one.timing.backward_seconds


def _net_table(found: MeasuredFile) -> Table:
    table = plain_table("link", "collective", "latency of a hop", "rate")
    for net in found.nets:
        title = f"{net.device}, {net.ranks} ranks: all collectives"
        table.add_row(title, seconds_text(net.alpha_seconds), bandwidth_text(net.bytes_per_second))
        for one in net.collectives:
            table.add_row(
                one.collective,
                seconds_text(one.alpha_seconds),
                bandwidth_text(one.bytes_per_second),
            )
    return table


def _left_out_table(left_out: Sequence[UnmeasuredOp]) -> Table:
    table = plain_table("not measured: formulas price these", "op", "reason", "cases", left=2)
    reasons = Counter((one.probe.key.target, one.reason) for one in left_out)
    for (target, reason), count in reasons.most_common():
        table.add_row(target.removeprefix("aten."), reason, str(count))
    return table


_MOST_SHOWN = 8  # the most tensors of one kind that are listed


def time_text(seconds: float) -> str:
    """Return seconds since 1970 as a local date and time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def list_page(
    kept: Sequence[KeptCheckpoint], others: Sequence[tuple[Location, str]]
) -> Iterator[RenderableType]:
    """Yield a table of the checkpoints, then their faults, then the other folders."""
    best = best_of(one.folder for one in kept)
    evaluation = () if best is None else ("evaluation",)
    columns = ("checkpoint", "step", "rows", "written", "size", "plan", *evaluation, "")
    table = plain_table("", *columns, left=1)
    for one in kept:
        moment = one.manifest.moment if one.manifest else None
        is_best = moment is not None and best is not None and moment.step == best[0]
        intact = "intact, the best" if is_best else "intact"
        table.add_row(
            one.folder.name,
            f"{moment.step:,}" if moment else "?",
            f"{moment.rows:,}" if moment else "?",
            time_text(one.written_at),
            bytes_text(one.size_bytes),
            one.manifest.origin.degrees if one.manifest else "?",
            *("" if one.evaluation is None else f"{one.evaluation:.5f}" for _ in evaluation),
            Text("damaged", style="red") if one.faults else intact,
        )
    yield table
    yield from _faults(kept)
    for path, what in others:
        yield Text(f"{path.name}: {what}")


def verified_page(kept: Sequence[KeptCheckpoint]) -> Iterator[RenderableType]:
    """Yield the result of verifying each checkpoint."""
    for one in kept:
        if not one.faults and one.manifest is not None:
            count = len(one.manifest.files)
            files = "1 file" if count == 1 else f"{count} files"
            yield Text(f"{one.folder.name}: intact, {files}, {bytes_text(one.size_bytes)}")
    yield from _faults(kept)


def _faults(kept: Sequence[KeptCheckpoint]) -> Iterator[Text]:
    for one in kept:
        for fault in one.faults:
            yield Text.assemble((f"{one.folder.name}: damaged: ", "red"), fault)


def difference_page(found: CheckpointDifference, *, every: bool) -> Iterator[RenderableType]:
    """Yield the tensors that differ, the largest differences first, then the numbers that do."""
    for kind in dict.fromkeys(one.kind for one in found.tensors):
        own = [one for one in found.tensors if one.kind == kind]
        yield from _page_of_kind(kind, own, every=every)
    for kind, count in Counter(one.kind for one in found.numbers).items():
        first = next(one for one in found.numbers if one.kind == kind)
        values = f"{first.name}: {first.before} in A, {first.after} in B"
        yield Text(f"{kind}: {count} numbers differ, such as {values}")
    for text in found.unlike:
        yield Text(text)
    if found.is_equal:
        yield Text("Equal to the last bit.")


def _page_of_kind(
    kind: str, tensors: Sequence[TensorDifference], *, every: bool
) -> Iterator[RenderableType]:
    differing = sorted((one for one in tensors if not one.is_equal), key=_order)
    if not differing:
        yield Text(f"{kind}: all {len(tensors)} tensors are equal")
        return
    shown = differing if every else differing[:_MOST_SHOWN]
    title = f"{kind}: {len(differing)} of {len(tensors)} tensors differ"
    table = plain_table(title, "tensor", "elements that differ", "by at most", "largest in A")
    for one in shown:
        count = f"{one.unequal:,} of {one.elements:,}"
        table.add_row(Text(one.name), count, f"{one.largest:.3g}", f"{one.largest_value:.3g}")
    yield table
    if len(shown) < len(differing):
        yield Text(f"… and {len(differing) - len(shown)} smaller differences (--all)")


def _order(one: TensorDifference) -> tuple[bool, float, str]:
    is_nan = one.largest != one.largest
    return not is_nan, 0.0 if is_nan else -one.largest, one.name
