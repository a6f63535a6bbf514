"""Finds what torch.compile makes of a layer: which ops share a kernel, and which tensors it saves.

Element-wise ops, norms and reductions between two matrix products become one kernel. A kernel reads
tensors that other kernels wrote, and writes those that other kernels read. Tensors between its own
ops never reach memory. The backward is fused likewise, and computes tensors again that are cheap to
compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.ops.case import OpCase, OpSeconds
from autopar.planner.graph.graph import Graph, united
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.rules.rule import OpKind, Traffic
from autopar.planner.rules.table import kind_of, rule_of

_FUSED_KINDS = frozenset(
    (
        *(OpKind.NORM, OpKind.BATCH_NORM, OpKind.SOFTMAX, OpKind.DROPOUT, OpKind.EXPONENTIAL),
        *(OpKind.SUM, OpKind.MEAN, OpKind.CLAMP, OpKind.COPY, OpKind.CAST, OpKind.CONTIGUOUS),
        *(OpKind.JOIN, OpKind.REPEAT, OpKind.FILL, OpKind.RANGE, OpKind.NEW, OpKind.LIKE),
    )
)
_SUMS = frozenset((OpKind.ADDITION, OpKind.SUBTRACTION))
# factor on the price of saving a tensor that the forward would not write to memory otherwise:
# inductor prefers to save tensors that it writes anyway
_UNWRITTEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """The tensors that one op adds to the traffic of its kernel, forward and backward.

    A tensor that several ops of a kernel read is listed with the first of them.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    backward_reads: tuple[str, ...]
    # the op's results whose gradients are read, each once for each kernel that wrote one
    gradients_read: tuple[str, ...]
    gradients_written: tuple[str, ...]  # the operands whose gradients are written
    sums_rows: bool  # a separate kernel sums rows, for the gradients of its weights
    starts_forward: bool  # the launch of a kernel counts with its first op
    starts_backward: bool

    @property
    def launches(self) -> tuple[int, int]:
        """How often the host launches kernels that begin with this op, forward and backward."""
        return int(self.starts_forward), int(self.starts_backward or self.sums_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The fused ops of compiled layers, and the tensors that each op of these layers saves."""

    ops: Mapping[str, FusedOp] = field(default_factory=dict)
    views: frozenset[str] = frozenset()  # ops that move nothing, and are no kernels
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of every compiled op


def fused_seconds(case: OpCase, fused: FusedOp) -> OpSeconds:
    """Return the seconds of the bytes that an op adds to its kernel."""
    forward = [*fused.reads, *fused.writes]
    backward = [*fused.backward_reads, *fused.gradients_read, *fused.gradients_written]
    if case.rule.kind is OpKind.BATCH_NORM:  # its statistics need a separate pass
        forward.append(case.op.inputs[0])
        backward += (case.op.inputs[0], case.result)
    own = _seconds(case, backward, starts=fused.starts_backward)
    if fused.sums_rows:
        own += memory_seconds(2 * case.bytes(case.result), rates=case.memory)
    return OpSeconds(
        forward=_seconds(case, forward, starts=fused.starts_forward),
        input_gradient=own if case.graph.learns(case.op) else 0.0,
    )


def _seconds(case: OpCase, names: Sequence[str], *, starts: bool) -> float:
    moved = sum(map(case.bytes, names))
    if not moved:
        return 0.0
    seconds = memory_seconds(moved, rates=case.memory)
    return seconds if starts else max(0.0, seconds - case.memory.launch_seconds)


class Fusing:
    """Finds how the ops of compiled layers are fused, for microbatches of all sizes.

    `root` returns the tensor that owns a tensor's memory, `kept` the tensors that an op saves
    without torch.compile.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Iterable[Sequence[Op]],
        *,
        root: Callable[[str], str],
        kept: Callable[[Op], Sequence[str]],
    ) -> None:
        self._layers = [_Layer(graph, ops, root, kept) for ops in layers if ops]
        # by the layer's number, and by the tensors that it saves
        self._known: dict[tuple[int, frozenset[str]], Fusion] = {}

    def at(self, size: Callable[[str], int]) -> Fusion:
        """Return how ops are fused if tensors have these bytes."""
        found = [self._of(at, _saved(layer, size)) for at, layer in enumerate(self._layers)]
        return Fusion(
            ops={name: op for one in found for name, op in one.ops.items()},
            views=frozenset(name for one in found for name in one.views),
            saved={name: names for one in found for name, names in one.saved.items()},
        )

    def _of(self, number: int, saves: frozenset[str]) -> Fusion:
        """Return how the ops of one layer are fused if it saves these tensors."""
        if (number, saves) not in self._known:
            layer, ops = self._layers[number], dict[str, FusedOp]()
            for kernel in layer.kernels:
                ops.update(_fused(layer, kernel, _needed(layer, kernel, saves)))
            saved = dict.fromkeys((op.name for op in layer.all), ()) | dict(_savers(layer, saves))
            views = frozenset(op.name for op in layer.all if op not in layer.ops)
            self._known[number, saves] = Fusion(ops=ops, views=views, saved=saved)
        return self._known[number, saves]


