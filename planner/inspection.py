"""Collects facts about a model: parameters, layers, axes, costs, ops without a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod

from autopar.planner.annotate import OpWork, annotate, state_of, total_work
from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.costs.prediction import State
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op, Parameter, TensorOrigin
from autopar.planner.layers import Layers, find_layers
from autopar.planner.precision import Precision
from autopar.planner.rules.signature import leaves
from autopar.planner.rules.table import has_row, has_rule

SHOWN = (Precision.FP32, Precision.BF16)  # fp16 has the figures of bf16
_Works = Mapping[str, OpWork]


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesByDtype:
    """A number of bytes in fp32 and in bf16."""

    fp32: int
    bf16: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """The figures of consecutive equal layers."""

    name: str
    first_call: str
    count: int
    ops: int
    parameters: int
    forward_flops: int
    backward_flops: int
    saved_bytes: BytesByDtype
    moved_bytes: BytesByDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLine:
    """A logical axis: its name and size, and how many tensors have it."""

    name: str
    size: str
    tensors: int  # inputs and parameters that have it


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLine:
    """The logical axes of the dims of `count` similar parameters, and the name of the first."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """An op that has no rule in the op table, with the location of its first call."""

    target: str
    count: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLine(State):
    """Bytes at one precision."""

    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts about a model at one batch size."""

    model: str
    batch: int
    batch_is_fixed: bool
    tokens: int
    parameters: int
    trainable_parameters: int
    tied: tuple[tuple[str, ...], ...]
    updated_buffers: tuple[str, ...]
    custom_functions: tuple[str, ...]
    layers: int
    layer_classes: int
    runs: tuple[RunLine, ...]
    axes: tuple[AxisLine, ...]
    parameter_dims: tuple[ParameterLine, ...]
    conflicts: tuple[str, ...]
    forward_flops: int
    backward_flops: int
    saved_bytes: BytesByDtype
    optimizer: str
    states: tuple[StateLine, ...]
    ops: int
    ops_without_rule: tuple[OpLine, ...]
    unpriced: tuple[Unpriced, ...]


def inspect_graph(graph: Graph, *, model: str, batch: int, optimizer: str) -> Inspection:
    """Return facts about a traced model."""
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    fp32, bf16 = (annotate(graph, axes, batch=batch, precision=precision) for precision in SHOWN)
    total, total_bf16 = (total_work(graph.ops, works) for works in (fp32, bf16))
    used = graph.fixed_batch or batch
    return Inspection(
        model=model,
        batch=used,
        batch_is_fixed=graph.fixed_batch is not None,
        tokens=used * graph.tokens_per_row if graph.tokens_per_row > 1 else 0,
        parameters=sum(map(_count, graph.parameters)),
        trainable_parameters=sum(_count(p) for p in graph.parameters if p.trainable),
        tied=tuple((p.name, *p.aliases) for p in graph.parameters if p.aliases),
        updated_buffers=tuple(b.name for b in graph.buffers if b.updated),
        custom_functions=tuple(
            sorted({c.class_name for c in graph.calls.values() if c.is_function})
        ),
        layers=len(layers.layers),
        layer_classes=len(layers.classes),
        runs=_runs(graph, layers, fp32, bf16),
        axes=_axes(graph, axes),
        parameter_dims=_parameter_dims(graph, axes),
        conflicts=tuple(f"{c.op}: dim {c.dim} of {c.tensor}" for c in axes.conflicts),
        forward_flops=total.forward_flops,
        backward_flops=total.backward_flops,
        saved_bytes=BytesByDtype(fp32=total.saved_bytes, bf16=total_bf16.saved_bytes),
        optimizer=optimizer,
        states=tuple(
            StateLine(precision=precision, **asdict(state_of(graph.parameters, precision)))
            for precision in SHOWN
        ),
        ops=len(graph.ops),
        ops_without_rule=_without_rule(graph),
        unpriced=tuple(unpriced(graph, axes)),
    )


def _count(parameter: Parameter) -> int:
    return prod(size.at(0) for size in parameter.shape)


