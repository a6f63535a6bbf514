"""Says which tensors an op keeps for its backward, and in whose memory they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autopar.planner.costs.ops.shapes import LocalShapes, OpSplit
from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE, Op, refs
from autopar.planner.precision import ITEM_BYTES, Kernels, Precision, item_bytes
from autopar.planner.rules.rule import OpKind, Rule, Saved
from autopar.planner.rules.table import kind_of, rule_of

_COMPUTED = ("computed",)  # what the op's line says of its computation


class Memory:
    """In whose memory each tensor of a graph lies once the model runs on a device."""

    def __init__(self, graph: Graph, precision: Precision) -> None:
        self._graph = graph
        self._precision = precision
        attended = {op.outputs[0] for op in graph.ops if kind_of(op) is OpKind.ATTENTION}
        self._same = {
            op.outputs[0]: op.inputs[0] for op in graph.ops if self._is_same(op, attended)
        }

    def takes_none(self, op: Op) -> bool:
        """Whether an op that the trace shows as a copy gives its input back on a device."""
        return op.outputs[0] in self._same

    def root(self, name: str) -> str:
        """Return the tensor whose memory this one lies in."""
        root = self._graph.tensors[name].storage
        while root in self._same:
            root = self._graph.tensors[self._same[root]].storage
        return root

    def _is_same(self, op: Op, attended: set[str]) -> bool:
        """Casts between equal types, dropout that drops nothing, and the reshape after attention.

        Flash kernels lay their result out with the heads inside, so that joining them is a view.
        """
        match kind_of(op):
            case OpKind.CAST:
                return self._keeps_type(op)
            case OpKind.DROPOUT:
                return op.argument("p") == 0 or op.argument("train") is False
            case OpKind.CONTIGUOUS:
                return self._graph.tensors[op.inputs[0]].storage in attended
        return False

    def _keeps_type(self, op: Op) -> bool:
        before, after = self._graph.tensors[op.inputs[0]], self._graph.tensors[op.outputs[0]]
        kinds = {before.dtype, after.dtype}
        return kinds <= {MODEL_DTYPE, "float32"} and self._precision is Precision.FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Something that a kernel makes for its own backward: a mask, statistics, a log-sum-exp."""

    letters: tuple[str, ...]  # the rule's; ("*",) is the shape of the result, or _COMPUTED
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one op keeps: `tensors` by whose memory they lie in, `seen` as the op names them."""

    tensors: tuple[str, ...]
    seen: tuple[str, ...]
    made: tuple[Made, ...]
    shapes: Callable[[OpSplit | None], LocalShapes]

    def own_bytes(self, split: OpSplit | None = None) -> int:
        """Return the bytes on one rank of masks, statistics and log-sum-exp."""
        if not self.made:
            return 0
        shapes = self.shapes(split)
        return sum(made_elements(made, shapes) * made.item_bytes for made in self.made)


def made_elements(made: Made, shapes: LocalShapes) -> int:
    """Return the local number of elements of what a kernel made for its backward."""
    if made.letters == ("*",):
        return shapes.numel(shapes.op.outputs[0])
    computes = rule_of(shapes.op.target).computes
    if made.letters == _COMPUTED:
        return computes(shapes).kept if computes is not None else 0
    return shapes.letters(made.letters)


def made_by(
    op: Op, rule: Rule, *, graph: Graph, precision: Precision, kernels: Kernels
) -> tuple[Made, ...]:
    """Return what the kernel of an op makes for its own backward."""
    own = graph.tensors[op.inputs[0]].dtype if op.inputs else MODEL_DTYPE
    return tuple(
        Made(
            letters=tuple(entry.what.split()),
            item_bytes=item_bytes(entry.dtype if entry.dtype in ITEM_BYTES else own, precision),
        )
        for entry in _applying(op, rule, graph, kernels)
        if entry.dtype
    )


def names_kept(op: Op, rule: Rule, *, graph: Graph, kernels: Kernels) -> Iterator[str]:
    """Yield the operands and results that an op keeps."""
    for entry in _applying(op, rule, graph, kernels):
        if not entry.dtype:
            yield from _named(entry, op)


def keeps_anything(op: Op, graph: Graph, kernels: Kernels) -> bool:
    """Whether an op keeps tensors, or what its kernel makes, for its backward."""
    entries = _applying(op, rule_of(op.target), graph, kernels)
    return any(entry.dtype or any(_named(entry, op)) for entry in entries)


def is_one_kernel(op: Op, kernels: Kernels) -> bool:
    """Whether an op stays whole: attention with dropout is made of many where dropout is.

    Selective recompute then keeps its products, and has the most of it to do again.
    """
    return kernels.fused_dropout or not dict(op.arguments).get("dropout_p")


def _named(entry: Saved, op: Op) -> Iterable[str]:
    if entry.what == "out":
        return op.outputs
    if entry.what == "*inputs":
        return op.inputs
    return refs(dict(op.arguments).get(entry.what))


def _applying(op: Op, rule: Rule, graph: Graph, kernels: Kernels) -> Iterator[Saved]:
    if graph.learns(op):
        yield from (entry for entry in rule.saves if _applies(entry, op, graph, kernels))


def _applies(entry: Saved, op: Op, graph: Graph, kernels: Kernels) -> bool:
    if entry.only in ("fused", "unfused"):
        given = dict(op.arguments)
        active = given.get("train", given.get("training")) and given.get("p") != 0
        return bool(active) and kernels.fused_dropout == (entry.only == "fused")
    if not entry.needs:
        return True
    names = refs(dict(op.arguments).get(entry.needs))
    return any(graph.tensors[name].requires_grad for name in names)