def is_view(op: Op) -> bool:
    """Whether an op moves nothing."""
    rule = rule_of(op.target)
    return rule.traffic is Traffic.NONE and rule.kind not in _FUSED_KINDS


def is_fused(op: Op) -> bool:
    """Whether inductor writes an op's code itself, and may fuse it with others."""
    rule = rule_of(op.target)
    if rule.contracts or rule.computes is not None or is_view(op):
        return False
    return rule.is_elementwise or rule.kind in _FUSED_KINDS


class _Layer:
    """The ops of a layer except views, the tensors between them, and the kernels they form."""

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[Op],
        root: Callable[[str], str],
        kept: Callable[[Op], Sequence[str]],
    ) -> None:
        self.graph = graph
        self.root = root
        self.all = tuple(ops)
        self.ops = tuple(
            op for op in ops if not is_view(op) and any(root(name) == name for name in op.outputs)
        )
        self.inputs = {op.name: tuple(dict.fromkeys(map(root, op.inputs))) for op in self.ops}
        self.kept = {op.name: tuple(dict.fromkeys(kept(op))) for op in self.ops}
        self.makers = {root(name): op for op in self.ops for name in op.outputs}
        self.readers: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            for name in self.inputs[op.name]:
                self.readers[name].append(op)
        inside = {op.name for op in ops}
        self.leaving = {
            root(name)
            for op in ops
            for name in op.outputs
            if any(one.name not in inside for one in graph.index.readers[name])
        }
        self.kernels = self._kernels()
        self.kernel = {op.name: at for at, ops in enumerate(self.kernels) for op in ops}

    def _kernels(self) -> list[list[Op]]:
        """Return each kernel's ops: connected fused ops with equally many products before them.

        Otherwise a kernel could need the result of a product that needs a result of this kernel.
        """
        depth: dict[str, int] = {}
        joined: list[tuple[str, str]] = []
        for op in self.ops:
            makers = [self.makers[name] for name in self.inputs[op.name] if name in self.makers]
            depth[op.name] = max(
                (depth[one.name] + (not (is_fused(one) and is_fused(op))) for one in makers),
                default=0,
            )
            joined += [
                (one.name, op.name)
                for one in makers
                if is_fused(one) and is_fused(op) and depth[one.name] == depth[op.name]
            ]
        fused, groups = list(filter(is_fused, self.ops)), defaultdict[str, list[Op]](list)
        first = united((op.name for op in fused), joined)
        for op in fused:
            groups[first[op.name]].append(op)
        return list(groups.values())

    @cached_property
    def network(self) -> _Network:
        """The network whose minimum cut gives the tensors that the layer saves."""
        edges: list[tuple[tuple[str, str], tuple[str, str], _Size]] = []
        must: set[str] = set()
        for op in self.ops:
            for name in filter(self.is_activation, map(self.root, self.kept[op.name])):
                if op.name in self.kernel:
                    edges.append(((name, "out"), _BACKWARD, None))
                else:
                    must.add(name)
        tensors = [*self.makers, *(name for names in self.inputs.values() for name in names)]
        names = [name for name in dict.fromkeys(tensors) if self.is_activation(name)]
        for name in names:
            factor = 0 if name in must else 1 if self.is_written(name) else _UNWRITTEN
            edges.append(((name, "in"), (name, "out"), (name, factor)))
            maker = self.makers.get(name)
            if maker is None or maker.name not in self.kernel or name in must:
                edges.append((_FORWARD, (name, "in"), None))
                continue
            for given in filter(self.is_activation, self.inputs[maker.name]):
                edges.append(((given, "out"), (name, "in"), None))
        nodes = {_FORWARD: 0, _BACKWARD: 1}
        for one in (node for begin, end, _ in edges for node in (begin, end)):
            nodes.setdefault(one, len(nodes))
        sides = [(name, nodes[name, "in"], nodes[name, "out"]) for name in names]
        return sides, frozenset(must), [(nodes[a], nodes[b], size) for a, b, size in edges]

    def is_activation(self, name: str) -> bool:
        """Whether a tensor depends on the batch."""
        return self.graph.tensors[name].origin in (TensorOrigin.OP, TensorOrigin.INPUT)

    def is_made_in(self, tensor: str, kernel: int | None) -> bool:
        """Whether an op of a kernel makes a tensor; None: an op outside of all fused kernels."""
        maker = self.makers.get(tensor)
        return maker is not None and self.kernel.get(maker.name) == kernel

    def readers_in(self, tensor: str, kernel: int) -> list[Op]:
        """Return the ops of a kernel that read a tensor."""
        return [op for op in self.readers[tensor] if self.kernel.get(op.name) == kernel]

    def readers_outside(self, tensor: str, kernel: int) -> list[Op]:
        """Return the ops of the layer that read a tensor and belong to other kernels."""
        return [op for op in self.readers[tensor] if self.kernel.get(op.name) != kernel]

    def is_written(self, tensor: str) -> bool:
        """Whether a tensor reaches memory, because another kernel or another layer reads it."""
        if self.is_made_in(tensor, None) or tensor not in self.makers or tensor in self.leaving:
            return True
        return bool(self.readers_outside(tensor, self.kernel[self.makers[tensor].name]))