def _runs(graph: Graph, layers: Layers, fp32: _Works, bf16: _Works) -> tuple[RunLine, ...]:
    lines = []
    counted: set[str] = set()
    for run in layers.runs:
        members = layers.layers[run.first : run.first + run.count]
        ops = [op for layer in members for op in layer.ops]
        work, narrow = total_work(ops, fp32), total_work(ops, bf16)
        names = {n for op in ops for n in op.inputs} & {p.name for p in graph.parameters}
        own = [p for p in graph.parameters if p.name in names - counted]
        counted |= names
        lines.append(
            RunLine(
                name=layers.classes[run.layer_class].name,
                first_call=members[0].call,
                count=run.count,
                ops=len(ops) // run.count,
                parameters=sum(map(_count, own)),
                forward_flops=work.forward_flops,
                backward_flops=work.backward_flops,
                saved_bytes=BytesByDtype(fp32=work.saved_bytes, bf16=narrow.saved_bytes),
                moved_bytes=BytesByDtype(fp32=work.moved_bytes, bf16=narrow.moved_bytes),
            )
        )
    return tuple(lines)


def _axes(graph: Graph, axes: GraphAxes) -> tuple[AxisLine, ...]:
    """Return the named axes of inputs and parameters, the most used first."""
    counts: Counter[tuple[str, str]] = Counter()
    for name in (*graph.inputs, *(p.name for p in graph.parameters)):
        found = {
            (axes.names[leaf.name], str(leaf.size))
            for dim in axes.dims[name]
            for leaf in leaves(dim)
        }
        counts.update(pair for pair in found if not pair[0].isdigit())
    return tuple(AxisLine(name=n, size=s, tensors=c) for (n, s), c in counts.most_common())


def _parameter_dims(graph: Graph, axes: GraphAxes) -> tuple[ParameterLine, ...]:
    """Return one line for all parameters of the same shape, axes and last two parts of the name."""
    groups: dict[tuple[str, tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for parameter in graph.parameters:
        shape = tuple(size.at(0) for size in parameter.shape)
        dims = tuple(map(axes.text, axes.dims[parameter.name]))
        last = ".".join(parameter.name.split(".")[-2:])
        groups.setdefault((last, shape, dims), []).append(parameter.name)
    return tuple(
        ParameterLine(name=names[0], shape=shape, dims=dims, count=len(names))
        for (_, shape, dims), names in groups.items()
    )


def _without_rule(graph: Graph) -> tuple[OpLine, ...]:
    unknown = [op for op in graph.ops if not has_rule(op.target)]
    counts = Counter(op.target for op in unknown)
    first = {op.target: op.location for op in reversed(unknown)}
    return tuple(
        OpLine(target=target, count=count, location=first[target])
        for target, count in counts.most_common()
    )


LARGE = 0.05  # of all moved bytes: ops that move less need no formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """Ops of one kind without a formula, with their share of all moved bytes."""

    target: str
    count: int
    location: str
    share: float


def unpriced(graph: Graph, axes: GraphAxes) -> Iterator[Unpriced]:
    """Yield the kinds of ops without a formula that read a parameter, or move many bytes."""
    kinds: dict[str, list[Op]] = {}
    for op in graph.ops:
        if not has_row(op.target):
            kinds.setdefault(op.target, []).append(op)
    if not kinds:
        return
    done = annotate(graph, axes, batch=graph.fixed_batch or 1, precision=Precision.FP32)
    moved = {name: work.moved_bytes for name, work in done.items()}
    total = max(1, sum(moved.values()))
    for target, ops in kinds.items():
        share = sum(moved[op.name] for op in ops) / total
        if share >= LARGE or any(_reads_parameter(op, graph) for op in ops):
            yield Unpriced(target=target, count=len(ops), location=ops[0].location, share=share)


def _reads_parameter(op: Op, graph: Graph) -> bool:
    roots = graph.index.storages(op.inputs)
    return any(graph.tensors[root].origin is TensorOrigin.PARAMETER for root in roots)
