"""Lists the distinct ops of a graph that are worth measuring, whole and split, with their forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.planner.costs.ops.measurements import OpKey
from autopar.planner.costs.ops.pricer import Pricer
from autopar.planner.costs.ops.shapes import LocalShapes, OpSplit
from autopar.planner.ops import Op, Origin, refs
from autopar.planner.precision import item_bytes
from autopar.planner.profile.forms import local_strides, strides_of
from autopar.planner.programs.layouts.strategies import strategies
from autopar.planner.rules.rule import OpKind, Traffic
from autopar.planner.rules.table import kind_of, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandForm:
    """A tensor that a probe reads: as the op will find it in training."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_weight: bool  # last used a step ago; what is not was just written by the op before
    below: int  # integers are smaller: rows of a table, classes
    spacing: int = 0  # of integers that rise evenly: where bags of words begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One op on one rank, ready to be called; `uses` of it are in the model."""

    key: OpKey
    op: Op
    split: OpSplit | None
    operands: tuple[OperandForm, ...]
    results: tuple[tuple[int, ...], ...]
    is_differentiable: bool
    batch: int
    groups: int | None  # of a convolution on one rank
    uses: int
    expected_seconds: float  # of one forward and backward, by formula
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """An op whose key was met first here."""

    op: Op
    split: OpSplit | None


def find_probes(pricer: Pricer, *, degrees: Sequence[int]) -> tuple[Probe, ...]:
    """Return one probe for each key, whole ops first; what moves nothing (a view) has none."""
    whole: dict[OpKey, _Met] = {}
    split: dict[OpKey, _Met] = {}
    uses: dict[OpKey, int] = {}
    for op in pricer.graph.ops:
        for division in (None, *_splits(op, pricer, degrees)):
            if _moves_nothing(pricer, op, division):
                continue
            key = pricer.key(op, division)
            uses[key] = uses.get(key, 0) + 1
            (split if division else whole).setdefault(key, _Met(op=op, split=division))
    strides = strides_of(
        pricer.graph,
        batch=pricer.batch,
        precision=pricer.precision,
        device="cpu" if pricer.rates.is_cpu else "cuda",
    )
    found = {**split, **whole}  # a split that leaves the whole behind is the whole
    order = [*whole, *(key for key in split if key not in whole)]
    return tuple(_probe(pricer, key, found[key], strides, uses[key]) for key in order)


def _splits(op: Op, pricer: Pricer, degrees: Sequence[int]) -> Iterator[OpSplit]:
    for degree in degrees:
        if degree == 1:
            continue
        ways = strategies(op, pricer.graph, pricer.axes, degree=degree, batch=pricer.batch)
        for letter, axis in dict.fromkeys((way.letter, way.axis) for way in ways):
            if letter:
                yield OpSplit(letter=letter, axis=axis, degree=degree)


def _moves_nothing(pricer: Pricer, op: Op, split: OpSplit | None) -> bool:
    """Whether dispatching the op is all that it takes, or a rank's part is run by other code.

    A rank looks its own rows of a split table up, and takes its part in a split loss, by functions
    of the runtime: the plain op's time would not be theirs.
    """
    if split is not None and _is_runtime_code(op, pricer, split):
        return True
    cost = pricer.cost(op, split)
    return cost.forward_seconds + cost.backward_seconds == 0.0


def _is_runtime_code(op: Op, pricer: Pricer, split: OpSplit) -> bool:
    if kind_of(op) is OpKind.CROSS_ENTROPY:
        return True
    if not kind_of(op).reads_table:
        return False
    shapes, table = pricer.shapes(op, split), op.inputs[0]
    return shapes.shape(table)[0] < pricer.graph.tensors[table].shape[0].at(pricer.batch)


def _probe(
    pricer: Pricer, key: OpKey, met: _Met, strides: Mapping[str, tuple[int, ...]], uses: int
) -> Probe:
    shapes = pricer.shapes(met.op, met.split)
    operands = tuple(_operand(pricer, shapes, name, strides[name]) for name in met.op.inputs)
    results = tuple(map(shapes.shape, met.op.outputs))
    cost = pricer.cost(met.op, met.split)
    tensors = pricer.graph.tensors
    given = dict(met.op.arguments)
    return Probe(
        key=key,
        op=met.op,
        split=met.split,
        operands=operands,
        results=results,
        is_differentiable=pricer.graph.learns(met.op),
        batch=pricer.batch,
        groups=shapes.letters(("g",)) if "groups" in given and met.split else None,
        uses=uses,
        expected_seconds=cost.forward_seconds + cost.backward_seconds,
        size_bytes=sum(
            2 * prod(shapes.shape(name)) * item_bytes(tensors[name].dtype, pricer.precision)
            for name in (*met.op.inputs, *met.op.outputs)
        ),
    )


def _operand(
    pricer: Pricer, shapes: LocalShapes, name: str, strides: tuple[int, ...]
) -> OperandForm:
    tensor = pricer.graph.tensors[name]
    whole = tuple(size.at(pricer.batch) for size in tensor.shape)
    local = shapes.shape(name)
    origin = pricer.graph.tensors[tensor.storage].origin
    return OperandForm(
        name=name,
        shape=local,
        strides=strides if local == whole else local_strides(whole, strides, local),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        is_weight=origin in (Origin.PARAMETER, Origin.BUFFER, Origin.CONSTANT),
        below=_below(shapes),
        spacing=_spacing(shapes, name),
    )


def _below(shapes: LocalShapes) -> int:
    """Return what integers are smaller than, so that every one of them names a place."""
    rule = rule_of(shapes.op.target)
    sizes = shapes.shape(shapes.op.inputs[0]) if shapes.op.inputs else ()
    if rule.kind.reads_table:
        return sizes[0]
    if rule.kind.is_class_loss:
        return sizes[1 if len(sizes) > 1 else 0]
    if rule.traffic is Traffic.GATHERED:
        dim = dict(shapes.op.arguments).get("dim")
        return sizes[dim] if isinstance(dim, int) else min(sizes, default=1)
    return 2


def _spacing(shapes: LocalShapes, name: str) -> int:
    """Return how many words each bag has, for the tensor that says where they begin."""
    given = dict(shapes.op.arguments)
    if name not in refs(given.get("offsets")):
        return 0
    words = next(refs(given.get("indices")))
    return max(1, shapes.numel(words) // max(1, shapes.numel(name)))