def _saved(layer: _Layer, size: Callable[[str], int]) -> frozenset[str]:
    """Return the tensors in memory from which the backward computes all others that it needs.

    Operands of products are saved, because the products of the backward read them from memory.
    Other tensors are computed again where it takes less memory to save what they are computed from:
    a minimum cut, as in torch's partitioner.
    """
    sides, must, edges = layer.network
    before = _before_cut(tuple((a, b, x and size(x[0]) * x[1]) for a, b, x in edges))
    return must | {x for x, begin, end in sides if begin in before and end not in before}


# an edge that is cut costs the bytes of a tensor, times a factor; None: it is never cut
_Size = tuple[str, int] | None
# tensors that may be saved, each with its two nodes; those that must be; the edges
_Network = tuple[list[tuple[str, int, int]], frozenset[str], list[tuple[int, int, _Size]]]
_FORWARD, _BACKWARD = ("", "forward"), ("", "backward")


@lru_cache(maxsize=1024)  # equal layers have equal cuts
def _before_cut(edges: tuple[tuple[int, int, int | None], ...]) -> frozenset[int]:
    """Return the nodes on the side of node 0 in the minimum cut between 0 and 1."""
    import networkx as nx  # slow to import, and cached plans need no cut

    cut: nx.DiGraph = nx.DiGraph()
    for begin, end, size in edges:
        cut.add_edge(begin, end, **({} if size is None else {"capacity": size}))
    if 0 not in cut or 1 not in cut:
        return frozenset()
    _, (before, _) = nx.minimum_cut(cut, 0, 1)
    return frozenset(before)


