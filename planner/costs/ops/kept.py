"""Finds the tensors that an op keeps for its backward, and the sizes of tensors on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.costs.ops.case import LocalShapes, OpSplit, local_size
from autopar.planner.costs.ops.fusion import Fusing
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import Layout, LayoutKind
from autopar.planner.graph.ops import MODEL_DTYPE, Op, TensorOrigin, refs
from autopar.planner.precision import ITEM_BYTES, Kernels, Precision, item_bytes
from autopar.planner.rules.rule import OpKind, SavedForBackward
from autopar.planner.rules.signature import Concat, leaves
from autopar.planner.rules.table import kind_of, rule_of


class TensorSizes:
    """The sizes of a graph's tensors and ops. Cached."""

    def __init__(self, graph: Graph, axes: GraphAxes, *, batch: int, precision: Precision) -> None:
        self.memory = TensorMemory(graph, precision)
        self._graph = graph
        self._axes, self._dims = axes.ops, axes.dims
        self._batch = batch
        self._precision = precision
        self._wholes: dict[str, int] = {}
        self._parts: dict[tuple[str, Layout, int], int] = {}
        self._pieces: dict[tuple[str, Layout], bool] = {}  # whether a part is one piece
        self._shapes: dict[tuple[str, OpSplit | None], LocalShapes] = {}

    def shapes(self, op: Op, split: OpSplit | None) -> LocalShapes:
        """Return the sizes of an op on one rank."""
        key = op.name, split
        if key not in self._shapes:
            own, batch = self._axes[op.name], self._batch
            self._shapes[key] = LocalShapes(op, self._graph, own, batch=batch, split=split)
        return self._shapes[key]

    def elements(self, name: str, layout: Layout, degree: int) -> int:
        """Return a rank's number of elements of a tensor; its split axis has ⌈size ÷ degree⌉."""
        if layout.kind is not LayoutKind.SPLIT or degree == 1:
            return self._whole(name)
        key = name, layout, degree
        if key not in self._parts:
            elements = prod(
                local_size(
                    dim, self._batch, axis=layout.axis if at == layout.dim else "", degree=degree
                )
                for at, dim in enumerate(self._dims[name])
            )
            self._parts[key] = round(elements * self._graph.tensors[name].expected)
        return self._parts[key]

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes of a tensor on one rank."""
        dtype = self._graph.tensors[name].dtype
        return self.elements(name, layout, degree) * item_bytes(dtype, self._precision)

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return a rank's bytes of the memory that a tensor lies in.

        A view keeps all of its base's memory, split in the same proportion.
        """
        root = self.memory.root(name)
        if root == name:
            return self.tensor_bytes(name, layout, degree)
        elements = self._whole(root)
        is_split = layout.kind is LayoutKind.SPLIT and degree > 1
        axes = (leaf.name for dim in self._dims[root] for leaf in leaves(dim))
        if is_split and layout.axis in axes:
            part = self.elements(name, layout, degree)
            elements = -(-elements * part // max(1, self._whole(name)))
        return elements * item_bytes(self._graph.tensors[root].dtype, self._precision)

    def is_one_piece(self, name: str, layout: Layout) -> bool:
        """Whether a rank's part of a tensor is one piece of the whole tensor's memory."""
        if layout.kind is not LayoutKind.SPLIT:
            return True
        key = name, layout
        if key not in self._pieces:
            *before, dim = self._dims[name][: layout.dim + 1]
            first = next(leaves(dim)).name == layout.axis and not isinstance(dim, Concat)
            is_one = first and prod(local_size(one, self._batch) for one in before) == 1
            self._pieces[key] = is_one
        return self._pieces[key]

    def _whole(self, name: str) -> int:
        if name not in self._wholes:
            self._wholes[name] = self._graph.tensors[name].expected_numel(self._batch)
        return self._wholes[name]


_COMPUTED = ("computed",)  # determined by the op's computation


class TensorMemory:
    """Which memory each tensor of a graph uses when the model runs on a device."""

    def __init__(self, graph: Graph, precision: Precision) -> None:
        self._graph = graph
        self._precision = precision
        attended = {op.outputs[0] for op in graph.ops if kind_of(op) is OpKind.ATTENTION}
        self._same = {
            op.outputs[0]: op.inputs[0] for op in graph.ops if self._is_same(op, attended)
        }

    def takes_none(self, op: Op) -> bool:
        """Whether an op is a copy in the trace, but returns its input on a device."""
        return op.outputs[0] in self._same

    def root(self, name: str) -> str:
        """Return the tensor that owns this tensor's memory."""
        root = self._graph.tensors[name].storage
        while root in self._same:
            root = self._graph.tensors[self._same[root]].storage
        return root

    def _is_same(self, op: Op, attended: set[str]) -> bool:
        """Whether an op returns its input: a cast to the same dtype, dropout of 0, some reshapes.

        Flash kernels store heads next to features, so a reshape that joins both is a view.
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
        return kinds <= {MODEL_DTYPE, "float32"} and not self._precision.is_half


@dataclass(slots=True, kw_only=True)
class SharedFindings:
    """Results that all pricers of a model share: they do not depend on the device."""

    sizes: dict[tuple[int, Precision], TensorSizes] = field(default_factory=dict)
    fusings: dict[Kernels, Fusing] = field(default_factory=dict)
    # what an op keeps if it is not compiled
    uncompiled: dict[tuple[str, Kernels], tuple[str, ...]] = field(default_factory=dict)

    def sizes_of(
        self, graph: Graph, axes: GraphAxes, *, batch: int, precision: Precision
    ) -> TensorSizes:
        """Return the sizes of the model's tensors and ops at one batch and precision."""
        key = batch, precision
        if key not in self.sizes:
            self.sizes[key] = TensorSizes(graph, axes, batch=batch, precision=precision)
        return self.sizes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeByKernel:
    """A tensor that a kernel saves for its own backward: a mask, statistics, a log-sum-exp."""

    # its dims, as letters of the rule; ("*",): those of the result; _COMPUTED: a formula's
    letters: tuple[str, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """What an op keeps for its backward: operands and results, and tensors that its kernel makes.

    `names` are the operands and results.
    """

    names: tuple[str, ...]
    made: tuple[MadeByKernel, ...]
    shapes: Callable[[OpSplit | None], LocalShapes]

    def own_bytes(self, split: OpSplit | None = None) -> int:
        """Return a rank's bytes of masks, statistics and log-sum-exp."""
        if not self.made:
            return 0
        shapes = self.shapes(split)
        return sum(made_elements(made, shapes) * made.item_bytes for made in self.made)


def made_elements(made: MadeByKernel, shapes: LocalShapes) -> int:
    """Return a rank's number of elements of a tensor that a kernel saves."""
    if made.letters == ("*",):
        return shapes.numel(shapes.op.outputs[0])
    computes = rule_of(shapes.op.target).computes
    if made.letters == _COMPUTED:
        return computes(shapes).kept if computes is not None else 0
    return shapes.letters(made.letters)


def made_by(
    op: Op, *, graph: Graph, precision: Precision, kernels: Kernels
) -> tuple[MadeByKernel, ...]:
    """Return the tensors that an op's kernel saves for its own backward."""
    own = graph.tensors[op.inputs[0]].dtype if op.inputs else MODEL_DTYPE
    return tuple(
        MadeByKernel(
            letters=tuple(entry.what.split()),
            item_bytes=item_bytes(entry.dtype if entry.dtype in ITEM_BYTES else own, precision),
        )
        for entry in _applying(op, graph, kernels)
        if entry.dtype
    )


def names_kept(op: Op, *, graph: Graph, kernels: Kernels) -> Iterator[str]:
    """Yield the operands and results that an op keeps."""
    for entry in _applying(op, graph, kernels):
        if not entry.dtype:
            yield from _named(entry, op)


def keeps_anything(op: Op, graph: Graph, kernels: Kernels) -> bool:
    """Whether an op keeps tensors, or its kernel saves some, for its backward."""
    entries = _applying(op, graph, kernels)
    return any(entry.dtype or any(_named(entry, op)) for entry in entries)


def is_product(op: Op, kernels: Kernels) -> bool:
    """Whether an op is a matrix product, a convolution, or an attention in one kernel."""
    return bool(rule_of(op.target).contracts) and is_one_kernel(op, kernels)


def is_one_kernel(op: Op, kernels: Kernels) -> bool:
    """Whether an op is one kernel; attention with dropout is several if dropout is not fused.

    If it is several, selective recompute keeps only the products, and runs the rest again.
    """
    return kernels.fused_dropout or not dict(op.arguments).get("dropout_p")


def _named(entry: SavedForBackward, op: Op) -> Iterable[str]:
    if entry.what == "out":
        return op.outputs
    if entry.what == "*inputs":
        return op.inputs
    return refs(dict(op.arguments).get(entry.what))


def _applying(op: Op, graph: Graph, kernels: Kernels) -> Iterator[SavedForBackward]:
    if graph.learns(op):
        yield from (
            entry for entry in rule_of(op.target).saves if _applies(entry, op, graph, kernels)
        )


def _applies(entry: SavedForBackward, op: Op, graph: Graph, kernels: Kernels) -> bool:
    if entry.only in ("fused", "unfused"):
        given = dict(op.arguments)
        active = given.get("train", given.get("training")) and given.get("p") != 0
        return bool(active) and kernels.fused_dropout == (entry.only == "fused")
    if not entry.needs:
        return True
    names = refs(dict(op.arguments).get(entry.needs))
    return any(graph.tensors[name].requires_grad for name in names)


def summed_gradients(graph: Graph) -> frozenset[tuple[str, str]]:
    """Return (op, tensor) of second and later uses of tensors: each adds its gradient to a sum."""
    met: set[str] = set()
    again: set[tuple[str, str]] = set()
    for op in graph.ops:
        if graph.learns(op):
            for name in op.inputs:
                tensor = graph.tensors[name]
                if tensor.requires_grad and tensor.origin is TensorOrigin.OP:
                    if name in met:
                        again.add((op.name, name))
                    met.add(name)
    return frozenset(again)