def _savers(layer: _Layer, saved: frozenset[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each op with the tensors that it saves, by the names under which the op reads them.

    A tensor that no op would save without torch.compile counts with the first op that reads it.
    """
    left = saved - {layer.root(name) for names in layer.kept.values() for name in names}
    for op in layer.ops:
        added = [name for name in op.inputs if layer.root(name) in left]
        left -= set(map(layer.root, added))
        own = [name for name in layer.kept[op.name] if layer.root(name) in saved]
        yield op.name, tuple(dict.fromkeys((*own, *added)))


def _needed(layer: _Layer, ops: Sequence[Op], saved: frozenset[str]) -> frozenset[str]:
    """Return the saved tensors from which a kernel's backward computes what it needs."""
    found: set[str] = set()
    met: set[str] = set()
    left = [layer.root(name) for op in ops for name in layer.kept[op.name]]
    while left:
        name = left.pop()
        if name in met or not layer.is_activation(name):
            continue
        met.add(name)
        if name in saved or name not in layer.makers:
            found.add(name)
        else:
            left += layer.inputs[layer.makers[name].name]
    return frozenset(found)


def _fused(
    layer: _Layer, ops: Sequence[Op], needed: frozenset[str]
) -> Iterator[tuple[str, FusedOp]]:
    """Yield the ops of a kernel with the tensors that it reads and writes."""
    number = layer.kernel[ops[0].name]
    read, read_again, gradients = set[str](), set[str](), set[str]()
    runs_forward = runs_backward = False
    for op in ops:
        outside = [name for name in dict.fromkeys(op.inputs)
                   if not layer.is_made_in(layer.root(name), number)]  # fmt: skip
        learned = [name for name in outside if layer.graph.tensors[name].requires_grad]
        writes = [name for name in op.outputs if layer.root(name) == name
                  and layer.is_written(name)]  # fmt: skip
        reads = _first(layer, outside, read)
        again = _first(
            layer, [x for x in (*op.inputs, *writes) if layer.root(x) in needed], read_again
        )
        gradients_read = list(_gradients_read(layer, op, number))
        gradients_written = []
        for name in learned:
            target = _gradient_written(layer, layer.root(name), number)
            if layer.is_activation(layer.root(name)) and target and target not in gradients:
                gradients.add(target)
                gradients_written.append(name)
        sums_rows = any(not layer.is_activation(layer.root(name)) for name in learned)
        forward = bool(reads or writes)
        backward = bool(again or gradients_written or (gradients_read and (gradients or sums_rows)))
        yield (
            op.name,
            FusedOp(
                reads=tuple(reads),
                writes=tuple(writes),
                backward_reads=tuple(again),
                gradients_read=tuple(gradients_read),
                gradients_written=tuple(gradients_written),
                sums_rows=sums_rows,
                starts_forward=forward and not runs_forward,
                starts_backward=backward and not runs_backward,
            ),
        )
        runs_forward |= forward
        runs_backward |= backward


def _first(layer: _Layer, names: Iterable[str], met: set[str]) -> list[str]:
    """Return the names whose memory is not in `met` yet, and add that memory to `met`."""
    found = []
    for name in names:
        if layer.root(name) not in met:
            met.add(layer.root(name))
            found.append(name)
    return found


def _gradients_read(layer: _Layer, op: Op, kernel: int) -> Iterator[str]:
    """Yield a result for each gradient of it that another kernel or layer has written."""
    for name in op.outputs:
        for reader in layer.readers_outside(layer.root(name), kernel):
            if layer.graph.learns(reader):
                yield name
        if layer.root(name) in layer.leaving:
            yield name


def _gradient_written(layer: _Layer, tensor: str, kernel: int) -> str:
    """Return the tensor under whose name a kernel that reads `tensor` writes its gradient.

    Usually this is `tensor` itself. If the kernel only adds it to others, the sum has the same
    gradient, so this is the sum, where others read that, too. Returns "" if another kernel writes
    the gradient of the sum.
    """
    while inside := layer.readers_in(tensor, kernel):
        (reader, *others) = inside
        result = layer.root(reader.outputs[0])
        sizes = {layer.graph.tensors[name].numel for name in (tensor, result)}
        if others or kind_of(reader) not in _SUMS or len(sizes) > 1:
            return tensor
        is_used = bool(layer.readers_outside(result, kernel)) or result in layer.leaving
        if is_used and layer.readers_in(result, kernel):
            return result
        tensor = result
    return ""
